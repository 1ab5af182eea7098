"""A folder for TensorBoard with one run per job. It contains only links to event files of the jobs' outputs.

Outputs come from hosts, and hosts may be hostile. TensorBoard follows any link and reads any file that a plugin's
settings name. So it never gets the outputs themselves. It gets only regular files with the names of event files, and
gpurun finds them without following links.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EVENTS = b"tfevents"
"""The part that each event file has in its name (TensorBoard's `io_wrapper.IsTensorFlowEventsFile`)."""
_TRACE = re.compile(rb"(\.trace|timeline[^/]*)\.json(\.gz)?$")
_ODD = re.compile(r"[^\w.,=+ -]|^\.+")
MOST_FILES = 100_000
"""Limit for the files of one run that gpurun examines."""

Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class ShownRun:
    """A job under its name in TensorBoard.

    Attributes:
        outputs: the head's copy of its outputs; it may not exist yet.
    """

    name: str
    outputs: Path


@dataclass(frozen=True)
class Trace:
    """A recording for a trace viewer: Horovod's timeline, or a profile of PyTorch."""

    run: ShownRun
    parts: Parts
    size: int

    @property
    def name(self) -> str:
        """The run and the path in its outputs, for display."""
        return f"{self.run.name}/{b'/'.join(self.parts).decode('utf-8', 'replace')}"


def run_name(text: str) -> str:
    """Return a valid folder name: no separator, no leading dot, no character with a meaning for a terminal or HTML."""
    return _ODD.sub("_", text)[:100] or "_"


class Shown:
    """A folder for TensorBoard; `refresh` updates it from the outputs.

    Args:
        folder: an empty folder that only gpurun uses.
    """

    def __init__(self, folder: Path, runs: Sequence[ShownRun]) -> None:
        self.folder = folder
        self.runs = tuple(runs)
        self.traces: tuple[Trace, ...] = ()
        self._linked: set[Path] = set()

    def refresh(self) -> int:
        """Link new event files and unlink removed ones. Returns the number of event files."""
        found: dict[Path, Path] = {}
        traces = []
        for run in self.runs:
            for parts, size in _regular_files(run.outputs):
                path = b"/".join(parts)
                if EVENTS in parts[-1]:
                    found[self.folder / run.name / path.decode("utf-8", "replace")] = run.outputs / os.fsdecode(path)
                elif _TRACE.search(parts[-1]):
                    traces.append(Trace(run, parts, size))
        for gone in self._linked - found.keys():
            gone.unlink(missing_ok=True)
        for link in found.keys() - self._linked:
            with suppress(OSError):  # a file has become a folder, or the name is too long here
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(found[link])
        self._linked, self.traces = {link for link in found if link.is_symlink()}, tuple(traces)
        return len(found)


def _regular_files(top: Path) -> Iterator[tuple[Parts, int]]:
    """Return the regular files below a folder with their sizes. Follows no links. Empty if the folder is missing."""
    above = len(os.fsencode(top).split(b"/"))
    seen = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        for folder, _, names, descriptor in os.fwalk(os.fsencode(top), follow_symlinks=False):
            for name in names:
                seen += 1
                if seen > MOST_FILES:
                    return
                with suppress(OSError):
                    found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield (*folder.split(b"/")[above:], name), found.st_size
