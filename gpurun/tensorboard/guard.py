"""TensorBoard behind a token, with an additional page for the traces in the outputs."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from gpurun.errors import GpurunError
from gpurun.loopback.door import App, Door, Environ, StartResponse, say
from gpurun.node.folder.below import Cursor, open_regular, open_top
from gpurun.tensorboard.shown import Shown, Trace

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
        rows = "".join(
            f'<li><a href="{TRACES}/{number}" download>{html.escape(trace.name)}</a> ({trace.size:,} bytes)</li>'
            for number, trace in enumerate(self._shown.traces)
        )
        page = (
            '<!doctype html><meta charset="utf-8"><title>Traces</title><h1>Traces</h1>'
            f"<ul>{rows or '<li>none</li>'}</ul>"
            "<p>Open a downloaded file in Perfetto's viewer, or in Chrome at chrome://tracing.</p>"
        )
        return say(start, "200 OK", page, kind="text/html; charset=utf-8")

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
