"""Claims on hosts for jobs that this state directory no longer knows, and claims that somebody forged.

The GPUs may still be in use. So gpurun turns such a claim into a lost lease. The lost lease's keeper fences the host
and then frees the GPUs (docs/decisions/0003-lost-leases.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from gpurun import faults
from gpurun.errors import BadInput, StateError
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import GpuHolder, JobRecord, State
from gpurun.jobs.spec import Grant
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import FORGET_S, Lease, machines_of, places_of
from gpurun.leases.look import look
from gpurun.leases.store import AllocatorLock, LeaseLock, LeaseStore
from gpurun.state import clock
from gpurun.state.audit import AuditLog
from gpurun.state.paths import myself, not_only_root_s
from gpurun.state.sharing import StateDirectory

# Check a lease before gpurun adopts it: its inventory says how to reach hosts, so a forged lease could run commands.


@dataclass(frozen=True)
class Claims:
    """Leases and claims that a state directory checks before a process acts on them."""

    home: Path

    def check_lease(self, lease: Lease) -> None:
        """Refuse a lease that its owner may not have written.

        The record of the lease's job must name the same owner and the same inventory: by the path that the person gave
        or as the inventory of one of its grants, because the path may have been a link that has changed since. A lost
        lease may outlive its job's record, or exist because another job was refused the GPUs. Then any job of its owner
        must name the inventory. Root's lost leases can be of any user's job, if only root can change the inventory.

        Raises:
            StateError: the lease may be forged, or its job is gone or damaged.
        """
        if _is_root_s(lease):
            return
        store = JobStore(self.home)
        try:
            record = store.get(lease.job).record()
        except StateError:
            if not lease.lost:
                raise
            if is_chosen(store, lease.inventory, lease.owner_uid):
                return
            raise self._forged(lease, "no job of the lease's owner uses this inventory") from None
        if record.owner_uid != lease.owner_uid:
            raise self._forged(lease, f"the lease's job belongs to {record.owner}")
        if not _same(record, lease.inventory) and not (
            lease.lost and is_chosen(store, lease.inventory, lease.owner_uid)
        ):
            raise self._forged(lease, f"the lease's job was submitted with {record.inventory}")

    def forged_leases(self) -> Iterable[StateError]:
        """Yield the errors of `check_lease` for leases without a supervisor. Their GPUs stay leased.

        Only a lease's owner can hold its lock. So if a process of the owner holds the lock, the owner wrote the lease.
        """
        leases = LeaseStore(self.home)
        for lease in leases.read_all().leases:
            path = self._path(lease)
            try:
                self.check_lease(lease)
            except StateError as error:
                if path.exists() and not leases.is_alive(path.name.removesuffix(".json")):
                    error.where = str(path)
                    yield error

    def _path(self, lease: Lease) -> Path:
        """Return the file of a lease. An interrupted step leaves a lost lease under its job's name."""
        leases = LeaseStore(self.home)
        path = leases.path(lease.name)
        return (path if path.exists() else leases.path(lease.job)).plain

    def _forged(self, lease: Lease, why: str) -> StateError:
        return StateError(
            "the lease, a file that reserves GPUs for a job, may be forged, so gpurun does not act on the lease. "
            f"The lease names the inventory {lease.inventory!r}, but {why}",
            where=str(self._path(lease)), hint="`gpurun recover` shows what you can do with this lease",
        )  # fmt: skip

    def adopt(self, claims: Iterable[FoundClaim]) -> tuple[tuple[Lease, LeaseLock], ...]:
        """Turn forgotten claims of this user into lost leases. Idempotent.

        Returns:
            The new leases with their locks held, for `gpurun.head.spawn.Head.start_all`. Skips a claim on GPUs that a
            pass grants at this moment: the host refuses that gang, too, and the next look finds the GPUs free.
        """
        claims = tuple(claims)
        if not claims:
            return ()
        adopted = []
        leases = LeaseStore(self.home)
        with ExitStack() as on_error:
            with AllocatorLock(self.home).held():
                view = look(self.home, now_s=clock.now_s())
                forgotten = [claim for claim in claims if self._is_forgotten(claim, view.leases)]
                for lease in _as_leases(forgotten):
                    faults.point()
                    with suppress(StateError):  # the GPUs are granted, or the attempt has a lost lease by now
                        adopted.append((lease, on_error.enter_context(leases.grant(lease, view.occupancy))))
                        AuditLog(self.home).note(
                            "adopt claim", job=lease.job, hosts=[grant.host for grant in lease.grants]
                        )
            on_error.pop_all()
        return tuple(adopted)

    def to_adopt(self, records: Iterable[JobRecord]) -> tuple[FoundClaim, ...]:
        """Return this user's claims that hosts recently reported to anybody's job. Some may not be forgotten.

        Another user's record can name any inventory. So a claim counts only if this user has submitted a job with the
        inventory.

        Args:
            records: records of all jobs that have not ended.
        """
        store, uid = JobStore(self.home), os.getuid()
        try:
            found = in_refusals(records, StateDirectory(self.home).known_id(), uid, clock.now_s())
        except StateError:  # the id is damaged: the supervisors' errors name it
            return ()
        chosen = {path for path in {claim.inventory for claim in found} if is_chosen(store, path, uid)}
        return tuple(claim for claim in found if claim.inventory in chosen)

    def _is_forgotten(self, claim: FoundClaim, leases: Iterable[Lease]) -> bool:
        folder = JobStore(self.home).get(claim.holder.job)
        try:
            record = folder.record() if folder.path.is_dir() else None
        except StateError:  # damaged: a person decides
            return False
        return is_forgotten(claim, leases, record)


def _is_root_s(lease: Lease) -> bool:
    """Return whether root made a lost lease to fence another user's hosts: root's file, and only root can change its
    inventory.
    """
    return lease.owner_uid == 0 and lease.lost and not_only_root_s(Path(lease.inventory)) is None


def is_chosen(store: JobStore, inventory: str, uid: int) -> bool:
    """Return whether a user has submitted a job with this inventory."""
    return any(record.owner_uid == uid and _same(record, inventory) for record in store.records(lambda _: None))


def _same(record: JobRecord, inventory: str) -> bool:
    return inventory in record.granted_from or os.path.realpath(record.inventory) == os.path.realpath(inventory)


@dataclass(frozen=True)
class FoundClaim:
    """A claim on a host for a job of this state directory.

    Attributes:
        inventory: the canonical path of the inventory that names the host.
        seen_s: when the host reported the claim, seconds since the epoch.
    """

    inventory: str
    host: str
    holder: GpuHolder
    seen_s: float


def in_refusals(records: Iterable[JobRecord], state: str | None, uid: int, now_s: float) -> tuple[FoundClaim, ...]:
    """Return claims of one user's jobs that hosts named when they refused GPUs to any job in the last minutes.

    Args:
        state: the id of this state directory; None if it has no id yet: then no host can name it.
    """
    return tuple(
        FoundClaim(os.path.realpath(record.inventory), refusal.host, refusal.holder, refusal.until_s - refusal.pause_s)
        for record in records
        for refusal in record.refusals
        if state is not None and refusal.holder.state == state and refusal.holder.uid == uid and refusal.holder.job
        if abs(now_s - refusal.until_s) < FORGET_S
    )


def is_forgotten(claim: FoundClaim, leases: Iterable[Lease], record: JobRecord | None) -> bool:
    """Return whether no supervisor runs the attempt for which a host claims GPUs.

    gpurun releases a claim before the lease, and before the job's record says that the attempt has ended. So the claim
    counts only if the host still had it afterwards.

    Args:
        record: the job's record; None if there is none.
    """
    holder = claim.holder
    if any((lease.job, lease.attempt) == (holder.job, holder.attempt) for lease in leases):
        return False
    if record is None:
        return True
    if record.state.ended:
        over_s = record.ended_s
    elif record.state is State.QUEUED:
        over_s = record.queued_s
    else:
        over_s = record.granted_s if record.attempt > holder.attempt else None
    return over_s is not None and claim.seen_s > over_s


def _as_leases(claims: Iterable[FoundClaim]) -> Iterator[Lease]:
    """Yield one lost lease for each attempt."""
    attempts: dict[tuple[str, int, str], dict[str, set[int]]] = {}
    for claim in claims:
        key = (claim.holder.job, claim.holder.attempt, claim.inventory)
        attempts.setdefault(key, {}).setdefault(claim.host, set()).update(claim.holder.gpus)
    for (job, attempt, path), gpus in attempts.items():
        with suppress(BadInput):  # without the inventory, the host is unreachable
            yield from _lease(job, attempt, load_inventory(Path(path)), gpus)


def _lease(job: str, attempt: int, inventory: Inventory, gpus: Mapping[str, set[int]]) -> Iterator[Lease]:
    hosts = [inventory.by_name[name] for name in gpus if name in inventory.by_name]
    if hosts:
        grants = tuple(Grant(host.name, tuple(sorted(gpus[host.name]))) for host in hosts)
        yield Lease(
            job=job, attempt=attempt, owner=myself(), owner_uid=os.getuid(), generation=hosts[0].generation,
            racks=tuple(dict.fromkeys(host.rack for host in hosts)), grants=grants, ssh_port=0, granted_s=clock.now_s(),
            inventory=inventory.source, lost=True, found=True, machines=machines_of(inventory, grants),
            places=places_of(inventory, grants),
        )  # fmt: skip
