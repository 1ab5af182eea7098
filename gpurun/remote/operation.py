"""One request under way on a host, as the head sees it: what has arrived and was not taken, and what may be sent."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Condition

from gpurun.errors import GpurunError
from gpurun.node import frames

MOST_HELD_BYTES = 64 << 20
"""The head holds no more of one operation than this. An honest host waits for credit long before."""
FRAME_COST_BYTES = 1 << 10
"""What a frame costs in memory, however small it is."""


class Operation:
    """One request under way.

    Attributes:
        ended: nothing more need be sent for it.
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
        """Keep what has arrived until it is taken; False if that is more than a host may send ahead."""
        with self._condition:
            if cost_bytes and self._held_bytes + cost_bytes > MOST_HELD_BYTES:
                return False
            self._held_bytes += cost_bytes
        self._arrived.put((arrived, cost_bytes))
        return True

    def take(self, timeout_s: float | None) -> frames.Frame | GpurunError:
        """What has arrived next. Raises Empty if nothing comes in time."""
        arrived, cost_bytes = self._arrived.get(timeout=timeout_s)
        with self._condition:
            self._held_bytes -= cost_bytes
        return arrived

    def credit(self, amount: int) -> None:
        """The host has consumed so many bytes."""
        with self._condition:
            self._room += amount
            self._condition.notify_all()

    def end(self) -> None:
        """Nothing more need be sent for this operation."""
        with self._condition:
            self.ended = True
            self._condition.notify_all()

    def spend(self, amount: int) -> bool:
        """Wait until the host has room for `amount` more bytes; False when the operation has ended instead."""
        with self._condition:
            self._condition.wait_for(lambda: self.ended or self._room >= min(amount, frames.WINDOW))
            self._room -= amount
            return not self.ended
