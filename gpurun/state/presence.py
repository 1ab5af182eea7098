"""Whether the state directory is still the one with which a process began.

A mount that is away for a moment shows no directory, or an empty mount point. Both look like a directory in which there
is nothing to do, so a process that lives on must not believe what it finds there.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from gpurun.errors import StateUnavailable

AWAY_MOST_S = 600.0
"""How long a directory may be away before it counts as moved for good."""


class Presence:
    """Knows the state directory by its device and inode, from the first time it is there."""

    def __init__(self, home: Path, held: Callable[[], int] | None = None) -> None:
        """Look at the directory.

        Args:
            held: returns the descriptor of a file in the directory on which this process holds a lock.
        """
        self._home = home
        self._held = held
        self._known: tuple[int, int] | None = None
        self._away_since_s: float | None = None
        self._is_here()

    def check(self) -> None:
        """Return if the directory is there.

        Raises:
            StateUnavailable: another one is there, or none.
            FileNotFoundError: this has been so for `AWAY_MOST_S`, or the directory was removed.
        """
        if self.is_gone():
            raise FileNotFoundError(errno.ENOENT, "the state directory is gone", str(self._home))
        if self.is_away():
            raise StateUnavailable(
                "the state directory does not exist, or another directory has replaced it", where=str(self._home),
                hint="mount the state directory again, or move it back",
            )  # fmt: skip

    def is_away(self) -> bool:
        """Return whether the directory is not there now, but may come back."""
        return not self.is_gone() and self._away_since_s is not None

    def is_gone(self) -> bool:
        """Return whether the directory does not come back."""
        if self._is_here():
            self._away_since_s = None
            return False
        now_s = time.monotonic()
        self._away_since_s = self._away_since_s or now_s
        return now_s - self._away_since_s >= AWAY_MOST_S or self._is_removed()

    def _is_here(self) -> bool:
        try:
            found = self._home.stat()
        except OSError as error:
            # one that does not answer is there: whoever uses it meets the same error
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)
        self._known = self._known or (found.st_dev, found.st_ino)
        return self._known == (found.st_dev, found.st_ino)

    def _is_removed(self) -> bool:
        """Return whether the held file has no name any more; that of a directory that is only away has one."""
        if self._held is None:
            return False
        try:
            return os.fstat(self._held()).st_nlink == 0
        except OSError:
            return False
