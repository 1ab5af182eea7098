"""A program as a child process in its own session, and the meaning of what ``ssh`` says when it fails."""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Protocol

from gpurun.errors import AuthenticationFailed, HostFailure, HostKeyMismatch, HostUnreachable

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


# Parse the stderr of the machine's own ``ssh``: the progress of the login, and gpurun's errors. Pure.


_CONNECTING = "debug1: Connecting to "
_CONNECTED = (
    "debug1: Connection established",
    "debug1: Remote protocol version ",
    "debug1: mux_client_request_session: ",
    "Authenticated to ",
)
_LOGGED_IN = ("debug1: mux_client_request_session: master session id", "Authenticated to ")
_NOISE = re.compile(r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: |@{10}")
_HOST_KEY = re.compile(r"debug1: Server host key: (\S+) (SHA256:[A-Za-z0-9+/]+)$")
_OFFERED = re.compile(r"debug1: Offering public key: (.+?) [A-Z0-9-]+ SHA256:")
_DENIED = re.compile(r"Permission denied \(([a-z0-9@.,-]+)\)")
_WRONG_KEY = ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED")
_CONSEQUENCES = ("Connection closed by UNKNOWN port", "kex_exchange_identification: ", "Host key verification failed")
_DROPPED = ("kex_exchange_identification: ", "Connection closed by ", "Connection reset by ")
"""All that ``ssh`` says if an sshd drops a connection before the login: with too many others (``MaxStartups``)."""
_TYPED = ("keyboard-interactive", "password")
_LINES, _MOST_OFFERED, _LINE_BYTES = 40, 16, 500


class TooManyLogins(HostUnreachable):
    """An sshd on the way dropped the connection before the login, and nothing else is wrong."""


class Heard:
    """The parsed output of one ``ssh`` so far.

    Attributes:
        connecting: ``ssh`` has resolved the host's address and asks it for a connection.
        connected: the host has accepted the connection.
        logged_in: the host has accepted the login.
        host_key: the type and the fingerprint of the host's key.
        offered: the keys that ``ssh`` has offered.
        lines: the last lines that are not progress reports.
    """

    def __init__(self) -> None:
        self.connecting = self.connected = self.logged_in = False
        self.host_key: tuple[str, str] | None = None
        self.offered: deque[str] = deque(maxlen=_MOST_OFFERED)
        self.lines: deque[str] = deque(maxlen=_LINES)
        self._rest = b""

    def feed(self, text: bytes) -> None:
        """Take the next piece of stderr; empty at its end."""
        *whole, rest = (self._rest + text).split(b"\n")
        self._rest = rest[:_LINE_BYTES]
        for line in [*whole, self._rest] if not text else whole:
            self._take(line[:_LINE_BYTES].decode(errors="replace").strip())

    def _take(self, line: str) -> None:
        if not self.logged_in:
            self.connecting = self.connecting or line.startswith(_CONNECTING)
            self.connected = self.connected or line.startswith(_CONNECTED)
            self.logged_in = line.startswith(_LOGGED_IN)
            if found := _HOST_KEY.match(line):
                self.host_key = (found[1], found[2])
            if found := _OFFERED.match(line):
                self.offered.append(found[1])
        if line and not _NOISE.match(line):
            self.lines.append(line)


def needs_a_person(methods: Collection[str]) -> bool:
    """Return True if a host asks for something that a user types."""
    return any(method in _TYPED for method in methods)


def connect_hint(host: str) -> str:
    """Return the hint with the command that opens a connection for which a user must answer questions."""
    return (
        f"run `gpurun inventory connect {host}` and answer the host's questions; gpurun then uses the open connection"
    )


def failure(host: str, user: str, heard: Heard, jump: str | None = None) -> HostFailure:
    """Return the reason why ``ssh`` ended before the login.

    Args:
        jump: the jump host.
    """
    text = "\n".join(heard.lines)
    if any(words in text for words in _WRONG_KEY):
        hint = f"compare the fingerprint with the key on the host's console, then run: gpurun inventory trust {host}"
        return HostKeyMismatch(f"ssh does not accept the host's key: {_reason(heard)}", host=host, hint=hint)
    denied = _DENIED.search(text)
    if denied or "Too many authentication failures" in text:
        methods = denied[1].split(",") if denied else []
        tried = [f"{key} does not suffice" for key in heard.offered] or ["there is no key to offer"]
        hint = connect_hint(host) if needs_a_person(methods) else f"check with: ssh {host}"
        return AuthenticationFailed(
            f"the host refuses the login of {user}: {'; '.join(tried)} ({_reason(heard)})", host=host, hint=hint
        )
    through = f" through {jump}" if jump else ""
    dropped = any(line.startswith(_DROPPED[0]) for line in heard.lines)
    kind = TooManyLogins if dropped and all(line.startswith(_DROPPED) for line in heard.lines) else HostUnreachable
    return kind(f"ssh{through} says: {_reason(heard)}", host=host, hint=f"check with: ssh {host}")


def _reason(heard: Heard) -> str:
    """Return the last lines with a cause."""
    causes = [line for line in heard.lines if not line.startswith(_CONSEQUENCES)]
    return "; ".join((causes or [*heard.lines])[-2:]) or "nothing"


# The interface that gpurun needs from an SSH transport: a command on a host, with its three streams.


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command.

    Attributes:
        code: its exit code; None if the transport does not know it.
        said: the last part of its stderr.
    """

    code: int | None
    said: str


class RemoteCommand(Protocol):
    """A command on a host. One thread may read while another writes and a third closes."""

    def sendall(self, data: bytes) -> None:
        """Write to its stdin, as long as it lives. Raises OSError: part of the data may have been written."""

    def recv(self, size: int) -> bytes:
        """Read from its stdout; empty at the end. Raises TimeoutError after the time of `settimeout`, or OSError."""

    def settimeout(self, timeout: float | None) -> None:
        """Let `recv` wait at most so many seconds; None = without limit."""

    def ending(self, within_s: float) -> CommandEnd:
        """Return how the command ended, after the end of its stdout. Call it before any `discard_stderr`."""

    def discard_stderr(self) -> None:
        """Discard all further stderr, so that it cannot block the command."""

    def close(self) -> None:
        """End the command and its connection. Idempotent."""
