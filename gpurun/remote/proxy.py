"""A ProxyCommand, run as OpenSSH runs it: ``exec COMMAND`` in the user's shell, with pipes at stdin and stdout."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from threading import Event, Lock, Thread

_SAID_BYTES = 4096
_GRACE_S = 2.0
_TICK_MS = 100


class ProxyProgram:
    """The running program, as a socket for Paramiko.

    It has a session of its own, so that Ctrl-C reaches gpurun alone and `close` ends all parts of a pipeline.
    """

    def __init__(self, command: str) -> None:
        pipe, shell = subprocess.PIPE, os.environ.get("SHELL") or "/bin/sh"
        self._process = subprocess.Popen(
            [shell, "-c", f"exec {command}"], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (stream.fileno() for stream in self._streams)
        self._readable, self._writable = select.poll(), select.poll()
        for descriptor in (self._stdout, self._stderr):
            self._readable.register(descriptor, select.POLLIN)
        self._writable.register(self._stdin, select.POLLOUT)
        for descriptor in (self._stdin, self._stderr):
            os.set_blocking(descriptor, False)
        self._reading, self._writing, self._closing = Lock(), Lock(), Lock()
        self._closed = False  # Paramiko looks at it, under this very name
        self._said = b""
        self._ended = Event()
        atexit.register(self._hang_up)

    def settimeout(self, timeout_s: float | None) -> None:
        """Nothing: `recv` and `send` never wait for long, and Paramiko calls them again."""

    def recv(self, count: int) -> bytes:
        """What the host sent; nothing at its end. Raises TimeoutError."""
        with self._reading:
            if self._closed:
                return b""
            ready = {descriptor for descriptor, _ in self._readable.poll(_TICK_MS)}
            if self._stderr in ready:
                self._listen()
            if self._stdout in ready:
                return os.read(self._stdout, count)
        raise TimeoutError

    def _listen(self) -> None:
        with suppress(BlockingIOError, KeyError):
            text = os.read(self._stderr, _SAID_BYTES)
            self._said = (self._said + text)[-_SAID_BYTES:]
            if not text:
                self._readable.unregister(self._stderr)

    def send(self, data: bytes) -> int:
        """How many bytes the program took. Raises TimeoutError; another OSError if it has ended."""
        with self._writing:
            if self._closed:
                raise BrokenPipeError
            if self._writable.poll(_TICK_MS):
                with suppress(BlockingIOError):
                    return os.write(self._stdin, data)
        raise TimeoutError

    def close(self) -> None:
        """End the program, without waiting for its end. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        Thread(target=self._end, name="end of a ProxyCommand", daemon=True).start()

    def _hang_up(self, signal_number: int = signal.SIGHUP) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)

    def _end(self) -> None:
        self._hang_up()
        end_s = time.monotonic() + _GRACE_S
        # The program is not reaped yet: until then nobody else gets its number, and so its group's.
        seen = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < end_s and os.waitid(os.P_PID, self._process.pid, seen) is None:
            time.sleep(0.02)
        self._hang_up(signal.SIGKILL)
        atexit.unregister(self._hang_up)
        self._process.wait()
        with self._reading, self._writing:
            self._listen()
            for stream in self._streams:
                stream.close()
        self._ended.set()

    def last_words(self) -> str:
        """End the program, and return the last line that it printed to stderr."""
        self.close()
        self._ended.wait(2 * _GRACE_S)
        lines = self._said.decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
