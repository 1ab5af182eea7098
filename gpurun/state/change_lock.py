"""Locks of files that members of a shared state directory change in turn: cordons, histories of benchmarks.

Every member can hold such a lock, so no process waits for it without a time-out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.errors import StateUnavailable
from gpurun.state import lock
from gpurun.state.path import StatePath

PATIENCE_S = 10.0
"""A change takes milliseconds."""


@contextmanager
def change_lock(home: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` on the first level of the state directory.

    Raises:
        StateError: it cannot be opened.
        StateUnavailable: somebody has held it for longer than `PATIENCE_S`.
    """
    path = StatePath(home) / name
    descriptor = path.open_file(os.O_RDWR | os.O_CREAT, 0o664)
    try:
        begun = time.monotonic()
        if not lock.take_within(descriptor, PATIENCE_S):
            waited_s, who = time.monotonic() - begun, lock.holders_in_words(descriptor)
            raise StateUnavailable(
                f"gpurun waited {waited_s:.0f} s for the lock on the file, but {who} holds the lock", where=str(path),
                hint=f"run `fuser -v {path}` as root to find the process. Resume the process if it is stopped "
                "(state T), or else kill the process",
            )  # fmt: skip
        yield
    finally:
        os.close(descriptor)
