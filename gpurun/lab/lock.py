"""One command at a time may change a lab, even shortly after that command was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.state import lock


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on the file `path` and hold it. The holder may remove the file.

    The lock is inheritable on purpose: a child such as ``ip`` or ``tc`` holds it until it ends. So after a ``kill -9``,
    the next holder finds no command that still changes the lab. See `gpurun.lab.commands.run`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock.alone(path, inheritable=True):
        yield
