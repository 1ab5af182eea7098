"""The occupancy: which gang holds which GPU of which machine. Every decision about GPUs reads it, every grant changes
it.

Pure. It contains leases, lost leases, leases whose file somebody removed, and GPUs that are promised to a gang. It
identifies a machine by the address that SSH connects to (`gpurun.inventory.model.Host.machine`), and by the id that the
machine gives, if it was known at the grant. So two inventories, or two paths of one inventory, that name the same
machine see the same holders, and so does a host that was renamed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpurun.errors import StateError
from gpurun.inventory.model import Host, Inventory, machine_at
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import Grant, Placement, Wants
from gpurun.jobs.store import LiveJob
from gpurun.leases.lease import Lease, active
from gpurun.scheduler.model import Holders, Running, Snapshot, gang_of, gangs_of
from gpurun.state.hosts import Cordon, KnownAs, Machine, Out, cordons_on, outs_of

# By what gpurun knows the machines of an inventory's hosts, and those of a lease's hosts.


def known_machines(inventory: Inventory, machines: Mapping[str, Machine]) -> dict[str, KnownAs]:
    """Return host → by what its machine is known.

    An id that several hosts of the inventory give says nothing: they were installed from one image.

    Args:
        machines: what this user knows of machines (`gpurun.state.hosts.Machines`).
    """
    known = [
        KnownAs(host.name, host.machine, machines[host.machine].id if host.machine in machines else "")
        for host in inventory.hosts
    ]
    times = Counter(each.id for each in known) if machines else {}
    return {each.host: each if not each.id or times[each.id] == 1 else replace(each, id="") for each in known}


def lease_hosts(lease: Lease) -> list[KnownAs]:
    """Return by what the machines of a lease's hosts were known at the grant."""
    return [KnownAs(grant.host, lease.machines.get(grant.host, ""), lease.ids.get(grant.host, ""))
            for grant in lease.grants]  # fmt: skip


def ids_of(inventory: Inventory, grants: Iterable[Grant], machines: Mapping[str, Machine]) -> dict[str, str]:
    """Return host → the id of its machine, for the hosts of some grants whose id is known."""
    known = known_machines(inventory, machines)
    return {grant.host: known[grant.host].id for grant in grants if known[grant.host].id}


CALLED = "id "
FOR_GOOD = ("lost", "foreign")
"""Holdings that also the job named in them cannot use."""


@dataclass(frozen=True)
class Holder:
    """The holder of a GPU.

    Attributes:
        job: the job's id.
        how: ``leased``; ``lost``: the rest of an attempt whose host could not be fenced; ``promised``: a queued gang of
            another inventory waits for it; ``foreign``: another user, state directory or head claims it on the
            host, or a process that no gpurun job started uses it.
        owner: the user's name; "" = unknown.
    """

    job: str
    how: str = "leased"
    owner: str = ""


class Occupancy:
    """Machine → GPU → holder. Made once per pass from all leases; only `grant` adds a gang's GPUs.

    Args:
        known: returns host → by what its machine is known, for an inventory. Default: by its address.

    Attributes:
        overlaps: GPUs that two leases hold: damage, each named once. Keeps both holders.
    """

    def __init__(
        self, leases: Iterable[Lease] = (), known: Callable[[Inventory], Mapping[str, KnownAs]] | None = None
    ) -> None:
        self.overlaps: list[StateError] = []
        self._known = known or (lambda _: {})
        self._machines: dict[str, dict[int, Holder]] = {}
        self._leases: dict[str, Lease] = {}
        for lease in leases:
            self._note_overlap(lease)
            self._put(lease)

    def on(self, host: Host, known: KnownAs | None = None) -> Mapping[int, Holder]:
        """Return the held GPUs of a host.

        Args:
            known: by what its machine is known; None = by its address.
        """
        held = self._machines.get(host.machine, {})
        others = [self._machines.get(_nameless(host.name))]
        if known is not None and known.id:
            others.append(self._machines.get(_called(known.id)))
        for more in others:
            held = {**more, **held} if more else held
        return held

    def taken(
        self, inventory: Inventory, *, but: Collection[str] = (), used: Collection[tuple[str, int]] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Return host → held GPUs, without promises of the jobs in `but` and without the GPUs in `used`.

        Args:
            used: host and GPU of gangs that the caller counts itself.
        """
        taken = {}
        known = self._known(inventory) if self._machines else {}
        for host in inventory.hosts if self._machines else ():
            gpus = [
                gpu
                for gpu, holder in self.on(host, known.get(host.name)).items()
                if holder.how in FOR_GOOD or not (holder.job in but or (host.name, gpu) in used)
            ]
            if gpus:
                taken[host.name] = tuple(sorted(gpus))
        return taken

    def jobs_by_machine(self) -> dict[str, list[str]]:
        """Return machine, by its address → the jobs that hold GPUs of it."""
        return {
            machine: list(dict.fromkeys(holder.job for holder in held.values()))
            for machine, held in self._machines.items()
            if held and not machine.startswith(CALLED)
        }

    def grant(self, lease: Lease) -> None:
        """Give a lease its GPUs. Replaces an earlier lease of the same name, and overrides promises.

        Raises:
            StateError: as `check`. Nothing is changed then.
        """
        self.check(lease)
        self.free(lease.name)
        self._put(lease)

    def check(self, lease: Lease) -> None:
        """Check whether a lease can have its GPUs.

        Raises:
            StateError: another job holds one of them, or two hosts of the lease are one machine, so that the lease
                would hold a GPU twice.
        """
        _refuse_twice(lease)
        for machine, gpu, host in _gpus_of(lease):
            for key in (machine, _nameless(host)):
                holder = self._machines.get(key, {}).get(gpu)
                if holder is not None and holder.how != "promised" and holder != _holder_of(lease):
                    raise StateError(
                        f"GPU {gpu} is {holder.how} to {holder.job} already, so {lease.job} cannot have this GPU",
                        host=host,
                        hint="gpurun granted no GPUs; `gpurun status` shows which job holds which GPUs",
                    )  # fmt: skip

    def free(self, name: str) -> None:
        """Remove a lease."""
        lease = self._leases.pop(name, None)
        for machine, gpu, _ in _gpus_of(lease) if lease is not None else ():
            self._machines[machine].pop(gpu, None)

    def promise(self, job: str, grants: Iterable[Grant], inventory: Inventory, *, how: str = "promised") -> None:
        """Promise free GPUs to a job."""
        for grant in grants:
            host = inventory.by_name.get(grant.host)
            if host is not None:
                held = self._machines.setdefault(host.machine, {})
                for gpu in grant.gpus:
                    held.setdefault(gpu, Holder(job, how))

    def _put(self, lease: Lease) -> None:
        self._leases[lease.name] = lease
        for machine, gpu, _ in _gpus_of(lease):
            self._machines.setdefault(machine, {})[gpu] = _holder_of(lease)

    def _note_overlap(self, lease: Lease) -> None:
        for machine, gpu, host in _gpus_of(lease):
            holder = self._machines.get(machine, {}).get(gpu)
            if holder is not None and holder.job != lease.job:
                self.overlaps.append(
                    StateError(
                        f"the jobs {holder.job} and {lease.job} both hold GPU {gpu}", host=host,
                        hint=f"cancel one of the jobs; `gpurun doctor {host}` shows for which job the host "
                             "reserves the GPU",
                    )
                )  # fmt: skip
                return


def _refuse_twice(lease: Lease) -> None:
    """Refuse a lease that holds one GPU twice, under two names of its machine."""
    names: dict[tuple[str, int], str] = {}
    for machine, gpu, host in _gpus_of(lease):
        other = names.setdefault((machine, gpu), host)
        if other != host:
            raise StateError(
                f"{other} and {host} are two names of one machine, {lease.machines.get(host, machine)}; "
                f"{lease.job} cannot have GPU {gpu} of this machine twice",
                where=lease.inventory, hint="give the machine one name in the inventory",
            )  # fmt: skip


def _holder_of(lease: Lease) -> Holder:
    return Holder(lease.job, "lost" if lease.lost else "leased", lease.owner)


def _nameless(host: str) -> str:
    """Return a placeholder machine for a host of an older version's lease, which does not name the machine."""
    return f"{host}/"


def _called(machine_id: str) -> str:
    """Return the key of a machine by what it calls itself; no address is written so."""
    return f"{CALLED}{machine_id}"


def _gpus_of(lease: Lease) -> Iterable[tuple[str, int, str]]:
    """Yield machine, GPU and host name of each GPU of a lease, for each key of the machine: its address, its id if the
    lease says it, and two keys if the lease does not say the address.
    """
    for grant in lease.grants:
        known, machine_id = lease.machines.get(grant.host), lease.ids.get(grant.host)
        machines = (known,) if known else (machine_at(grant.host), _nameless(grant.host))
        for machine in (*machines, _called(machine_id)) if machine_id else machines:
            for gpu in grant.gpus:
                yield machine, gpu, grant.host


# A pass's view of a state directory, and the scheduler's view of one inventory in it.


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
        return cordons_on(self.cordons, known_machines(inventory, self.machines).values()) if self.cordons else {}

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
        for record in sorted(records, key=queue_place):
            if record.kept is not None and record.id not in left_out:
                self.occupancy.promise(record.id, record.kept.placement.grants, inventory)
            for refusal in active([record], self.uid, self.now_s):
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


def queue_place(record: JobRecord) -> tuple[int, float, str]:
    """Return a job's position among the queued jobs of all inventories; smaller comes first."""
    return -record.priority, record.submitted_s, record.id


def _unknown(record: JobRecord) -> Wants:
    """Return substitutes for the wants of a running job with a damaged spec: its record, enough to count its GPUs."""
    return Wants(pool=record.pool)
