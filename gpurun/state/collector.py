"""Python's garbage collector, switched off while many values are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector from looking at a growing heap again and again: a third of the time of a large pass.

    What is dropped meanwhile is freed as ever, by its reference count; only cycles wait.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
