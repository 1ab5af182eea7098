"""Types that msgspec converts to, prepared by one thread at a time.

msgspec analyses a type at its first use and stores the result with the type. If a second thread uses the type during
the analysis, it gets an incomplete result and crashes (seen with msgspec 0.22; see
docs/decisions/0015-msgspec-and-threads.md). So pass every type through `ready` before msgspec uses it.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_ready: set[object] = set()


def ready(kind: type[T]) -> type[T]:
    """Return the type after msgspec has analysed it completely."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
    return kind
