"""The one thing that gpurun needs of an SSH transport: a command that runs on a host, with its three streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended.

    Attributes:
        code: its exit code; None if the transport does not know it.
        said: the end of what it printed to stderr.
    """

    code: int | None
    said: str


class RemoteCommand(Protocol):
    """A command on a host. One thread may read while another writes and a third closes."""

    def sendall(self, data: bytes) -> None:
        """Write to its stdin. Raises OSError."""

    def recv(self, size: int) -> bytes:
        """Read from its stdout; nothing at its end. Raises TimeoutError after the time of `settimeout`, or OSError."""

    def settimeout(self, timeout: float | None) -> None:
        """Let `recv` wait so many seconds; None = without end."""

    def ending(self, within_s: float) -> CommandEnd:
        """How it ended, after the end of its stdout. Before any `discard_stderr`."""

    def discard_stderr(self) -> None:
        """Keep its stderr from filling up, from now on."""

    def close(self) -> None:
        """End it and its connection. Idempotent."""
