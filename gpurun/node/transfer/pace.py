"""Limit the sending rate."""

import threading
import time
from typing import Optional


class Pace:
    """Limits the rate to this many bytes per second; None = unlimited."""

    def __init__(self, bytes_per_s: Optional[float]) -> None:
        self._rate = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def spend(self, amount: int) -> None:
        """Wait until `amount` more bytes may be sent."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.1) + amount / self._rate
            pause = self._free_at - now
        if pause > 0:
            time.sleep(pause)
