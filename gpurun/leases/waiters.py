"""Whether a user's waiter lives. The waiter is the process that starts the jobs that passes grant to that user.

A lock on its log, ``waiters/UID.log``, shows that the waiter lives. Every user can see whether it is held; only that
user and root can hold it. If another user made a file of this name first, or holds a read lock on it, the waiter uses a
random name. Every file counts whose name begins with ``UID.`` and whose owner, by the kernel, is that user.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpurun.errors import StateError
from gpurun.state import durable, lock
from gpurun.state.path import StatePath, told

MAX_LOG_BYTES = 1 << 20


def waiter_lives(home: Path, uid: int) -> bool:
    """Return whether that user has a live waiter."""
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
    """Take the lock that shows that this user's waiter lives; None if another waiter holds it.

    Returns:
        The descriptor that holds the lock, and the waiter's log.

    Raises:
        StateError: the log cannot be created.
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
        try:
            is_taken = _is_of(descriptor, os.getuid()) and lock.try_take(descriptor)
            lives = not is_taken and lock.is_held(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise told(error, path, "locked") from error
        if is_taken:
            with suppress(OSError):  # it stays long
                if os.fstat(descriptor).st_size > MAX_LOG_BYTES:
                    os.ftruncate(descriptor, 0)
            return descriptor, path
        os.close(descriptor)
        if lives:
            return None
    return None


def _folder(home: Path) -> StatePath:
    return StatePath(home) / "waiters"


def _logs(home: Path, uid: int) -> Iterator[StatePath]:
    """Yield the files with the user's number in their name, regardless of their owner."""
    try:
        names = _folder(home).names()
    except FileNotFoundError:
        return
    for name in sorted(names):
        if name.startswith(f"{uid}."):
            yield _folder(home) / name


def _is_of(descriptor: int, uid: int) -> bool:
    """Return whether a file is the user's, and no other user can write it and so lock it."""
    found = os.fstat(descriptor)
    return found.st_uid == uid and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
