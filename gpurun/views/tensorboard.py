"""TensorBoard on the head, for jobs and sweeps.

`Shown` chooses the output files to show, and keeps a folder with links to them. `Guard` checks the token. Only `board`
imports TensorBoard, which is an extra.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpurun.errors import GpurunError
from gpurun.markup import element, page
from gpurun.node.folder.below import Cursor, open_regular, open_top
from gpurun.views.loopback import App, Door, Environ, StartResponse, say

# A folder for TensorBoard with one run per job. It contains only links to event files of the jobs' outputs.


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


# TensorBoard behind a token, with an additional page for the traces in the outputs.


TRACES = "/traces"
CHUNK_BYTES = 1 << 18


class Guard(Door):
    """TensorBoard's application behind a token, because TensorBoard itself has no authentication."""

    def __init__(self, inner: App, shown: Shown, token: str) -> None:
        super().__init__(self._route, token, "gpurun tensorboard")
        self._board, self._shown = inner, shown

    def _route(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == TRACES:
            return self._list(start)
        if path.startswith(f"{TRACES}/"):
            return self._send(path.rpartition("/")[2], start)
        return self._board(environ, start)

    def _list(self, start: StartResponse) -> Iterable[bytes]:
        rows = [
            element("li", element("a", trace.name, href=f"{TRACES}/{number}", download=""), f" ({trace.size:,} bytes)")
            for number, trace in enumerate(self._shown.traces)
        ]
        advice = "Open a downloaded file in Perfetto's viewer, or in Chrome at chrome://tracing."
        listed = element("ul", *(rows or [element("li", "none")]))
        shown = page("Traces", element("h1", "Traces"), listed, element("p", advice))
        return say(start, "200 OK", shown, kind="text/html; charset=utf-8")

    def _send(self, number: str, start: StartResponse) -> Iterable[bytes]:
        traces = self._shown.traces
        if not number.isascii() or not number.isdigit() or int(number[:9]) >= len(traces):
            return say(start, "404 Not Found", "gpurun: there is no such trace.\n")
        trace = traces[int(number[:9])]
        try:
            file = _opened(trace)
        except (OSError, GpurunError) as error:
            return say(start, "404 Not Found", f"gpurun: the trace cannot be read: {error.__class__.__name__}\n")
        name = trace.parts[-1].decode("ascii", "replace").replace("\ufffd", "_").replace('"', "_")
        start("200 OK", [
            ("Content-Type", "application/octet-stream"), ("X-Content-Type-Options", "nosniff"),
            ("Content-Length", str(os.fstat(file.fileno()).st_size)),
            ("Content-Disposition", f'attachment; filename="{_printable(name)}"'),
        ])  # fmt: skip
        return _chunks(file)


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "_" for letter in name)


def _opened(trace: Trace) -> BinaryIO:
    """Open the trace's file without following links, whatever happened to the outputs since the listing."""
    top = open_top(str(trace.run.outputs))
    try:
        with Cursor(top) as cursor:
            descriptor, _ = open_regular(cursor.at(trace.parts[:-1]), trace.parts[-1])
    finally:
        os.close(top)
    return os.fdopen(descriptor, "rb")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    left = os.fstat(file.fileno()).st_size  # the size in the header: the file may grow
    with file:
        while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
