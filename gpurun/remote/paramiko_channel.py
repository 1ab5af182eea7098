"""A command on a host, over Paramiko."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

from gpurun.remote import session
from gpurun.remote.remote_command import CommandEnd

if TYPE_CHECKING:
    from paramiko import Channel, Transport

    from gpurun.remote.jumps import Jumps
    from gpurun.remote.session import Attempt
    from gpurun.remote.ssh_config import Route


def run(route: Route, attempt: Attempt, jumps: Jumps, command: str) -> ParamikoChannel:
    """Connect and run a command. Raises HostFailure, or what Paramiko raises."""
    transport = session.connect(route, attempt, jumps)
    try:
        attempt.stage = "starting the agent"
        channel = transport.open_session(timeout=attempt.left_s)
        channel.settimeout(attempt.left_s)
        channel.exec_command(command)
    except BaseException:
        transport.close()
        raise
    return ParamikoChannel(route.name, transport, channel)


class ParamikoChannel:
    """See `gpurun.remote.remote_command.RemoteCommand`."""

    def __init__(self, host: str, transport: Transport, channel: Channel) -> None:
        self._host, self._transport, self._channel = host, transport, channel
        self.recv, self.settimeout = channel.recv, channel.settimeout

    def sendall(self, data: bytes) -> None:
        """See RemoteCommand. Has no time-out: the caller gives up a host that does not answer.

        Paramiko's time-out counts for both directions. It ends a `send` only before the first byte.
        """
        while data:
            with suppress(TimeoutError):
                sent = self._channel.send(data)
                if not sent:
                    raise BrokenPipeError
                data = data[sent:]

    def ending(self, within_s: float) -> CommandEnd:
        """Wait for stderr, then for the exit code, which comes after the end of the output."""
        self._channel.settimeout(within_s)
        try:
            said = self._channel.recv_stderr(1 << 14).decode(errors="replace").strip()
        except TimeoutError:
            said = ""
        self._channel.status_event.wait(within_s)
        return CommandEnd(self._channel.recv_exit_status() if self._channel.exit_status_ready() else None, said)

    def discard_stderr(self) -> None:
        """Read and discard stderr: a full window would block the agent's messages, and so the agent."""
        Thread(target=self._drain, name=f"stderr {self._host}", daemon=True).start()

    def _drain(self) -> None:
        with suppress(OSError), self._channel.makefile_stderr("rb") as stderr:
            while stderr.read(1 << 12):
                pass

    def close(self) -> None:
        """Close the channel, then its connection."""
        try:
            with suppress(OSError, EOFError):  # it was already closed
                self._channel.close()
        finally:
            self._transport.close()
