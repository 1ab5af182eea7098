"""What is shown of jobs' outputs: a folder with a run for each job, which has links to its event files, and no others.

Outputs come from hosts, and hosts may lie. TensorBoard follows any link and reads whatever a plugin's settings name. So
it is never given the outputs themselves: only regular files that are called as event files are, each looked up without
following a link.
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
"""What each event file has in its name (TensorBoard's `io_wrapper.IsTensorFlowEventsFile`)."""
_TRACE = re.compile(rb"(\.trace|timeline[^/]*)\.json(\.gz)?$")
_ODD = re.compile(r"[^\w.,=+ -]|^\.+")
MOST_FILES = 100_000
"""Of one run, that are looked at."""

Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class ShownRun:
    """A job as TensorBoard calls it.

    Attributes:
        outputs: the head's copy of its outputs; it may not be there yet.
    """

    name: str
    outputs: Path


@dataclass(frozen=True)
class Trace:
    """A recording for a viewer of traces: Horovod's timeline, or a profile of PyTorch."""

    run: ShownRun
    parts: Parts
    size: int

    @property
    def name(self) -> str:
        """The run and the path in its outputs, for people."""
        return f"{self.run.name}/{b'/'.join(self.parts).decode('utf-8', 'replace')}"


def run_name(text: str) -> str:
    """A name as a folder can have it: no separator, nothing hidden, nothing that a terminal or a page would take."""
    return _ODD.sub("_", text)[:100] or "_"


class Shown:
    """A folder for TensorBoard; `refresh` makes it follow the outputs.

    Args:
        folder: an empty folder of our own.
    """

    def __init__(self, folder: Path, runs: Sequence[ShownRun]) -> None:
        self.folder = folder
        self.runs = tuple(runs)
        self.traces: tuple[Trace, ...] = ()
        self._linked: set[Path] = set()

    def refresh(self) -> int:
        """Link what is new and unlink what is gone; how many event files there are."""
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
            with suppress(OSError):  # what was a file is a folder now, or the name is too long here
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(found[link])
        self._linked, self.traces = {link for link in found if link.is_symlink()}, tuple(traces)
        return len(found)


def _regular_files(top: Path) -> Iterator[tuple[Parts, int]]:
    """Regular files below a folder and their sizes; no link is followed. None if it is not there."""
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
