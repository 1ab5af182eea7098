"""One lab is changed by one command at a time, also when that command was killed a moment ago."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, waiting for it. Its holder may remove the file.

    The lock is inheritable on purpose: an ``ip`` or ``tc`` that was started under it holds it until it ends.
    So whoever gets the lock after a ``kill -9`` finds nothing still changing. See `gpurun.lab.commands.run`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_still(path, lock.fileno()):
                continue  # it was removed while we waited: others lock the one that has its name now
            os.set_inheritable(lock.fileno(), True)
            yield
            return


def _is_still(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False
