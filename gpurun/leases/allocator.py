"""The allocator lock: one pass at a time, first come first served, and it says who holds it.

Two things kept apart. *Safety* is one flock on ``allocator.lock``: the kernel lets it go when its holder dies, however
it dies. *Order* is a line of tickets, numbered files in ``line/`` that each waiter holds locked: whoever sees no living
ticket before its own may ask for the lock. A ticket is born locked and linked to its number, so two never share one;
that of a waiter that died is unlocked, is stepped over by those behind it, and is removed by the next holder. Who came
later sees the ticket of who came earlier and gets a higher number, so nobody is overtaken by one process twice. A
first in line that is stopped, or asleep, is stepped over after a second. If the line cannot be used at all, only the
order is lost.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.errors import StateError
from gpurun.state import durable
from gpurun.state.filesystem import check_locks
from gpurun.state.people import command_name, user_name

PATIENCE_S = 60.0
"""How long a command waits. A pass over ten thousand GPUs holds the lock for less than a second."""
SLOW_S = 2.0
"""After this long, a waiter says for whom it waits."""
ASLEEP_S = 1.0
"""A first in line that leaves a free lock untaken for this long is stepped over."""
POLL_S = 0.001
MOST_POLL_S = 0.05
OLD_DRAFT_S = 60.0
MAX_HOLDER_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """Who has the lock: what it wrote about itself after it took it.

    Attributes:
        since_s: seconds since the epoch.
    """

    pid: int
    user: str
    command: str
    since_s: float

    def told(self, now_s: float) -> str:
        """``bob's `gpurun submit` (pid 123) for 5 s``; whatever was in the file, it is printable."""
        text = f"{self.user}'s `{self.command}` (pid {self.pid}) for {max(0.0, now_s - self.since_s):.0f} s"
        return "".join(c if c.isprintable() else "?" for c in text)


@contextmanager
def allocator_lock(home: Path, *, patience_s: float | None = PATIENCE_S) -> Iterator[None]:
    """Hold the one lock under which leases are granted and queued jobs change. Held for milliseconds.

    Args:
        patience_s: give up after this long; None waits for ever, as a supervisor must: it alone can end its job.

    Raises:
        StateError: the state directory cannot be written, or somebody has held the lock for longer than `patience_s`.
        UnsafeState: its file system has no locks that lock.
    """
    try:
        durable.make_folder(home)
        check_locks(home)
        descriptor = os.open(home / "allocator.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        raise StateError(
            f"the state directory cannot be used: {error.strerror}", where=str(home),
            hint="set GPURUN_HOME to a folder on a local disk that you may write",
        ) from error  # fmt: skip
    ticket = None
    try:
        if not (_is_empty(home / "line") and _try_flock(descriptor, home)):
            ticket = _draw_ticket(home / "line")
            _wait_turn(home, descriptor, ticket, patience_s)
            _sweep(home / "line", ticket)
        _sign(descriptor)
        yield
    finally:
        if ticket is not None:
            ticket.hand_in()
        os.close(descriptor)


def holder(home: Path) -> Holder | None:
    """Who holds the allocator lock, or held it last; None if that cannot be read."""
    try:
        with durable.opened(home / "allocator.lock") as stream:
            return msgspec.json.decode(stream.read(MAX_HOLDER_BYTES), type=Holder)
    except (OSError, StateError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _Ticket:
    """A place in the line, for as long as its descriptor is open."""

    def __init__(self, folder: Path, number: int, descriptor: int) -> None:
        self.folder = folder
        self.number = number
        self.descriptor = descriptor

    def ahead(self) -> list[int]:
        """The living tickets with lower numbers, lowest first."""
        earlier = sorted(number for number in _numbers(self.folder) if number < self.number)
        return [number for number in earlier if _is_held(self.folder / str(number))]

    def hand_in(self) -> None:
        with suppress(OSError):
            (self.folder / str(self.number)).unlink()
        os.close(self.descriptor)


def _draw_ticket(folder: Path) -> _Ticket | None:
    """The next free number; None when the folder cannot be used, which costs the order and nothing else."""
    draft = folder / f".{os.getpid()}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    except OSError:
        return None
    try:
        os.fchmod(descriptor, 0o644)  # others must see that it is held; who may come so far is the directory's business
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _Ticket(folder, _link(draft, folder), descriptor)
    except OSError:
        os.close(descriptor)
        return None
    finally:
        with suppress(OSError):
            draft.unlink()


def _link(draft: Path, folder: Path) -> int:
    while True:
        number = max(_numbers(folder), default=0) + 1
        with suppress(FileExistsError):
            (folder / str(number)).hardlink_to(draft)
            return number


def _is_empty(folder: Path) -> bool:
    try:
        return not os.listdir(folder)
    except OSError:
        return True


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isascii() and name.isdigit()]


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # handed in; or not to be read, and then it must not hold up the line
    try:
        return durable.is_locked(descriptor)
    finally:
        os.close(descriptor)


def _wait_turn(home: Path, descriptor: int, ticket: _Ticket | None, patience_s: float | None) -> None:
    start = first_since = time.monotonic()
    first: list[int] = []
    told = False
    while True:
        ahead = ticket.ahead() if ticket is not None else []
        now = time.monotonic()
        if ahead[:1] != first:
            first, first_since = ahead[:1], now
        asleep = now - first_since > ASLEEP_S
        if (not ahead or asleep) and _try_flock(descriptor, home):
            if not ahead or ticket is None or ticket.ahead()[:1] == first:
                return
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # the first was no sleeper: it held the lock and has just let it go
        waited = now - start
        if patience_s is not None and waited > patience_s:
            raise _too_slow(home, waited, len(ahead))
        if waited > SLOW_S and not told:
            told = True
            print(f"gpurun: waiting for the allocator lock, {_by_whom(home, len(ahead))}", file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(_pause_s(len(ahead), waited))


def _pause_s(ahead: int, waited_s: float) -> float:
    """The first in line looks every millisecond, the others the less often the longer it will take."""
    return min(MOST_POLL_S, max(POLL_S * (1 + ahead), waited_s / 100))


def _try_flock(descriptor: int, home: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StateError(
            f"its file system cannot lock files: {error.strerror}", where=str(home),
            hint="set GPURUN_HOME to a folder on a local disk",
        ) from error  # fmt: skip
    return True


def _by_whom(home: Path, ahead: int) -> str:
    found = holder(home)
    line = f"; {ahead} before this one" if ahead > 1 else ""
    return (f"held by {found.told(time.time())}" if found else "held by an unknown process") + line


def _too_slow(home: Path, waited_s: float, ahead: int) -> StateError:
    found = holder(home)
    look = f"`ps -o pid,stat,user,args -p {found.pid}`" if found else f"`fuser -v {home / 'allocator.lock'}`"
    return StateError(
        f"the allocator lock did not come free in {waited_s:.0f} s: {_by_whom(home, ahead)}", where=str(home),
        hint=f"{look} shows that process; nothing is lost if it is killed, or continued if it was stopped",
    )  # fmt: skip


def _sign(descriptor: int) -> None:
    """Say who holds the lock. For people only: not synced, and a full disk must not stop the holder."""
    me = Holder(os.getpid(), user_name(os.getuid()), command_name(sys.argv), time.time())
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(me), 0)


def _sweep(folder: Path, mine: _Ticket | None) -> None:
    """Remove what waiters that died left in the line. Only the holder does, so no number is removed twice."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if mine is not None and entry.name == str(mine.number):
            continue
        with suppress(OSError):
            is_draft = entry.name.startswith(".")
            if is_draft and time.time() - entry.stat().st_mtime < OLD_DRAFT_S:
                continue
            if not _is_held(folder / entry.name):
                (folder / entry.name).unlink()
