"""One running request on a host, from the head's side: frames that wait for the caller, and the credit for sending."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Condition

from gpurun.errors import GpurunError
from gpurun.node.agent import frames

MOST_HELD_BYTES = 64 << 20
"""Limit for the data of one operation that the head holds. A correct agent waits for credit long before."""
FRAME_COST_BYTES = 1 << 10
"""Memory that each frame needs in addition to its payload."""


class Operation:
    """One running request.

    Attributes:
        ended: nothing more needs to be sent for it.
    """

    def __init__(self, ident: int, op: str) -> None:
        self.id = ident
        self.op = op
        self._arrived: SimpleQueue[tuple[frames.Frame | GpurunError, int]] = SimpleQueue()
        self._held_bytes = 0
        self._room = frames.WINDOW
        self.ended = False
        self._condition = Condition()

    def put(self, arrived: frames.Frame | GpurunError, cost_bytes: int = 0) -> bool:
        """Hold a frame until the caller takes it; False if the host has sent more than it may send ahead."""
        with self._condition:
            if cost_bytes and self._held_bytes + cost_bytes > MOST_HELD_BYTES:
                return False
            self._held_bytes += cost_bytes
        self._arrived.put((arrived, cost_bytes))
        return True

    def take(self, timeout_s: float | None) -> frames.Frame | GpurunError:
        """Return the next frame or error. Raises Empty if none comes in time."""
        arrived, cost_bytes = self._arrived.get(timeout=timeout_s)
        with self._condition:
            self._held_bytes -= cost_bytes
        return arrived

    def credit(self, amount: int) -> None:
        """Add credit: the host has consumed so many bytes."""
        with self._condition:
            self._room += amount
            self._condition.notify_all()

    def end(self) -> None:
        """Mark the operation as ended: nothing more needs to be sent for it."""
        with self._condition:
            self.ended = True
            self._condition.notify_all()

    def spend(self, amount: int) -> bool:
        """Wait until the host has room for `amount` more bytes; False if the operation ends first."""
        with self._condition:
            self._condition.wait_for(lambda: self.ended or self._room >= min(amount, frames.WINDOW))
            self._room -= amount
            return not self.ended
