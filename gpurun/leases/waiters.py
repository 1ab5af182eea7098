"""Whether a user's waiter lives: the process that starts what a pass grants to that user.

Its sign of life is the lock of its log, ``waiters/UID.log``. Everybody can see whether it is held; only that user and
root can hold it. Another user may have made a file of this name first, or may read-lock the one that is there. Then the
waiter uses a name that nobody can guess: every file that begins with ``UID.`` and that the kernel says is that user's
counts.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from gpurun.errors import StateError
from gpurun.state import durable, lock
from gpurun.state.path import StatePath

MAX_LOG_BYTES = 1 << 20


def waiter_lives(home: Path, uid: int) -> bool:
    """Whether that user's queued jobs have somebody who starts them."""
    for path in _logs(home, uid):
        try:
            descriptor = path.open_file(os.O_RDONLY)
        except (FileNotFoundError, StateError):
            continue
        try:
            if _is_of(descriptor, uid) and lock.is_held(descriptor):
                return True
        finally:
            os.close(descriptor)
    return False


def take_waiter_lock(home: Path) -> tuple[int, StatePath] | None:
    """Take the lock that says that this user's waiter lives; None if it does.

    Returns:
        The descriptor that holds the lock, and the waiter's log.

    Raises:
        StateError: the log cannot be made.
    """
    if waiter_lives(home, os.getuid()):
        return None
    durable.make_folder(_folder(home))
    first, another = _folder(home) / f"{os.getuid()}.log", f"{os.getuid()}.{secrets.token_hex(8)}.log"
    for path in (first, *_logs(home, os.getuid()), _folder(home) / another):
        try:
            descriptor = path.open_file(os.O_RDWR | os.O_CREAT)
        except (FileNotFoundError, StateError):
            if path.name == another:
                raise
            continue  # another user's, or no file
        if _is_of(descriptor, os.getuid()) and lock.try_take(descriptor):
            if os.fstat(descriptor).st_size > MAX_LOG_BYTES:
                os.ftruncate(descriptor, 0)
            return descriptor, path
        lives = lock.is_held(descriptor)
        os.close(descriptor)
        if lives:
            return None
    return None


def _folder(home: Path) -> StatePath:
    return StatePath(home) / "waiters"


def _logs(home: Path, uid: int) -> Iterator[StatePath]:
    """The files that bear the user's name, whoever made them."""
    try:
        names = _folder(home).names()
    except FileNotFoundError:
        return
    for name in sorted(names):
        if name.startswith(f"{uid}."):
            yield _folder(home) / name


def _is_of(descriptor: int, uid: int) -> bool:
    """Whether a file is the user's and nobody else can write, and so lock, it."""
    found = os.fstat(descriptor)
    return found.st_uid == uid and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
