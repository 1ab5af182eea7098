"""A program as a child process in its own session, with pipes, and without remaining processes at its end."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread

_SAID_BYTES = 4096
_GRACE_S = 2.0


class Program:
    """The running program. Thread-safe: one thread may read while another writes and a third closes.

    It has its own session, so that Ctrl-C reaches only gpurun and `close` ends all processes of the program.

    Raises:
        OSError, ValueError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
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
        self._closed = False  # Paramiko reads it, so the name must stay
        self._said = b""
        self._ended = Event()
        atexit.register(self._hang_up)

    def _listen(self) -> None:
        with suppress(BlockingIOError, KeyError):
            text = os.read(self._stderr, _SAID_BYTES)
            self._hear(text)
            if not text:
                self._readable.unregister(self._stderr)

    def _hear(self, text: bytes) -> None:
        """Take a piece of the program's stderr; empty at its end."""
        self._said = (self._said + text)[-_SAID_BYTES:]

    def close(self) -> None:
        """End the program, without waiting for its end. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        Thread(target=self._end, name="end of a program", daemon=True).start()

    def _hang_up(self, signal_number: int = signal.SIGHUP) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)

    def _exited(self) -> os.waitid_result | None:
        """Return how the program ended; None while it runs. Does not reap it, so that its pid stays reserved."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)

    def _end(self) -> None:
        self._hang_up()
        end_s = time.monotonic() + _GRACE_S
        while time.monotonic() < end_s and self._exited() is None:
            time.sleep(0.02)
        self._hang_up(signal.SIGKILL)
        atexit.unregister(self._hang_up)
        self._process.wait()
        with self._reading, self._writing:
            self._listen()
            for stream in self._streams:
                stream.close()
        self._ended.set()

    def _close_and_wait(self) -> None:
        self.close()
        self._ended.wait(2 * _GRACE_S)
