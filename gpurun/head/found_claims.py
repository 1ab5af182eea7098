"""Claims on hosts for jobs that this state directory no longer knows, because somebody removed a lease or a record.

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
from gpurun.head.forged import is_chosen
from gpurun.inventory.load import load
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import GpuHolder, JobRecord
from gpurun.jobs.spec import Grant
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.lease import Lease, machines_of, places_of
from gpurun.leases.look import look
from gpurun.leases.refusals import FORGET_S
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state import audit, clock
from gpurun.state.identity import known_id
from gpurun.state.people import myself


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


def adopt_claims(home: Path, claims: Iterable[FoundClaim]) -> tuple[tuple[Lease, LeaseLock], ...]:
    """Turn forgotten claims of this user into lost leases. Idempotent.

    Returns:
        The new leases with their locks held, for `gpurun.head.spawn.start_supervisor`. Skips a claim on GPUs that a
        pass grants at this moment: the host refuses that gang, too, and the next look finds the GPUs free.
    """
    claims = tuple(claims)
    if not claims:
        return ()
    adopted = []
    leases = LeaseStore(home)
    with ExitStack() as on_error:
        with allocator_lock(home):
            view = look(home, now_s=clock.now_s())
            forgotten = [claim for claim in claims if _is_forgotten_here(home, claim, view.leases)]
            for lease in _as_leases(forgotten):
                faults.point()
                with suppress(StateError):  # the GPUs are granted, or the attempt has a lost lease by now
                    adopted.append((lease, on_error.enter_context(leases.grant(lease, view.occupancy))))
                    audit.note(home, "adopt claim", job=lease.job, hosts=[grant.host for grant in lease.grants])
        on_error.pop_all()
    return tuple(adopted)


def claims_to_adopt(home: Path, records: Iterable[JobRecord]) -> tuple[FoundClaim, ...]:
    """Return this user's claims that hosts recently reported to anybody's job. Some may not be forgotten.

    Another user's record can name any inventory. So a claim counts only if this user has submitted a job with the
    inventory.

    Args:
        records: records of all jobs that have not ended.
    """
    store, uid = JobStore(home), os.getuid()
    try:
        found = in_refusals(records, known_id(home), uid, clock.now_s())
    except StateError:  # the id is damaged: the supervisors' errors name it
        return ()
    chosen = {path for path in {claim.inventory for claim in found} if is_chosen(store, path, uid)}
    return tuple(claim for claim in found if claim.inventory in chosen)


def _is_forgotten_here(home: Path, claim: FoundClaim, leases: Iterable[Lease]) -> bool:
    folder = JobStore(home).get(claim.holder.job)
    try:
        record = folder.record() if folder.path.is_dir() else None
    except StateError:  # damaged: a person decides
        return False
    return is_forgotten(claim, leases, record)


def _as_leases(claims: Iterable[FoundClaim]) -> Iterator[Lease]:
    """Yield one lost lease for each attempt."""
    attempts: dict[tuple[str, int, str], dict[str, set[int]]] = {}
    for claim in claims:
        key = (claim.holder.job, claim.holder.attempt, claim.inventory)
        attempts.setdefault(key, {}).setdefault(claim.host, set()).update(claim.holder.gpus)
    for (job, attempt, path), gpus in attempts.items():
        with suppress(BadInput):  # without the inventory, the host is unreachable
            yield from _lease(job, attempt, load(Path(path)), gpus)


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
