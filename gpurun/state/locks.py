"""The one kind of lock, and locks of files that members of a shared state directory change in turn.

Every member can hold such a lock, so no process waits for it without a time-out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpurun.errors import StateUnavailable
from gpurun.state.paths import StatePath, state_error, user_name

# The one kind of lock that gpurun uses on the head: a lock of an open file (``F_OFD_SETLK``, fcntl(2)).


_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux on 64 bits: type, whence, start, length, pid."""
FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02


def try_take(descriptor: int, *, shared: bool = False, start: int = 0, length: int = 0) -> bool:
    """Take the lock of a file that is open for writing; False if somebody else holds it.

    Args:
        shared: several may hold it so, none exclusively; the file must be open for reading.
        start, length: which bytes; 0 bytes are all.

    Raises:
        OSError: the file system cannot lock files.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says POSIX
        return False
    return True


def take(descriptor: int, *, shared: bool = False) -> None:
    """Take the lock, however long that takes."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))


def take_within(
    descriptor: int, patience_s: float | None, *, while_waiting: Callable[[float], object] = lambda _: None
) -> bool:
    """Take the lock; False if others hold it for too long.

    Those who wait look again after random pauses, so none of them is always too late.

    Args:
        patience_s: None waits for ever.
        while_waiting: told, before every pause, how many seconds have passed.
    """
    begun = time.monotonic()
    while not try_take(descriptor):
        waited = time.monotonic() - begun
        if patience_s is not None and waited > patience_s:
            return False
        while_waiting(waited)
        time.sleep(random.uniform(0.5, 1.5) * min(LONGEST_PAUSE_S, FIRST_PAUSE_S + waited / 100))  # noqa: S311
    return True


def release_lock(descriptor: int) -> None:
    """Release the lock; the file stays open."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


@contextmanager
def alone(
    path: Path, *, mode: int = 0o600, inheritable: bool = False, remove: bool = False, patience_s: float | None = None
) -> Iterator[None]:
    """Hold the lock of the file `path`, which need not exist. No link is followed.

    Args:
        mode: of a new file, regardless of the umask. Every user who may write the file may hold its lock.
        inheritable: processes started meanwhile also hold the lock until they end.
        remove: leave no file behind. Its holder may also remove it by other means.
        patience_s: give up after this long; None waits for ever.

    Raises:
        TimeoutError: others hold it for too long; says who.
    """
    while True:
        descriptor = _opened(path, mode)
        try:
            _take_for(descriptor, path, patience_s)
            if not _is_still(path, descriptor):
                continue  # it was removed while this process waited: others lock the file that has its name now
            os.set_inheritable(descriptor, inheritable)
            try:
                yield
            finally:
                if remove:
                    with suppress(OSError):  # another user's
                        path.unlink()
            return
        finally:
            os.close(descriptor)


def _take_for(descriptor: int, path: Path, patience_s: float | None) -> None:
    if patience_s is None:
        take(descriptor)
    elif not take_within(descriptor, patience_s):
        raise TimeoutError(errno.ETIMEDOUT, f"the file is locked by {holders_in_words(descriptor)}", str(path))


def _opened(path: Path, mode: int) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(descriptor, mode)
            return descriptor
        with suppress(FileNotFoundError):
            return os.open(path, flags)


def _is_still(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def is_held(descriptor: int) -> bool:
    """Return whether somebody else holds the lock exclusively. Only looks; the file need be open for reading only."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(answer)[0] == fcntl.F_WRLCK)


def holders(descriptor: int) -> tuple[int, ...]:
    """The other processes that hold the lock, lowest pid first, as far as this user may see them: root sees all."""
    wanted = os.fstat(descriptor)
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                if any(_holds(each, wanted) for each in (process / "fd").iterdir()):
                    found.append(int(process.name))
    return tuple(sorted(found))


def holders_in_words(descriptor: int) -> str:
    """The processes that hold the lock, with their users. A user sees only their own; root sees all."""
    told = [f"{_owner(pid)}'s process {pid}" for pid in holders(descriptor)]
    return ", ".join(told) or "another user's process"


def _owner(pid: int) -> str:
    try:
        return user_name(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:  # it has just ended
        return "somebody"


def _holds(entry: Path, wanted: os.stat_result) -> bool:
    """Whether an entry of ``/proc/PID/fd`` is the file, locked: proc_pid_fdinfo(5) lists each descriptor's locks."""
    if not os.path.samestat(wanted, entry.stat()):
        return False
    return any(line.startswith("lock:") for line in (entry.parent.parent / "fdinfo" / entry.name).open())


# Lock files that no other user can hold.


OWN = 0o600


def open_own_lock(path: StatePath) -> int:
    """Open a lock file of this user for reading and writing; create it if missing. Idempotent.

    Closes a file of an older version to other users.

    Raises:
        StateError: it cannot be opened.
    """
    descriptor = path.open_file(os.O_RDWR | os.O_CREAT, OWN)
    try:
        if os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.fchmod(descriptor, OWN)
    except OSError as error:
        os.close(descriptor)
        raise state_error(error, path, "closed to other users") from error
    return descriptor


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
        if not take_within(descriptor, PATIENCE_S):
            waited_s, who = time.monotonic() - begun, holders_in_words(descriptor)
            raise StateUnavailable(
                f"gpurun waited {waited_s:.0f} s for the lock on the file, but {who} holds the lock", where=str(path),
                hint=f"run `fuser -v {path}` as root to find the process. Resume the process if it is stopped "
                "(state T), or else kill the process",
            )  # fmt: skip
        yield
    finally:
        os.close(descriptor)
