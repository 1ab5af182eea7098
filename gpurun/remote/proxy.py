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
_TICK_S = 0.2


class ProxyProgram:
    """The running program, as a socket for Paramiko.

    It has a session of its own, so that Ctrl-C reaches gpurun alone and `close` ends all parts of a pipeline.
    """

    def __init__(self, command: str) -> None:
        shell = os.environ.get("SHELL") or "/bin/sh"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [shell, "-c", f"exec {command}"], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self._stdin.fileno(), False)
        self._reading, self._writing, self._closing = Lock(), Lock(), Lock()
        self._timeout_s: float | None = None
        self._read_from = select.poll()
        for stream in (self._stdout, self._stderr):
            self._read_from.register(stream, select.POLLIN)
        self._write_to = select.poll()
        self._write_to.register(self._stdin, select.POLLOUT)
        self._closed = False  # Paramiko looks at it, under this very name
        self._said = b""
        self._ended = Event()
        atexit.register(self._hang_up)

    def settimeout(self, timeout_s: float | None) -> None:
        """How long `recv` and `send` wait; None = until the program ends."""
        self._timeout_s = timeout_s

    def recv(self, count: int) -> bytes:
        """What the host sent; nothing at its end. Raises TimeoutError."""
        end_s = _end_s(self._timeout_s)
        while time.monotonic() < end_s:
            with self._reading:
                if self._closed:
                    return b""
                ready = {descriptor for descriptor, _ in self._read_from.poll(_tick_ms(end_s))}
                if self._stderr.fileno() in ready:
                    self._listen()
                if self._stdout.fileno() in ready:
                    return os.read(self._stdout.fileno(), count)
        raise TimeoutError

    def _listen(self) -> None:
        text = os.read(self._stderr.fileno(), _SAID_BYTES)
        self._said = (self._said + text)[-_SAID_BYTES:]
        if not text:
            with suppress(KeyError):
                self._read_from.unregister(self._stderr)

    def send(self, data: bytes) -> int:
        """How many bytes the program took. Raises TimeoutError; OSError if it has ended."""
        end_s = _end_s(self._timeout_s)
        while time.monotonic() < end_s:
            with self._writing:
                if self._closed:
                    raise BrokenPipeError
                with suppress(BlockingIOError):
                    return os.write(self._stdin.fileno(), data)
                self._write_to.poll(_tick_ms(end_s))
        raise TimeoutError

    def close(self) -> None:
        """End the program, without waiting for its end. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        Thread(target=self._end, name="end of a ProxyCommand", daemon=True).start()

    def _hang_up(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGHUP)

    def _end(self) -> None:
        self._hang_up()
        end_s = time.monotonic() + _GRACE_S
        # The program is not reaped yet: until then nobody else gets its number, and so its group's.
        seen = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < end_s and os.waitid(os.P_PID, self._process.pid, seen) is None:
            time.sleep(_TICK_S / 10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        atexit.unregister(self._hang_up)
        self._process.wait()
        with self._reading, self._writing:
            os.set_blocking(self._stderr.fileno(), False)
            with suppress(BlockingIOError):
                self._listen()
            for stream in (self._stdin, self._stdout, self._stderr):
                stream.close()
        self._ended.set()

    def last_words(self) -> str:
        """End the program, and return the last line that it printed to stderr."""
        self.close()
        self._ended.wait(2 * _GRACE_S)
        lines = self._said.decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def _end_s(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _tick_ms(end_s: float) -> float:
    """How long to wait at most: `close` waits for who waits."""
    return max(1.0, 1000 * min(_TICK_S, end_s - time.monotonic()))
