"""Read what campaigns measured: ``scaling/NAME/samples.jsonl`` in the state directory, one run a line."""

from __future__ import annotations

import re
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.inventory.load import read
from gpurun.scaling.samples import Sample, decode

MOST_BYTES = 16 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def samples_file(home: Path, name: str) -> Path | None:
    """Where the samples of a campaign of this name are; None if no campaign can have the name."""
    return home / "scaling" / name / "samples.jsonl" if NAME.fullmatch(name) else None


def read_samples(path: Path) -> tuple[Sample, ...]:
    """The samples of a file.

    Raises:
        BadInput: it cannot be read, or a line is no sample.
    """
    data = read(path, "measured runs", most_bytes=MOST_BYTES)
    if len(data) > MOST_BYTES:
        raise BadInput(f"more than {MOST_BYTES >> 20} MiB of measured runs", where=str(path))
    return decode(data, str(path))


def campaign_samples(home: Path, name: str, launcher: str) -> tuple[Sample, ...]:
    """The samples of a campaign, of one launcher; empty if there are none.

    Raises:
        BadInput: the file cannot be read.
    """
    path = samples_file(home, name)
    if path is None or not path.exists():
        return ()
    return tuple(sample for sample in read_samples(path) if sample.launcher in ("", launcher))
