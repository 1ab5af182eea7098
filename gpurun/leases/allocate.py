"""A pass: snapshot → decisions → commit, under the allocator lock.

The decision is `gpurun.scheduler`'s and pure. This module gathers the snapshot from files and commits the
answer: a lease file per granted gang first, then the job's record; a request to give way per preempted gang. It
decides for everybody's jobs, in the one order there is, and commits those of the user who runs it: what it left for
others, their waiters take in passes of their own, and gangs of others that must give way are asked to look for
themselves (`gpurun.leases.asking`). A user whose waiter does not live is passed over.
A crash between any two writes leaves a state that the next pass understands (see `mark_granted`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.inventory.load import load
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import CancelRequest, JobRecord, Kept
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.allocator import PATIENCE_S, allocator_lock
from gpurun.leases.asking import ask_to_give_way
from gpurun.leases.store import Holdings, Lease, LeaseLock, LeaseStore
from gpurun.leases.waiters import waiter_lives
from gpurun.scheduler.gangs import gang_of
from gpurun.scheduler.model import Decisions, Gang, Placement, Running, Snapshot
from gpurun.scheduler.schedule import schedule
from gpurun.state import audit
from gpurun.state.cordons import read_cordons

SSH_PORTS = range(23022, 32022)
"""Below Linux's ephemeral ports (32768 …), above the registered services hosts commonly run."""


@dataclass(frozen=True)
class Pass:
    """What a pass did.

    Attributes:
        granted: new leases with their locks held; whoever gets them starts the supervisors.
        decisions: per inventory file, the scheduler's whole answer.
        snapshots: what it was made from.
        problems: damaged files and unreadable inventories that were met, each once.
    """

    granted: tuple[tuple[Lease, LeaseLock], ...] = ()
    decisions: Mapping[str, Decisions] = field(default_factory=dict)
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    problems: tuple[GpurunError, ...] = ()


def run_pass(home: Path, *, now_s: float, commit: bool = True, patience_s: float | None = PATIENCE_S) -> Pass:
    """Run one pass over everything that is queued.

    Args:
        commit: False only looks: the same decisions, nothing written.
        patience_s: as for `allocator_lock`.

    Raises:
        StateError: a lease is damaged, so that it cannot be known which GPUs are free.
    """
    store, leases = JobStore(home), LeaseStore(home)
    if not commit:
        return _decide(store, leases, now_s)
    with allocator_lock(home, patience_s=patience_s):
        leases.sweep()
        looked = _decide(store, leases, now_s)
        granted: list[tuple[Lease, LeaseLock]] = []
        for inventory, decisions in looked.decisions.items():
            granted += _commit(store, leases, inventory, decisions, now_s)
        return replace(looked, granted=tuple(granted))


def snapshot(home: Path, inventory: Inventory, *, now_s: float, extra: Iterable[Gang] = ()) -> Snapshot:
    """What the scheduler would see of one inventory now, with `extra` gangs in the queue."""
    store = JobStore(home)
    holdings = LeaseStore(home).read_all()
    jobs = {record.id: record for record in store.records(lambda _: None, ids=store.live_ids())}
    found = _snapshot(store, inventory, holdings, jobs, now_s)
    return replace(found, queue=(*found.queue, *extra))


def refuse_while_damaged(holdings: Holdings) -> None:
    """Raise the first damage found: as long as a lease is unreadable, no GPU is known to be free."""
    for error in holdings.damaged:
        raise StateError(
            f"the lease {error.message}; nothing is granted while its GPUs are unknown",
            where=error.where, hint=error.hint,
        )  # fmt: skip


def _decide(store: JobStore, leases: LeaseStore, now_s: float) -> Pass:
    holdings = leases.read_all()
    refuse_while_damaged(holdings)
    problems: list[GpurunError] = []
    jobs = {record.id: record for record in store.records(problems.append, ids=store.live_ids())}
    waiting = [record for record in jobs.values() if record.state is State.QUEUED]
    decisions: dict[str, Decisions] = {}
    snapshots: dict[str, Snapshot] = {}
    for path in sorted({record.inventory for record in waiting}):
        try:
            inventory = load(Path(path))
        except BadInput as error:
            problems.append(error)
            continue
        snapshots[path] = _snapshot(store, inventory, holdings, jobs, now_s, problems.append)
        decisions[path] = schedule(snapshots[path])
    return Pass((), decisions, snapshots, tuple(problems))


def _snapshot(
    store: JobStore,
    inventory: Inventory,
    holdings: Holdings,
    jobs: Mapping[str, JobRecord],
    now_s: float,
    on_problem: Callable[[GpurunError], None] = lambda _: None,
) -> Snapshot:
    leased = {lease.job for lease in holdings.leases if not lease.lost}
    running, queue = [], []
    taken: dict[str, tuple[int, ...]] = {}
    for lease in holdings.leases:
        record = jobs.get(lease.job)
        if record is None or lease.lost or lease.inventory != inventory.source:
            for grant in lease.grants:  # another inventory's gang, one whose record is damaged, or a lost host's
                taken[grant.host] = (*taken.get(grant.host, ()), *grant.gpus)
            continue
        gang = gang_of(record, _spec_or(store, record, on_problem))
        stopping = record.state is State.STOPPING or _asked_to_end(store, record, on_problem)
        placement = Placement(lease.generation, lease.racks, lease.grants)
        if gang.min_gpus is not None:
            gang = replace(gang, gpus=placement.gpus)
        saved_s = record.checkpoint_s
        running.append(Running(gang, placement, lease.granted_s, record.started_s, saved_s, stopping))
    for record in jobs.values():
        waits = record.state is State.QUEUED and record.id not in leased and record.inventory == inventory.source
        waits = waits and not record.waits_for_restart(now_s)
        mine = record.owner_uid == os.getuid()
        looked_after = waits and (mine or waiter_lives(store.home, record.owner_uid))
        if looked_after and not _asked_to_end(store, record, on_problem):
            queue.append(gang_of(record, _spec_or(store, record, on_problem)))
    cordons = read_cordons(store.home)
    unusable = {host: f"{cordon.state}: {cordon.reason}" for host, cordon in cordons.items()}
    return Snapshot(inventory, tuple(running), tuple(queue), unusable, taken, now_s)


def _asked_to_end(store: JobStore, record: JobRecord, on_problem: Callable[[GpurunError], None]) -> bool:
    """Whether there is a request to end; a damaged one is named, and stops neither the job nor the passes of others."""
    damage = store.get(record.id).damaged_request()
    if damage is not None:
        on_problem(damage)
    return store.get(record.id).cancel_request() is not None


def _spec_or(store: JobStore, record: JobRecord, on_problem: Callable[[GpurunError], None]) -> JobSpec:
    """The job's spec; for a damaged one, the little its record says: enough to count its GPUs."""
    try:
        return store.get(record.id).spec()
    except (StateError, FileNotFoundError) as error:
        if isinstance(error, StateError):
            on_problem(error)
        return JobSpec(name=record.name, image="", gpus=record.gpus, command=(), pool=record.pool)


def _commit(
    store: JobStore, leases: LeaseStore, inventory: str, decisions: Decisions, now_s: float
) -> list[tuple[Lease, LeaseLock]]:
    ports = {lease.ssh_port for lease in leases.read_all().leases}
    granted = []
    for gang, placement in decisions.starts:
        folder = store.get(gang.id)
        record = folder.record()
        if record.owner_uid != os.getuid():
            continue
        lease = Lease(
            job=gang.id, attempt=record.attempt + 1, owner=record.owner, owner_uid=record.owner_uid,
            generation=placement.generation, racks=placement.racks, grants=placement.grants,
            ssh_port=next(port for port in SSH_PORTS if port not in ports), granted_s=now_s, inventory=inventory,
        )  # fmt: skip
        ports.add(lease.ssh_port)
        lock = leases.grant(lease)
        mark_granted(store, lease)
        granted.append((lease, lock))
        hosts = [grant.host for grant in lease.grants]
        audit.note(store.home, "grant", job=gang.id, attempt=lease.attempt, hosts=hosts)
    _preempt(store, decisions, now_s)
    for job in decisions.order:
        _note_kept(store, job, decisions.kept.get(job))
    return granted


def _preempt(store: JobStore, decisions: Decisions, now_s: float) -> None:
    others = []
    for preemption in decisions.preempts:
        folder = store.get(preemption.victim)
        if folder.record().owner_uid != os.getuid():
            others.append(preemption.victim)
        elif folder.cancel_request() is None:
            folder.ask_to_cancel(CancelRequest("preempt", by="scheduler", asked_s=now_s, reason=preemption.message))
            audit.note(store.home, "preempt", job=preemption.victim, taker=preemption.taker, reason=preemption.message)
    ask_to_give_way(store.home, others)


def mark_granted(store: JobStore, lease: Lease) -> None:
    """Bring a job's record up to its lease; also what repairs a crash between the two writes."""
    store.get(lease.job).move(
        State.GRANTED, attempt=lease.attempt, granted=lease.grants, granted_s=lease.granted_s,
        kept=None, reason="", outcome=None, first_failure=None, reached="nothing", restart=None, checkpoint_s=None,
    )  # fmt: skip


def _note_kept(store: JobStore, job: str, kept: Kept | None) -> None:
    folder = store.get(job)
    record = folder.record()
    if record.owner_uid == os.getuid() and record.state is State.QUEUED and record.kept != kept:
        folder.write(replace(record, kept=kept))
