"""Lease files say which gang owns which GPU.

A pass writes ``leases/ID.json`` once, as a whole, under the allocator lock. gpurun removes it only after every host of
the gang has been fenced. If some hosts cannot be fenced, their GPUs become a lost lease,
``leases/ID.ATTEMPT.lost.json``, and the job continues without them; a GPU is never in two files. A lock on the file
itself (`gpurun.state.locks`) shows that the job's supervisor lives. The granting command passes the lock to the
supervisor with the open descriptor, so a running job never looks orphaned. Only the lease's owner and root can write
the file, so no other user can hold that lock.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpurun import faults
from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.record import ID_PATTERN
from gpurun.leases.lease import Holdings, Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.msgspec_types import ready
from gpurun.state import durable, locks
from gpurun.state.filesystem import check_locks
from gpurun.state.locks import is_held, try_take
from gpurun.state.paths import StatePath, command_name, state_error, user_name

# The allocator lock: one pass runs at a time. The lock's file says who holds it.


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


@dataclass(frozen=True)
class AllocatorLock:
    """The lock under which leases change. One process holds it at a time."""

    home: Path

    @contextmanager
    def held(self, *, patience_s: float | None = PATIENCE_S) -> Iterator[None]:
        """Hold the one lock under which passes grant leases and queued jobs change, for milliseconds.

        Args:
            patience_s: give up after this long; None waits for ever. A supervisor needs that, because only it can end
            its
                job.

        Raises:
            StateError: the state directory cannot be written.
            StateUnavailable: another process has held the lock for longer than `patience_s`.
            UnsafeState: locks do not work on its file system.
        """
        durable.make_home(self.home)
        check_locks(self.home)
        descriptor = self._file().open_file(os.O_RDWR | os.O_CREAT, 0o664)
        try:
            self._take(descriptor, patience_s)
            _sign(descriptor)
            yield
        finally:
            os.close(descriptor)

    def holder(self) -> LockHolder | None:
        """Return the present or last holder of the allocator lock; None if that cannot be read."""
        try:
            with self._file().reader() as stream:
                return msgspec.json.decode(stream.read(MAX_HOLDER_BYTES), type=ready(LockHolder))
        except (OSError, StateError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _file(self) -> StatePath:
        return StatePath(self.home) / "allocator.lock"

    def _take(self, descriptor: int, patience_s: float | None) -> None:
        told = False

        def tell(waited_s: float) -> None:
            nonlocal told
            if waited_s > SLOW_S and not told:
                told = True
                said = f"gpurun: waiting for the scheduler's lock; {self._by_whom(descriptor)}"
                print(said, file=sys.stderr, flush=True)  # noqa: T201

        begun = time.monotonic()
        try:
            taken = locks.take_within(descriptor, patience_s, while_waiting=tell)
        except OSError as error:
            raise StateError(
                f"the file system of the state directory cannot lock files: {error.strerror}", where=str(self.home),
                hint="set GPURUN_HOME to a folder on a local disk",
            ) from error  # fmt: skip
        if not taken:
            raise self._too_slow(descriptor, time.monotonic() - begun)

    def _by_whom(self, descriptor: int) -> str:
        """Return the holder of the lock, as its file says. Any process that may take the lock can have written that."""
        found, pids = self.holder(), locks.holders(descriptor)
        if found is not None and (found.pid in pids or (not pids and _lives(found.pid))):
            return found.told(time.time())
        if pids:
            return f"the process with pid {pids[0]} holds the lock"
        return "an unknown process of another user holds the lock"

    def _too_slow(self, descriptor: int, waited_s: float) -> StateUnavailable:
        pids, found = locks.holders(descriptor), self.holder()
        pid = pids[0] if pids else found.pid if found is not None and _lives(found.pid) else None
        look = f"`ps -o pid,stat,user,args -p {pid}`" if pid else f"root's `fuser -v {self._file()}`"
        return StateUnavailable(
            f"gpurun waited {waited_s:.0f} s for the scheduler's lock; {self._by_whom(descriptor)}",
            where=str(self.home), hint=f"{look} shows the process that holds the lock. Resume the "
            "process if it is stopped (state T), or kill the process: gpurun loses no state",
        )  # fmt: skip


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _sign(descriptor: int) -> None:
    """Write who holds the lock, for people only: not synced, and a full disk must not stop the holder."""
    me = LockHolder(os.getpid(), user_name(os.getuid()), command_name(sys.argv), time.time())
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        durable.write_all(descriptor, msgspec.json.encode(me), 0)


WAY_OUT = "run `gpurun recover` to see the lease's job and what you can do"
CLOSED = -1
NAME_PATTERN = re.compile(rf"{ID_PATTERN.pattern}(\.\d{{1,6}}\.lost)?\.json")


class LeaseLock:
    """The lock on one lease's file, held by an open descriptor. It shows that a supervisor lives.

    A process that holds the lock and does not carry the job keeps everybody else from it. So a process hands the lock
    to a supervisor or closes it, whatever fails. A context manager that closes it.
    """

    def __init__(self, descriptor: int, path: StatePath) -> None:
        self.descriptor = descriptor
        self.path = path

    def __enter__(self) -> LeaseLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, unless another process inherited the descriptor. Idempotent."""
        descriptor, self.descriptor = self.descriptor, CLOSED
        if descriptor != CLOSED:
            os.close(descriptor)

    def hold(self, descriptor: int) -> None:
        """Hold the lock of the file that has replaced the locked one, instead of the old file's."""
        self.close()
        self.descriptor = descriptor

    def is_mine(self) -> bool:
        """Return True if this user wrote the lease, whatever owner it names."""
        return os.fstat(self.descriptor).st_uid == os.getuid()

    def is_current(self) -> bool:
        """Return True if the locked file is still the one at the lease's path."""
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        mine = os.fstat(self.descriptor)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


class LeaseStore:
    """The leases of one state directory."""

    def __init__(self, home: Path) -> None:
        self.folder = StatePath(home) / "leases"
        self._jobs = StatePath(home) / "jobs"

    def path(self, name: str) -> StatePath:
        """Return the path of a lease. A running job's lease has the job's id as its name."""
        return self.folder / f"{name}.json"

    def names(self) -> frozenset[str]:
        """Return the names of all leases that have a file, from one look at the folder."""
        try:
            return frozenset(name.removesuffix(".json") for name in self.folder.names())
        except FileNotFoundError:
            return frozenset()

    def read_all(self, *, but_held: bool = False) -> Holdings:
        """Read every lease. Ignores only the temporary files of `durable`.

        Args:
            but_held: leave out leases whose file a supervisor holds.

        Raises:
            StateUnavailable: the state directory cannot be read now.
        """
        leases, damaged = [], []
        try:
            names = sorted(self.folder.names())
        except FileNotFoundError:
            return Holdings((), ())
        for name in names:
            if name.startswith(".") and name.endswith(".tmp"):
                continue
            if but_held and self.is_alive(name.removesuffix(".json")):
                continue
            path = self.folder / name
            try:
                leases.append(self._read(path))
            except FileNotFoundError:
                continue  # released between listing and reading
            except StateUnavailable:
                raise
            except StateError as error:
                error.hint = error.hint or WAY_OUT
                damaged.append(error)
        return Holdings(tuple(leases), tuple(damaged))

    def _read(self, path: StatePath) -> Lease:
        if not NAME_PATTERN.fullmatch(path.name):
            raise StateError(
                "the file is in gpurun's folder of leases, but gpurun did not write the file", where=str(path)
            )
        lease, writer = durable.read_signed(path, Lease, linked=True)
        if writer not in (lease.owner_uid, 0):
            who = "others can write the file" if writer is None else f"{user_name(writer)} wrote the file"
            raise StateError(f"the lease names {user_name(lease.owner_uid)} as its owner, but {who}", where=str(path))
        # A crash between the two steps of `abandon` leaves a lost lease under the job's own name.
        if path.name not in (f"{lease.name}.json", f"{lease.job}.json"):
            raise StateError(f"the file contains a lease with another name, {lease.name!r}", where=str(path))
        return lease

    def read(self, name: str) -> Lease | None:
        """Read one lease; None if there is none. Raises StateError if it is damaged."""
        try:
            return self._read(self.path(name))
        except FileNotFoundError:
            return None

    def grant(self, lease: Lease, occupancy: Occupancy) -> LeaseLock:
        """Write a lease and take its lock. The caller holds the allocator lock.

        Syncs the folder first. Otherwise a power loss could keep this lease and undo an earlier rename of another
        lease, which would then be lost.

        Args:
            occupancy: made under the same hold of the allocator lock; contains the lease afterwards.

        Raises:
            StateError: another job holds one of the GPUs, or the job already has a lease; or it cannot be written. If
                the lease is there all the same, it is an orphan, which the next command or waiter adopts.
        """
        durable.make_folder(self.folder)
        path = self.path(lease.name)
        if path.exists():
            raise StateError(
                "the job already has a lease, the file that reserves its GPUs", job=lease.job, where=str(path)
            )
        occupancy.grant(lease)
        durable.sync_folder(self.folder)
        with _kept(LeaseLock(durable.write_locked_record(path, lease), path)) as lock:
            durable.sync_folder(self.folder)
            self._keep_second_name(lease.job)
        return lock

    def grow(self, lock: LeaseLock, lease: Lease, occupancy: Occupancy) -> LeaseLock:
        """Replace a lease by one with more GPUs. The caller holds the allocator lock, and `lock`, as for `change`.

        Raises:
            StateError: another job holds one of the GPUs.
        """
        occupancy.grant(lease)
        return self.change(lock, lease)

    def change(self, lock: LeaseLock, lease: Lease) -> LeaseLock:
        """Replace a lease by one without more GPUs. The caller holds `lock`, which holds the new file's lock then.

        After an error the old lease stands, and `lock` holds it. Once the new file has its name, nothing fails: a grant
        syncs the folder first, so a power loss brings the old lease back only while nobody else has its GPUs.
        """
        lock.hold(durable.write_locked_record(lock.path, lease))
        with suppress(StateError):
            durable.sync_folder(self.folder)
        if not lease.lost:
            self._keep_second_name(lease.job)
        return lock

    def second_name(self, job: str) -> StatePath:
        """Return the path of the second hard link to a running job's lease file, in the job's own folder.

        If somebody removes the lease file by hand, no GPU becomes free: `restore` finds the same file, and the
        supervisor's lock on it, by this link.
        """
        return self._jobs / job / "lease.json"

    def _keep_second_name(self, job: str) -> None:
        """Make the second link. The job's record is written next to it, which syncs the folder."""
        draft = self.second_name(job).sibling(".lease.json.tmp")
        try:
            draft.unlink(missing_ok=True)
            self.path(job).link(draft)
            draft.rename(self.second_name(job))
        except (FileNotFoundError, FileExistsError, StateError):
            # A file system without hard links, or the job's folder is gone, or the disk failed. No second name is
            # better than the name of a file that is no lease any more.
            with suppress(FileNotFoundError, StateError):
                self.second_name(job).unlink(missing_ok=True)

    def _drop_second_name(self, job: str, lock: LeaseLock) -> None:
        """Remove the second link of the locked lease. A later attempt's lease keeps its own."""
        if _is_same(self.second_name(job), lock.descriptor):
            durable.remove_file(self.second_name(job))

    def is_carried(self, job: str) -> bool:
        """Return whether a supervisor holds the lock of a running job's lease, even if the lease file is gone."""
        try:
            with self.second_name(job).reader(linked=True) as stream:
                return is_held(stream.fileno())
        except StateUnavailable:  # it says nothing about the lease
            raise
        except (FileNotFoundError, StateError):
            return False

    def removed(self, jobs: Iterable[str]) -> Iterator[Lease]:
        """Yield the leases of running jobs whose file somebody removed by hand: they still own their GPUs.

        Does not check again whether the file exists: it may have been restored meanwhile.

        Args:
            jobs: ids of jobs that may be past the queue, have not ended, and whose lease was not read.
        """
        for job in jobs:
            if (lease := self._by_second_name(job)) is not None:
                yield lease

    def restore(self, job: str) -> bool:
        """Restore the lease file of a running job, if somebody removed it; return True if so.

        Needs no lock, because a release removes the second link first.
        """
        if self.path(job).exists() or self._by_second_name(job) is None:
            return False
        with suppress(FileNotFoundError, FileExistsError):
            self.second_name(job).link(self.path(job))
            durable.sync_folder(self.folder)
            return True
        return False

    def _by_second_name(self, job: str) -> Lease | None:
        try:
            lease = durable.read_signed(self.second_name(job), Lease, linked=True)[0]
        except StateUnavailable:
            raise
        except (FileNotFoundError, StateError):
            return None
        return lease if lease.job == job and not lease.lost else None

    def sweep(self) -> None:
        """Remove incomplete files of killed writers. The caller holds the allocator lock."""
        for name in self.folder.names() if self.folder.exists() else ():
            if name.startswith(".") and name.endswith(".tmp"):
                with suppress(StateError):  # another user's: a pass of theirs will; or a folder, which no writer left
                    (self.folder / name).unlink(missing_ok=True)

    def abandon(self, lock: LeaseLock, lease: Lease, hosts: Collection[str]) -> tuple[Lease, LeaseLock]:
        """Free all GPUs of a lease except those of `hosts`, which could not be fenced and become a lost lease.

        The caller holds the allocator lock and `lock`. Returns the lock on the lost lease instead of `lock`.
        """
        self._drop_second_name(lease.job, lock)
        kept = tuple(grant for grant in lease.grants if grant.host in hosts)
        lost = replace(lease, grants=kept, lost=True)
        lock = self.change(lock, lost)
        faults.point()
        return lost, self._settle(lock, lost)

    def hand_over(self, lock: LeaseLock, lease: Lease) -> LeaseLock:
        """Replace another user's lease by this user's lost lease. Only root can.

        The caller holds the allocator lock and `lock`. Returns the lock of the new file instead of `lock`.
        """
        self._drop_second_name(lease.job, lock)
        lock.hold(durable.write_locked_record(lock.path, lease, mine=True))
        faults.point()
        return self._settle(lock, lease)

    def _settle(self, lock: LeaseLock, lease: Lease) -> LeaseLock:
        """Give a locked lease its proper name: a crash in `abandon` may have left the old one.

        The caller holds the allocator lock. Otherwise a reader of the folder could see the lease under neither name.
        """
        path = self.path(lease.name)
        if lock.path != path:
            lock.path.rename(path)
            lock.path = path
        durable.sync_folder(self.folder)
        return lock

    def take_orphans(self, uid: int, after: str = "") -> Iterator[tuple[Lease, LeaseLock]]:
        """Lock every lease of a user without a supervisor, in the order of names, each under its proper name.

        Args:
            after: only leases whose names come after this one.
        """
        for lease in sorted(self.read_all(but_held=True).leases, key=lambda lease: lease.name):
            is_wanted = lease.owner_uid == uid and lease.name > after
            lock = self._take_orphan(lease) if is_wanted else None
            if lock is None:
                continue
            if lock.path != self.path(lease.name):
                with _kept(lock), AllocatorLock(self.folder.parent.plain).held():
                    self._settle(lock, lease)
            yield lease, lock

    def _take_orphan(self, lease: Lease) -> LeaseLock | None:
        """Return the lock on exactly this lease: under either name there may now be another one."""
        for name in dict.fromkeys((lease.name, lease.job)):
            lock = self.try_lock(name) or self._past_readers(name, lease)
            if lock is None:
                continue
            with _kept(lock):
                if lock.is_mine() and self._is_at(name, lease) and not self._lives_elsewhere(lease, lock):
                    return lock
            lock.close()
        return None

    def _past_readers(self, name: str, lease: Lease) -> LeaseLock | None:
        """Replace a lease that other users keep read-locked by a new file, whose lock this process holds.

        Everybody can read a lease, so everybody can hold a read lock on it. Returns None if the lock cannot be taken
        for another reason.
        """
        path = self.path(name)
        if self.is_alive(name) or not path.exists():
            return None
        with AllocatorLock(self.folder.parent.plain).held():
            try:
                lock = LeaseLock(path.open_file(os.O_RDWR, linked=True), path)
            except (FileNotFoundError, StateError):
                return None
            with _kept(lock):
                is_orphan = not is_held(lock.descriptor) and lock.is_current() and lock.is_mine()
                if is_orphan and self._is_at(name, lease) and not self._lives_elsewhere(lease, lock):
                    return self.change(lock, lease)
            lock.close()
            return None

    def _lives_elsewhere(self, lease: Lease, lock: LeaseLock) -> bool:
        """Return whether a supervisor holds the lease by its second link, because a person or an editor replaced the
        file.
        """
        same = _is_same(self.second_name(lease.job), lock.descriptor)
        return not lease.lost and not same and self.is_carried(lease.job)

    def _is_at(self, name: str, lease: Lease) -> bool:
        try:
            return self.read(name) == lease
        except StateError:
            return False

    def try_lock(self, name: str) -> LeaseLock | None:
        """Take a lease's lock; None if its supervisor lives, or the lease is gone."""
        path = self.path(name)
        try:
            descriptor = path.open_file(os.O_RDWR, linked=True)
        except (FileNotFoundError, StateError):
            return None
        with _kept(LeaseLock(descriptor, path)) as taken:
            try:
                is_taken = try_take(descriptor)
            except OSError as error:
                raise state_error(error, path, "locked") from error
            if is_taken and taken.is_current():  # else released, or replaced, before it was locked
                return taken
        taken.close()
        return None

    def release(self, lock: LeaseLock) -> None:
        """Remove a lease after its hosts were fenced. The caller holds its lock.

        Keeps another file that is now in its place.
        """
        job = lock.path.name.removesuffix(".json")
        if "." not in job:
            self._drop_second_name(job, lock)
        if lock.is_current():
            durable.remove_file(lock.path)

    def is_alive(self, name: str) -> bool:
        """Return True while some process holds the lease's lock. Changes nothing."""
        try:
            descriptor = self.path(name).open_file(os.O_RDONLY, linked=True)
        except (FileNotFoundError, StateError):  # nothing that could be held
            return False
        try:
            return is_held(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _kept(lock: LeaseLock) -> Iterator[LeaseLock]:
    """Close the lock if the block fails: nobody else would."""
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


def _is_same(path: StatePath, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except StateUnavailable:  # it says nothing about the file
        raise
    except (FileNotFoundError, StateError):
        return False
