"""A pass's view of a state directory, and the scheduler's view of one inventory in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpurun.errors import StateError
from gpurun.inventory.model import Inventory
from gpurun.jobs.live import LiveJob
from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import Grant, Wants
from gpurun.jobs.states import State
from gpurun.leases import refusals
from gpurun.leases.known import known_hosts, lease_hosts
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.scheduler.gangs import Holders, gang_of, gangs_of
from gpurun.scheduler.model import Placement, Running, Snapshot
from gpurun.state.cordons import Cordon, cordons_on
from gpurun.state.machines import Machine, Out, outs_of


@dataclass(frozen=True)
class View:
    """Everything that a pass decides on, read once.

    Attributes:
        jobs: the jobs that may not have ended, by id.
        leases: every lease, also those whose file somebody removed.
        occupancy: which gang holds which GPU; grants of the pass change it.
        cordons: why hosts get no new gangs, by their keys in the file.
        uid: the user for whom the pass commits.
        looked_after: whether a user has a live waiter.
        now_s: the head's clock, seconds since the epoch.
        damaged: leases that cannot be read; while there are some, a GPU that seems free may not be free.
        holders: which hosts have which data sets, as far as this user knows.
        machines: what this user knows of machines, by `gpurun.inventory.model.Host.machine`.
    """

    jobs: Mapping[str, LiveJob]
    leases: tuple[Lease, ...]
    occupancy: Occupancy
    cordons: Mapping[str, Cordon]
    uid: int
    looked_after: Callable[[int], bool]
    now_s: float
    damaged: tuple[StateError, ...] = ()
    holders: Holders = field(default_factory=dict)
    machines: Mapping[str, Machine] = field(default_factory=dict)

    @cached_property
    def outs(self) -> Mapping[str, Out]:
        """Return `Host.machine` → why that machine is out, for this user."""
        return outs_of(self.machines)

    def unusable(self, inventory: Inventory) -> dict[str, str]:
        """Return host → why it gets no new gangs: it is out, or has a cordon."""
        outs = self.outs
        out = {host.name: outs[host.machine].words for host in inventory.hosts if host.machine in outs} if outs else {}
        return out | {host: cordon.words for host, cordon in self.cordoned(inventory).items()}

    def queued(self) -> list[LiveJob]:
        """Return the jobs in the queue, also those that no pass may start yet."""
        return [job for job in self.jobs.values() if job.record.state is State.QUEUED]

    def waiting(self) -> list[LiveJob]:
        """Return the jobs that a pass may start, in no order."""
        left_out = self.left_out()
        return [
            job
            for job in self.queued()
            if job.record.id not in left_out and (job.record.restart is None or job.record.restart.is_due(self.now_s))
        ]

    def left_out(self) -> dict[str, str]:
        """Return queued job → why no pass may start it. Jobs that wait for their restart are not among them."""
        leased = {lease.job for lease in self.leases if not lease.lost}
        return {job.record.id: why for job in self.queued() if (why := self._why_left_out(job, leased))}

    def _why_left_out(self, job: LiveJob, leased: Collection[str]) -> str:
        record = job.record
        if job.wants is None:
            return "the job's files are damaged, so gpurun cannot know what the job needs"
        if job.request is not None:
            return f"the job is about to end: {job.request.outcome}"
        if record.id in leased:
            return "the job has its GPUs and is about to start"
        if record.owner_uid != self.uid and not self.looked_after(record.owner_uid):
            return (
                f"no process starts the jobs of {record.owner}; the next gpurun command of {record.owner} "
                "starts such a process"
            )
        return ""

    def cordoned(self, inventory: Inventory) -> dict[str, Cordon]:
        """Return host → the cordon of its machine, for the hosts of an inventory that have one."""
        return cordons_on(self.cordons, known_hosts(inventory, self.machines).values()) if self.cordons else {}

    def cordons_of(self, lease: Lease) -> dict[str, Cordon]:
        """Return host → the cordon of its machine, for the hosts of a lease that have one."""
        return cordons_on(self.cordons, lease_hosts(lease)) if self.cordons else {}

    def snapshot(self, inventory: Inventory, waiting: Iterable[LiveJob]) -> Snapshot:
        """Return the scheduler's view of one inventory. All GPUs that its own gangs do not hold are free or taken."""
        running = self._running(inventory)
        queue = list(
            gangs_of(
                (
                    (self._avoiding(job.record), job.wants)
                    for job in waiting
                    if job.wants and job.record.inventory == inventory.source
                ),
                self.holders,
            )
        )
        used = {(grant.host, gpu) for run in running for grant in run.placement.grants for gpu in grant.gpus}
        taken = self.occupancy.taken(inventory, but={gang.id for gang in queue}, used=used)
        return Snapshot(inventory, tuple(running), tuple(queue), self.unusable(inventory), taken, self.now_s)

    def _avoiding(self, record: JobRecord) -> JobRecord:
        """Return the record with the hosts to avoid now, also those that recently could not start its gang."""
        return record.but(avoid=record.avoided(self.now_s)) if record.start_failures else record

    def _running(self, inventory: Inventory) -> list[Running]:
        running = []
        for lease in self.leases:
            job = self.jobs.get(lease.job)
            if job is None or lease.lost or lease.inventory != inventory.source:
                continue
            placement = Placement(lease.generation, lease.racks, _still_there(lease, inventory))
            gang = gang_of(job.record, job.wants or _unknown(job.record), self.holders)
            if gang.wants.min_gpus is not None:
                gang = gang.but(gpus=sum(len(grant.gpus) for grant in lease.grants))
            stopping = job.record.state is State.STOPPING or job.request is not None
            ran_s, saved_s = job.record.started_s, job.record.checkpoint_s
            granted_s = min(_granted_s(job.record, lease), self.now_s)
            running.append(Running(gang, placement, granted_s, ran_s, saved_s, stopping, _told_s(job, self.now_s)))
        return running

    def keep(self, jobs: Iterable[LiveJob], inventory: Inventory) -> None:
        """Promise the GPUs that are kept for queued gangs of one inventory, and exclude GPUs that hosts refused.

        Nothing is kept for a job that no pass may start: it could keep other jobs from these GPUs for ever.
        """
        records = [job.record for job in jobs if job.record.kept is not None or job.record.refusals]
        left_out = self.left_out() if any(record.kept is not None for record in records) else {}
        for record in sorted(records, key=place_of):
            if record.kept is not None and record.id not in left_out:
                self.occupancy.promise(record.id, record.kept.placement.grants, inventory)
            for refusal in refusals.active([record], self.uid, self.now_s):
                grants = [Grant(refusal.host, refusal.holder.gpus)]
                self.occupancy.promise(refusal.holder.job, grants, inventory, how="foreign")


def _granted_s(record: JobRecord, lease: Lease) -> float:
    """Return when a lease was granted: by its job's record, whose times a step of the head's clock moves."""
    is_same = record.attempt == lease.attempt and record.granted_s is not None
    return record.granted_s if is_same and record.granted_s is not None else lease.granted_s


def _told_s(job: LiveJob, now_s: float) -> float | None:
    """Return when a gang began to stop, or was asked to; None if neither is known. The future counts as now."""
    if job.record.state is State.STOPPING and job.record.stopping_s is not None:
        return job.record.stopping_s
    return None if job.request is None else min(job.request.asked_s, now_s)


def _still_there(lease: Lease, inventory: Inventory) -> tuple[Grant, ...]:
    """Return the grants whose hosts are the same machines in the inventory. The occupancy covers the others."""
    by_name, machines = inventory.by_name, lease.machines
    return tuple(
        grant
        for grant in lease.grants
        if (host := by_name.get(grant.host)) is not None and machines.get(grant.host, host.machine) == host.machine
    )


def place_of(record: JobRecord) -> tuple[int, float, str]:
    """Return a job's position among the queued jobs of all inventories; smaller comes first."""
    return -record.priority, record.submitted_s, record.id


def _unknown(record: JobRecord) -> Wants:
    """Return substitutes for the wants of a running job with a damaged spec: its record, enough to count its GPUs."""
    return Wants(pool=record.pool)
