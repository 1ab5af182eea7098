"""Whether a user's waiter lives: the process that starts what a pass may give that user."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from gpurun.state import durable

LOOK_S = 1.0
"""Nobody looks for that long, unless to keep a user's waiter from starting."""


def waiter_lock(home: Path, uid: int) -> Path:
    """The file whose lock says that a user's waiter lives."""
    return home / "waiters" / f"{uid}.lock"


def take_waiter_lock(descriptor: int) -> bool:
    """Take the lock, unless a waiter holds it. Who only looks (`waiter_lives`) takes no time and is waited for."""
    deadline = time.monotonic() + LOOK_S
    while not _try(descriptor, fcntl.LOCK_EX):
        if not _try(descriptor, fcntl.LOCK_SH):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _try(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def waiter_lives(home: Path, uid: int) -> bool:
    """Whether that user's queued jobs have somebody who starts them."""
    try:
        descriptor = os.open(waiter_lock(home, uid), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != uid:
            return False  # somebody else's file in that user's name
        return durable.is_locked(descriptor)
    finally:
        os.close(descriptor)
