"""Connections to jump hosts: one for each, shared by all who go through it, closed with the last of them."""

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
    """The connection to one jump host, and how many use it."""

    users: int = 0
    transport: Transport | None = None
    connecting: Lock = field(default_factory=Lock)


class Passage:
    """A channel through a jump host, as a socket for Paramiko. Closing it gives up its use of the jump host."""

    def __init__(self, channel: Channel, leave: Callable[[], None]) -> None:
        self._channel, self._leave = channel, leave
        self._lock, self._closed = Lock(), False  # Paramiko looks at `_closed`, under this very name
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
    """The jump hosts that this process is connected to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shared: dict[Route, _Shared] = {}

    def through(self, jump: Route, route: Route, attempt: Attempt) -> Passage:
        """A way to `route` through `jump`.

        Raises:
            HostFailure: the jump host cannot be used, or cannot reach the host.
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
        # Others that need the same jump host wait for its one session rather than open their own.
        if not shared.connecting.acquire(timeout=attempt.left_s):
            raise HostUnreachable(f"{jump.name}, the host to go through, does not answer", host=jump.name)
        try:
            if shared.transport is None or not shared.transport.is_active():
                # An attempt of its own: giving up one host must not close what others use, and whether the host
                # behind it answers is not seen from here.
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
