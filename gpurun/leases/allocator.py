"""The allocator lock: one pass runs at a time. The lock's file says who holds it.

A process holds the lock for milliseconds. Waiting processes try again after random pauses, so each gets it soon. The
kernel releases the lock when its holder dies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.errors import StateError, StateUnavailable
from gpurun.msgspec_types import ready
from gpurun.state import durable, lock
from gpurun.state.filesystem import check_locks
from gpurun.state.path import StatePath
from gpurun.state.people import command_name, user_name

PATIENCE_S = 60.0
"""How long a command waits. A pass over ten thousand GPUs holds the lock for less than a second."""
SLOW_S = 2.0
"""After this long, a waiter says for whom it waits."""
MAX_HOLDER_BYTES = 4096


@dataclass(frozen=True)
class LockHolder:
    """The holder of the lock, as it described itself after it took the lock.

    Attributes:
        since_s: seconds since the epoch.
    """

    pid: int
    user: str
    command: str
    since_s: float

    def told(self, now_s: float) -> str:
        """Describe the holder in printable text: ``bob's `gpurun submit` (pid 123) has held it for 5 s``."""
        text = (
            f"{self.user}'s `{self.command}` (pid {self.pid}) has held the lock for "
            f"{max(0.0, now_s - self.since_s):.0f} s"
        )
        return "".join(c if c.isprintable() else "?" for c in text)


@contextmanager
def allocator_lock(home: Path, *, patience_s: float | None = PATIENCE_S) -> Iterator[None]:
    """Hold the one lock under which passes grant leases and queued jobs change, for milliseconds.

    Args:
        patience_s: give up after this long; None waits for ever. A supervisor needs that, because only it can end its
            job.

    Raises:
        StateError: the state directory cannot be written.
        StateUnavailable: another process has held the lock for longer than `patience_s`.
        UnsafeState: locks do not work on its file system.
    """
    durable.make_home(home)
    check_locks(home)
    descriptor = _lock_file(home).open_file(os.O_RDWR | os.O_CREAT, 0o664)
    try:
        _take(home, descriptor, patience_s)
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def holder(home: Path) -> LockHolder | None:
    """Return the present or last holder of the allocator lock; None if that cannot be read."""
    try:
        with _lock_file(home).reader() as stream:
            return msgspec.json.decode(stream.read(MAX_HOLDER_BYTES), type=ready(LockHolder))
    except (OSError, StateError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _lock_file(home: Path) -> StatePath:
    return StatePath(home) / "allocator.lock"


def _take(home: Path, descriptor: int, patience_s: float | None) -> None:
    told = False

    def tell(waited_s: float) -> None:
        nonlocal told
        if waited_s > SLOW_S and not told:
            told = True
            said = f"gpurun: waiting for the scheduler's lock; {_by_whom(home, descriptor)}"
            print(said, file=sys.stderr, flush=True)  # noqa: T201

    begun = time.monotonic()
    try:
        taken = lock.take_within(descriptor, patience_s, while_waiting=tell)
    except OSError as error:
        raise StateError(
            f"the file system of the state directory cannot lock files: {error.strerror}", where=str(home),
            hint="set GPURUN_HOME to a folder on a local disk",
        ) from error  # fmt: skip
    if not taken:
        raise _too_slow(home, descriptor, time.monotonic() - begun)


def _by_whom(home: Path, descriptor: int) -> str:
    """Return the holder of the lock, as its file says. Every process that may take the lock can have written that."""
    found, pids = holder(home), lock.holders(descriptor)
    if found is not None and (found.pid in pids or (not pids and _lives(found.pid))):
        return found.told(time.time())
    if pids:
        return f"the process with pid {pids[0]} holds the lock"
    return "an unknown process of another user holds the lock"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _too_slow(home: Path, descriptor: int, waited_s: float) -> StateUnavailable:
    pids, found = lock.holders(descriptor), holder(home)
    pid = pids[0] if pids else found.pid if found is not None and _lives(found.pid) else None
    look = f"`ps -o pid,stat,user,args -p {pid}`" if pid else f"root's `fuser -v {_lock_file(home)}`"
    return StateUnavailable(
        f"gpurun waited {waited_s:.0f} s for the scheduler's lock; {_by_whom(home, descriptor)}",
        where=str(home), hint=f"{look} shows the process that holds the lock. Resume the "
        "process if it is stopped (state T), or kill the process: gpurun loses no state",
    )  # fmt: skip


def _sign(descriptor: int) -> None:
    """Write who holds the lock, for people only: not synced, and a full disk must not stop the holder."""
    me = LockHolder(os.getpid(), user_name(os.getuid()), command_name(sys.argv), time.time())
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        durable.write_all(descriptor, msgspec.json.encode(me), 0)
