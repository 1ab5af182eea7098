"""Check over a Unix socket whether a Docker engine answers."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path

DEFAULT_SOCKET = Path("/var/run/docker.sock")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def answers(path: Path, *, timeout_s: float = 2.0) -> bool:
    """Return True if an engine answers ``GET /_ping`` on this Unix socket."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request("GET", "/_ping")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_until_it_answers(path: Path, *, timeout_s: float) -> bool:
    """Poll until an engine answers; False if none answers in time."""
    deadline = time.monotonic() + timeout_s
    while not answers(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
