"""Turn hosts' progress reports into rates, remaining times and events for people."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from gpurun.images.events import ShipEvent
from gpurun.images.slow import rate_of

WINDOW_S = 5.0
# A host says at most this often how far it is.
EVERY_S = 0.2


@dataclass
class _HostProgress:
    total: int
    state: str = "receiving"
    received: int = 0
    layer: int = 0
    layers: int = 0
    told_s: float = 0.0
    marks: list[tuple[float, int]] = field(default_factory=list)


class Progress:
    """The progress of every host. Thread-safe.

    Args:
        tell: receives each event, one at a time.
    """

    def __init__(self, tell: Callable[[ShipEvent], None]) -> None:
        self._tell = tell
        self._hosts: dict[str, _HostProgress] = {}
        self._lock = Lock()

    def expect(self, host: str, total: int, layers: int) -> None:
        """Record that a host will receive this many bytes, of an image with this many layers."""
        with self._lock:
            known = self._hosts.setdefault(host, _HostProgress(total, layers=layers))
            known.total = total

    def received(self, host: str, count: int) -> None:
        """Record that a host has received this many bytes."""
        now = time.monotonic()
        with self._lock:
            known = self._hosts[host]
            known.received = max(known.received, count)
            known.marks = [*[mark for mark in known.marks if mark[0] > now - WINDOW_S], (now, known.received)]
            if now - known.told_s >= EVERY_S or known.received >= known.total:
                self._say(host, known)

    def loading(self, host: str, state: str, layer: int) -> None:
        """Record that a host loads, or waits for more."""
        with self._lock:
            known = self._hosts[host]
            if (known.state, known.layer) != (state, layer):
                known.state, known.layer = state, layer
                self._say(host, known)

    def ended(self, host: str, state: str, message: str | None = None) -> None:
        """Record the end of a host's transfer."""
        with self._lock:
            known = self._hosts.setdefault(host, _HostProgress(0))
            known.state = state
            self._say(host, known, message)

    def received_by(self, host: str) -> int:
        """Return the bytes received so far."""
        return self._hosts[host].received if host in self._hosts else 0

    def _say(self, host: str, known: _HostProgress, message: str | None = None) -> None:
        known.told_s = time.monotonic()
        rate = rate_of(known.marks)
        left = max(0, known.total - known.received)
        eta = left / rate if rate and left else None
        total = max(known.total, known.received)
        self._tell(ShipEvent(host, known.state, known.received, total, rate, eta, known.layer, known.layers, message))
