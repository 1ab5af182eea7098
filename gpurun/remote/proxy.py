"""A ProxyCommand, run in OpenSSH's way: ``exec COMMAND`` in the user's shell, with pipes at stdin and stdout."""

from __future__ import annotations

import os
from contextlib import suppress

from gpurun.remote.program import Program

_TICK_MS = 100


class ProxyProgram(Program):
    """The running program, as a socket for Paramiko."""

    def __init__(self, command: str) -> None:
        super().__init__([os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"])

    def settimeout(self, timeout_s: float | None) -> None:
        """Do nothing: `recv` and `send` never wait for long, and Paramiko calls them again."""

    def recv(self, count: int) -> bytes:
        """Return bytes from the host; empty at the end. Raises TimeoutError."""
        with self._reading:
            if self._closed:
                return b""
            ready = {descriptor for descriptor, _ in self._readable.poll(_TICK_MS)}
            if self._stderr in ready:
                self._listen()
            if self._stdout in ready:
                return os.read(self._stdout, count)
        raise TimeoutError

    def send(self, data: bytes) -> int:
        """Return the number of bytes that the program took. Raises TimeoutError; another OSError if it has ended."""
        with self._writing:
            if self._closed:
                raise BrokenPipeError
            if self._writable.poll(_TICK_MS):
                with suppress(BlockingIOError):
                    return os.write(self._stdin, data)
        raise TimeoutError

    def last_words(self) -> str:
        """End the program, and return the last line that it printed to stderr."""
        self._close_and_wait()
        lines = self._said.decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
