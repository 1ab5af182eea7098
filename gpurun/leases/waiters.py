"""Whether a user's waiter lives: the process that starts what a pass may give that user."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def waiter_lock(home: Path, uid: int) -> Path:
    """The file whose lock says that a user's waiter lives."""
    return home / "waiters" / f"{uid}.lock"


def waiter_lives(home: Path, uid: int) -> bool:
    """Whether that user's queued jobs have somebody who starts them."""
    try:
        descriptor = os.open(waiter_lock(home, uid), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != uid:
            return False  # somebody else's file in that user's name
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
