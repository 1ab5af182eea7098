"""Gives metrics to Prometheus: a file for node_exporter's textfile collector, or an HTTP server."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gpurun.errors import BadInput, GpurunError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_S = 5.0
"""Scrapes within this time get the same text: several of them cost no more than one."""
CLIENT_S = 10.0


def write_textfile(path: Path, text: str) -> None:
    """Replace a file, whole: node_exporter reads the old one or the new one.

    Raises:
        BadInput: the name does not end in ``.prom``, or the file cannot be written.
    """
    if path.suffix != ".prom":
        raise BadInput(
            "the textfile's name must end in .prom", where=str(path), hint="node_exporter reads only .prom files"
        )
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)  # node_exporter runs as another user
                file.write(text)
            draft.replace(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        raise BadInput(f"the metrics cannot be written: {error.strerror}", where=str(path)) from error


class Scraped:
    """The text for scrapes, made again when it is old. One thread makes it; the others wait for that."""

    def __init__(self, make: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock, self._lock = make, clock, threading.Lock()
        self._text, self._made_s = "", -FRESH_S

    def text(self) -> str:
        """The metrics. Raises GpurunError."""
        with self._lock:
            if self._clock() - self._made_s >= FRESH_S:
                self._text = self._make()
                self._made_s = self._clock()
            return self._text


def address_of(text: str) -> tuple[str, int]:
    """``9836``, ``:9836`` or ``HOST:9836``; loopback unless a host is named. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise BadInput(f"--serve: {text!r} is not an address", hint="give a port, or HOST:PORT such as 10.0.0.1:9836")
    return host.strip("[]") or "127.0.0.1", int(port)


def server(address: tuple[str, int], scraped: Scraped) -> ThreadingHTTPServer:
    """Return a server that answers only ``GET /metrics``.

    Raises:
        BadInput: gpurun cannot listen on this address.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S
        server_version, sys_version = "gpurun", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(404, "gpurun: the metrics are at /metrics\n")
                return
            try:
                self._answer(200, scraped.text())
            except GpurunError as error:
                self._answer(500, f"gpurun: {error.message}\n")

        def _answer(self, code: int, text: str) -> None:
            data = text.encode("utf-8", "replace")
            self.send_response(code)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line."""

    class MetricsServer(ThreadingHTTPServer):
        address_family = 10 if ":" in address[0] else 2  # AF_INET6, AF_INET

        def handle_error(self, *_: object) -> None:
            """A client that went away is not worth a traceback."""

    try:
        return MetricsServer(address, Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"cannot listen at {address[0]}:{address[1]}: {why}", hint="choose another address or port"
        ) from error
