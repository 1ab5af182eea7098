"""Read the measured runs of campaigns: ``scaling/NAME/samples.jsonl`` in the state directory, one run per line."""

from __future__ import annotations

import re
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.inventory.load import read
from gpurun.scaling.samples import Sample, decode
from gpurun.state.path import StatePath

MOST_BYTES = 16 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def samples_file(home: Path, name: str) -> StatePath | None:
    """Return the samples file of a campaign; None if the name is not valid for a campaign."""
    return StatePath(home) / "scaling" / name / "samples.jsonl" if NAME.fullmatch(name) else None


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Return the samples of a file.

    Raises:
        BadInput: the file is unreadable, or a line is not a sample.
    """
    return _decoded(read(path, "measured runs", most_bytes=MOST_BYTES), str(path))


def _decoded(data: bytes, where: str) -> tuple[Sample, ...]:
    if len(data) > MOST_BYTES:
        raise BadInput(f"the file has more than {MOST_BYTES >> 20} MiB of measured runs", where=where)
    return decode(data, where)


def campaign_samples(home: Path, name: str, launcher: str) -> tuple[Sample, ...]:
    """Return the samples of a campaign for one launcher; empty if there are none.

    Raises:
        BadInput: a line is not a sample.
        StateError: the file is unreadable, or a link.
    """
    path = samples_file(home, name)
    if path is None:
        return ()
    try:
        with path.reader() as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    return tuple(sample for sample in _decoded(data, str(path)) if sample.launcher in ("", launcher))
