"""Types that msgspec converts to, worked out by one thread at a time.

msgspec works out what a type is made of when the type is first used, and keeps that at the type. A second thread that
uses the type meanwhile gets what is there so far, and crashes (seen with msgspec 0.22; see
docs/decisions/0015-msgspec-and-threads.md). So every type goes through `ready` on its way to msgspec.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_ready: set[object] = set()


def ready(kind: type[T]) -> type[T]:
    """The type itself, once msgspec knows all that it is made of."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
    return kind
