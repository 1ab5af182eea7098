"""Wait for expected events. They come late on a busy machine, so no test fails because of a delay."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

LIMIT_S = 400.0
"""A test gives up after this long: far longer than a busy machine needs, and within pytest's limit for one test."""


def until(
    condition: Callable[[], Found], said: Callable[[], object] = lambda: "it does not come", *, every_s: float = 0.01
) -> Found:
    """Wait until the condition holds. Returns its value.

    Args:
        said: what to show if it never does.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, said()
        time.sleep(every_s)
    return found
