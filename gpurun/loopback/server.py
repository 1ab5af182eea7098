"""The standard library's WSGI server on 127.0.0.1, with a thread for each request."""

from __future__ import annotations

import threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from gpurun.errors import BadInput
from gpurun.loopback.door import Door

SILENT_S = 30.0
"""A connection on which nothing comes for so long is closed: anybody on the machine can open one."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore a browser that disconnected, or a malformed request."""


class _Request(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, *_: object) -> None:
        """Log nothing, because nobody reads it."""

    def address_string(self) -> str:
        return "127.0.0.1"


def serve(door: Door, port: int | None) -> int:
    """Start to serve, in threads that end with the process. Returns the port.

    Args:
        port: None = any free port.

    Raises:
        BadInput: the port is in use.
    """
    try:
        server = _Server(("127.0.0.1", port or 0), _Request)
    except OSError as error:
        raise BadInput(
            f"gpurun cannot use port {port} of 127.0.0.1: {error.strerror}",
            hint="leave out --port: gpurun then finds a free port",
        ) from error
    server.set_app(door)
    threading.Thread(target=server.serve_forever, name="web", daemon=True).start()
    return int(server.server_address[1])
