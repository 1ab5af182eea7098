"""Lease files: the truth about who owns which GPU.

``leases/ID.json`` is written once, whole, under the allocator lock, and removed only after every host of the
gang has been fenced. When some hosts cannot be fenced, what they hold becomes a lost lease,
``leases/ID.ATTEMPT.lost.json``, and the job goes on without them; in no moment is a GPU in two files. An
lock on the file itself (`gpurun.state.lock`) is the sign of life of the job's supervisor: it passes from the granting
command to the supervisor with the descriptor, so there is no moment at which a running job looks orphaned. Only the
lease's owner and root can write the file, so nobody else can hold that lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpurun import faults
from gpurun.errors import StateError
from gpurun.jobs.record import ID_PATTERN
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.lease import Holdings, Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.state import durable
from gpurun.state.lock import is_held, try_take
from gpurun.state.path import StatePath
from gpurun.state.people import user_name

WAY_OUT = "`gpurun recover` shows what it may belong to and the way out"
NAME_PATTERN = re.compile(rf"{ID_PATTERN.pattern}(\.\d{{1,6}}\.lost)?\.json")


class LeaseLock:
    """The sign of life on one lease: its file's lock, held by an open descriptor."""

    def __init__(self, descriptor: int, path: StatePath) -> None:
        self.descriptor = descriptor
        self.path = path

    def close(self) -> None:
        """Give the lock up, unless another process inherited the descriptor."""
        os.close(self.descriptor)

    def is_mine(self) -> bool:
        """True if this user wrote the lease, whoever it says it belongs to."""
        return os.fstat(self.descriptor).st_uid == os.getuid()

    def is_current(self) -> bool:
        """True if the locked file is still the one at the lease's path."""
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
        """Where a lease lies; a running job's is named after the job."""
        return self.folder / f"{name}.json"

    def read_all(self) -> Holdings:
        """Every lease there is. Nothing in the folder is passed over but the temporary files of `durable`."""
        leases, damaged = [], []
        try:
            names = sorted(self.folder.names())
        except FileNotFoundError:
            return Holdings((), ())
        for name in names:
            if name.startswith(".") and name.endswith(".tmp"):
                continue
            path = self.folder / name
            try:
                leases.append(self._read(path))
            except FileNotFoundError:
                continue  # released between listing and reading
            except StateError as error:
                error.hint = error.hint or WAY_OUT
                damaged.append(error)
        return Holdings(tuple(leases), tuple(damaged))

    def _read(self, path: StatePath) -> Lease:
        if not NAME_PATTERN.fullmatch(path.name):
            raise StateError("is not a lease that gpurun wrote", where=str(path))
        lease, writer = durable.read_signed(path, Lease, linked=True)
        if writer not in (lease.owner_uid, 0):
            who = "others can write it" if writer is None else f"{user_name(writer)} wrote it"
            raise StateError(f"says that it is {user_name(lease.owner_uid)}'s, but {who}", where=str(path))
        # A crash between the two steps of `abandon` leaves a lost lease under the job's own name.
        if path.name not in (f"{lease.name}.json", f"{lease.job}.json"):
            raise StateError(f"names lease {lease.name!r}, not its own", where=str(path))
        return lease

    def read(self, name: str) -> Lease | None:
        """One lease; None if there is none. Raises StateError if it is damaged."""
        try:
            return self._read(self.path(name))
        except FileNotFoundError:
            return None

    def grant(self, lease: Lease, occupancy: Occupancy) -> LeaseLock:
        """Write a lease and take its lock. The caller holds the allocator lock.

        What it has seen in the folder is durable first: else a power loss could keep this lease and, with it, a name
        that another one had before, and lose that other one.

        Args:
            occupancy: made under the same hold of the allocator lock; has the lease afterwards.

        Raises:
            StateError: somebody holds one of the GPUs, or the job already has a lease.
        """
        durable.make_folder(self.folder)
        path = self.path(lease.name)
        if path.exists():
            raise StateError("already holds a lease", job=lease.job, where=str(path))
        occupancy.grant(lease)
        durable.sync_folder(self.folder)
        lock = LeaseLock(durable.write_locked_record(path, lease), path)
        self._keep_second_name(lease.job)
        return lock

    def grow(self, lock: LeaseLock, lease: Lease, occupancy: Occupancy) -> LeaseLock:
        """Replace a lease by one with more GPUs. The caller holds the allocator lock, and `lock`, as for `change`.

        Raises:
            StateError: somebody holds one of the GPUs.
        """
        occupancy.grant(lease)
        return self.change(lock, lease)

    def change(self, lock: LeaseLock, lease: Lease) -> LeaseLock:
        """Replace a lease by one without more GPUs. The caller holds `lock`, which is given up for the new file's."""
        descriptor = durable.write_locked_record(lock.path, lease)
        lock.close()
        if not lease.lost:
            self._keep_second_name(lease.job)
        return LeaseLock(descriptor, lock.path)

    def second_name(self, job: str) -> StatePath:
        """A running job's lease file has this name, too, in the job's own folder.

        It is another name of one file, not a copy: whoever removes the lease file by hand frees nothing, because
        `restore` finds the file, and the supervisor's lock on it, under this name.
        """
        return self._jobs / job / "lease.json"

    def _keep_second_name(self, job: str) -> None:
        """The job's record is written next to it and syncs the folder."""
        draft = self.second_name(job).sibling(".lease.json.tmp")
        with suppress(FileNotFoundError):
            draft.unlink()
        with suppress(FileNotFoundError, StateError):  # a file system without hard links, or the job's folder is gone
            self.path(job).link(draft)
            draft.rename(self.second_name(job))

    def _drop_second_name(self, job: str, lock: LeaseLock) -> None:
        """Remove the second name of the locked lease. A later attempt's lease keeps its own."""
        if _is_same(self.second_name(job), lock.descriptor):
            durable.remove(self.second_name(job))

    def is_carried(self, job: str) -> bool:
        """Whether a supervisor holds a running job's lease, whatever became of the lease file."""
        with suppress(FileNotFoundError, StateError), self.second_name(job).reader(linked=True) as stream:
            return is_held(stream.fileno())
        return False

    def removed(self, jobs: Iterable[str]) -> Iterator[Lease]:
        """The leases of running jobs whose file somebody removed by hand: they still own their GPUs.

        Whether the file is there is not asked: it may have been restored since it was missed.

        Args:
            jobs: ids of the jobs that are past the queue, or may be, have not ended, and whose lease was not read.
        """
        for job in jobs:
            if (lease := self._by_second_name(job)) is not None:
                yield lease

    def restore(self, job: str) -> bool:
        """Give a running job's lease its name back, if somebody removed it; True if it was so.

        Needs no lock: a release removes the second name first.
        """
        if self.path(job).exists() or self._by_second_name(job) is None:
            return False
        with suppress(FileNotFoundError, FileExistsError):
            self.second_name(job).link(self.path(job))
            durable.sync_folder(self.folder)
            return True
        return False

    def _by_second_name(self, job: str) -> Lease | None:
        with suppress(FileNotFoundError, StateError):
            lease = durable.read_signed(self.second_name(job), Lease, linked=True)[0]
            return lease if lease.job == job and not lease.lost else None
        return None

    def sweep(self) -> None:
        """Remove what writers that were killed left half written. The caller holds the allocator lock."""
        for name in self.folder.names() if self.folder.exists() else ():
            if name.startswith(".") and name.endswith(".tmp"):
                with suppress(StateError):  # another user's: a pass of theirs will; or a folder, which no writer left
                    (self.folder / name).unlink(missing_ok=True)

    def abandon(self, lock: LeaseLock, lease: Lease, hosts: Collection[str]) -> tuple[Lease, LeaseLock]:
        """Free all GPUs of a lease but those of `hosts`, which could not be fenced: they become a lost lease.

        The caller holds the allocator lock, and `lock`, which is given up for the lock on the lost lease.
        """
        self._drop_second_name(lease.job, lock)
        kept = tuple(grant for grant in lease.grants if grant.host in hosts)
        lost = replace(lease, grants=kept, lost=True)
        lock = self.change(lock, lost)
        faults.point()
        return lost, self._settle(lock, lost)

    def hand_over(self, lock: LeaseLock, lease: Lease) -> LeaseLock:
        """Replace another user's lease by a lost one that is this user's. Only root can.

        The caller holds the allocator lock, and `lock`, which is given up for the new file's.
        """
        self._drop_second_name(lease.job, lock)
        descriptor = durable.write_locked_record(lock.path, lease, mine=True)
        lock.close()
        faults.point()
        return self._settle(LeaseLock(descriptor, lock.path), lease)

    def _settle(self, lock: LeaseLock, lease: Lease) -> LeaseLock:
        """Give a lease that its holder has locked its proper name: a crash in `abandon` may have left the old one.

        The caller holds the allocator lock: who lists the folder meanwhile could see the lease under neither name.
        """
        path = self.path(lease.name)
        if lock.path != path:
            lock.path.rename(path)
            durable.sync_folder(self.folder)
        return LeaseLock(lock.descriptor, path)

    def take_orphans(self, uid: int) -> Iterator[tuple[Lease, LeaseLock]]:
        """Lock every lease of a user that nobody holds, one after the other, each under its proper name."""
        for lease in self.read_all().leases:
            lock = self._take_orphan(lease) if lease.owner_uid == uid else None
            if lock is None:
                continue
            if lock.path != self.path(lease.name):
                with allocator_lock(self.folder.parent.plain):
                    lock = self._settle(lock, lease)
            yield lease, lock

    def _take_orphan(self, lease: Lease) -> LeaseLock | None:
        """The lock on exactly this lease: under either name, another one may lie by now."""
        for name in dict.fromkeys((lease.name, lease.job)):
            lock = self.try_lock(name)
            if lock is None:
                continue
            if lock.is_mine() and self._is_at(name, lease) and not self._lives_elsewhere(lease, lock):
                return lock
            lock.close()
        return None

    def _lives_elsewhere(self, lease: Lease, lock: LeaseLock) -> bool:
        """Whether a supervisor holds the lease under its second name: a person or an editor replaced the file."""
        same = _is_same(self.second_name(lease.job), lock.descriptor)
        return not lease.lost and not same and self.is_carried(lease.job)

    def _is_at(self, name: str, lease: Lease) -> bool:
        try:
            return self.read(name) == lease
        except StateError:
            return False

    def try_lock(self, name: str) -> LeaseLock | None:
        """Take a lease's lock; None if a supervisor lives, or the lease is gone."""
        path = self.path(name)
        try:
            descriptor = path.open_file(os.O_RDWR, linked=True)
        except (FileNotFoundError, StateError):
            return None
        taken = LeaseLock(descriptor, path)
        if try_take(descriptor) and taken.is_current():  # else released, or replaced, before it was locked
            return taken
        taken.close()
        return None

    def release(self, lock: LeaseLock) -> None:
        """Remove a lease after its hosts were fenced. The caller holds its lock.

        Another file that lies in its place by now is somebody else's, and stays.
        """
        job = lock.path.name.removesuffix(".json")
        if "." not in job:
            self._drop_second_name(job, lock)
        if lock.is_current():
            durable.remove(lock.path)

    def is_alive(self, name: str) -> bool:
        """True while some process holds the lease's lock. Only looks."""
        try:
            descriptor = self.path(name).open_file(os.O_RDONLY, linked=True)
        except (FileNotFoundError, StateError):  # nothing that could be held
            return False
        try:
            return is_held(descriptor)
        finally:
            os.close(descriptor)


def _is_same(path: StatePath, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except (FileNotFoundError, StateError):
        return False
