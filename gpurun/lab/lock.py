"""One lab is changed by one command at a time, also when that command was killed a moment ago."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.state import lock


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, waiting for it. Its holder may remove the file.

    The lock is inheritable on purpose: an ``ip`` or ``tc`` that was started under it holds it until it ends.
    So whoever gets the lock after a ``kill -9`` finds nothing still changing. See `gpurun.lab.commands.run`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock.alone(path, inheritable=True):
        yield
