"""The interface that gpurun needs from an SSH transport: a command on a host, with its three streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
