"""Connections to jump hosts. All sessions through a jump host share one connection, and the last one closes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from gpurun.errors import HostUnreachable
from gpurun.remote import session
from gpurun.remote.paramiko_quietly import paramiko
from gpurun.remote.session import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from paramiko import Channel, Transport

    from gpurun.remote.ssh_config import Route


@dataclass(eq=False)
class _Shared:
    """The connection to one jump host, and the number of its users."""

    users: int = 0
    transport: Transport | None = None
    connecting: Lock = field(default_factory=Lock)


class Passage:
    """A channel through a jump host, as a socket for Paramiko. Closing it releases the jump host."""

    def __init__(self, channel: Channel, leave: Callable[[], None]) -> None:
        self._channel, self._leave = channel, leave
        self._lock, self._closed = Lock(), False  # Paramiko reads `_closed`, so the name must stay
        self.send, self.recv, self.settimeout = channel.send, channel.recv, channel.settimeout

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._channel.close()
        finally:
            self._leave()


class Jumps:
    """The jump hosts to which this process is connected. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shared: dict[Route, _Shared] = {}

    def through(self, jump: Route, route: Route, attempt: Attempt) -> Passage:
        """Open a channel to `route` through `jump`.

        Raises:
            HostFailure: the jump host is not usable, or cannot reach the host.
        """
        with self._lock:
            shared = self._shared.setdefault(jump, _Shared())
            shared.users += 1
        try:
            channel = self._transport(jump, shared, attempt).open_channel(
                "direct-tcpip", (route.hostname, route.port), ("127.0.0.1", 0), timeout=attempt.connect_left_s
            )
        except BaseException as error:
            self._leave(jump, shared)
            if not isinstance(error, paramiko.SSHException | EOFError | OSError):
                raise
            raise HostUnreachable(
                f"{jump.name} cannot reach {route.hostname} port {route.port}: {session.reason(error)}", host=route.name
            ) from error
        return Passage(channel, lambda: self._leave(jump, shared))

    def _transport(self, jump: Route, shared: _Shared, attempt: Attempt) -> Transport:
        # Other sessions through the same jump host wait for its one connection and do not open their own.
        if not shared.connecting.acquire(timeout=attempt.left_s):
            raise HostUnreachable(f"the jump host {jump.name} does not answer", host=jump.name)
        try:
            if shared.transport is None or not shared.transport.is_active():
                # A separate attempt: giving up one host must not close the connection of others, and gpurun
                # cannot see from here whether the host behind it answers.
                own = Attempt(attempt.deadline_s, connect_s=attempt.connect_s)
                shared.transport = session.connect(jump, own, self)
            return shared.transport
        finally:
            shared.connecting.release()

    def _leave(self, jump: Route, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            last = shared.users == 0
            if last:
                del self._shared[jump]
        if last and shared.transport is not None:
            shared.transport.close()
