"""A pass: read a view, decide, commit, under the allocator lock.

`gpurun.scheduler` decides, and is pure. This module reads the view from files and commits the decisions. For each
granted gang it writes a lease file first, then the job's record. For each preempted gang it writes a request. A pass
decides for all users' jobs in one order, but commits only those of the user who runs it. Other users' waiters commit
theirs in passes of their own. To preempt another user's gang, a pass asks that gang's supervisor to run a pass
(`gpurun.leases.allocate`). A pass leaves out users without a live waiter.

One `Occupancy` says which gang holds which GPU. The pass schedules every inventory on it in turn. Every grant checks
and changes the occupancy, so two inventories never get the same GPU. After a crash between any two writes, the next
pass understands the state (see `mark_granted`).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from gpurun import faults
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import CancelRequest, JobRecord, Kept, State
from gpurun.jobs.spec import Placement
from gpurun.jobs.store import JobStore, LiveJob
from gpurun.leases.draining import departures_of, is_drain_over, wanted_request
from gpurun.leases.lease import Lease, machines_of, places_of, with_refused
from gpurun.leases.look import at_inventory, loaded, look
from gpurun.leases.occupancy import View, ids_of, queue_place
from gpurun.leases.store import PATIENCE_S, AllocatorLock, LeaseLock, LeaseStore
from gpurun.scheduler.model import Decisions, Gang, Preemption, Snapshot, gang_of
from gpurun.scheduler.passes import growth, regrown, schedule
from gpurun.state.audit import AuditLog
from gpurun.state.clock import head_clock
from gpurun.state.durable import without_collector
from gpurun.state.paths import StatePath
from gpurun.state.sharing import MARK, StateDirectory

# Ask other users' gangs to stop for a preemption, without rights over them.


FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Allocator:
    """What grants GPUs in a state directory, and changes what gangs hold."""

    home: Path

    def ask_to_give_way(self, victims: Collection[str]) -> None:
        """Request passes of exactly these jobs of other users in this user's name. The caller holds the lock."""
        if not StateDirectory(self.home).is_shared():
            return
        wanted = {f"{job}.{os.getuid()}" for job in victims}
        folder = StatePath(self.home) / MARK
        present = {name for name in folder.names() if name.endswith(f".{os.getuid()}")}
        for name in wanted - present:
            (folder / name).touch()
        for name in present - wanted:
            with suppress(FileNotFoundError, StateError):  # another user made it in this user's name: it is theirs
                (folder / name).unlink()

    def look_ahead(self, *, now_s: float, knower: int | None = None) -> Pass:
        """Return the decisions of a pass, which writes nothing.

        Args:
            knower: the uid of the user whose knowledge of machines counts; None = this user.

        Raises:
            StateError: a lease is damaged, so gpurun cannot know which GPUs are free.
        """
        problems: list[GpurunError] = []
        with without_collector():
            view = look(self.home, now_s=now_s, on_problem=problems.append, knower=knower)
            return _Passing(self.home, view, problems, commit=False).run()

    def run_pass(self, *, now_s: float, commit: bool = True, patience_s: float | None = PATIENCE_S) -> Pass:
        """Run one pass over all queued jobs.

        Args:
            commit: False: as `look_ahead`.
            patience_s: as for `AllocatorLock.held`.

        Raises:
            StateError: a lease is damaged, so gpurun cannot know which GPUs are free; or a file cannot be written, and
            the
                pass has granted nothing.
        """
        if not commit:
            return self.look_ahead(now_s=now_s)
        problems: list[GpurunError] = []
        with AllocatorLock(self.home).held(patience_s=patience_s), without_collector():
            LeaseStore(self.home).sweep()
            passing = _Passing(
                self.home, look(self.home, now_s=now_s, on_problem=problems.append), problems, commit=True
            )
            return passing.run_and_keep()

    def decisions_on(self, view: View) -> Pass:
        """The decisions that a pass would make of what was read. The view's occupancy then has its promises, too."""
        with without_collector():
            return _Passing(self.home, view, [], commit=False).run()

    def put_apart(self, held: Held, hosts: Collection[str]) -> Held:
        """Let hosts leave the gang. Their GPUs stay leased until the hosts are fenced."""
        lease, _ = held
        return self._change(held, replace(lease, apart=tuple(dict.fromkeys((*lease.apart, *hosts)))))

    def take_in(self, held: Held, hosts: Collection[str]) -> Held:
        """Let ready hosts join the gang."""
        lease, _ = held
        apart = tuple(host for host in lease.apart if host not in hosts)
        return self._change(held, replace(lease, apart=apart, joins=(*lease.joins, *hosts)))

    def let_go(self, held: Held, hosts: Collection[str]) -> Held:
        """Free the GPUs of hosts that were apart and have been fenced."""
        lease, _ = held
        grants = tuple(grant for grant in lease.grants if grant.host not in hosts)
        apart = tuple(host for host in lease.apart if host not in hosts)
        return self._change(held, replace(lease, grants=grants, apart=apart))

    def grow(self, held: Held, inventory: Inventory, *, now_s: float) -> tuple[Held, tuple[str, ...]]:
        """Lease more GPUs for a gang that has fewer than it wants, if there are some that no job waits for.

        Returns:
            The lease, with the hosts of these GPUs apart; and those hosts.

        Raises:
            StateError: a lease is damaged, so gpurun cannot know which GPUs are free.
        """
        lease, lock = held
        with AllocatorLock(self.home).held(patience_s=None):
            view = look(self.home, now_s=now_s)
            job = view.jobs.get(lease.job)
            if job is None or job.wants is None:  # its files are damaged
                return held, ()
            gang = gang_of(job.record, job.wants)
            more = growth(snapshot(view, inventory), gang, Placement(lease.generation, lease.racks, lease.grants))
            if more is None:
                return held, ()
            changed = replace(
                lease, grants=(*lease.grants, *more.grants), racks=tuple(dict.fromkeys((*lease.racks, *more.racks))),
                apart=(*lease.apart, *more.hosts), machines={**lease.machines, **machines_of(inventory, more.grants)},
                places={**lease.places, **places_of(inventory, more.grants)},
                ids={**lease.ids, **ids_of(inventory, more.grants, view.machines)},
            )  # fmt: skip
            held = changed, LeaseStore(self.home).grow(lock, changed, view.occupancy)
        AuditLog(self.home).note("grow", job=lease.job, hosts=list(more.hosts))
        return held, more.hosts

    def larger(self, lease: Lease, inventory: Inventory, *, now_s: float) -> Placement | None:
        """Return the placement that the gang would get if it stopped and started again, if that is larger. Changes
        nothing.

        Includes hosts on which it failed before: a pass uses them only if the gang needs them.

        Raises:
            StateError: a lease is damaged, so gpurun cannot know which GPUs are free.
        """
        view = look(self.home, now_s=now_s)
        job = view.jobs.get(lease.job)
        if job is None or job.wants is None:  # its files are damaged
            return None
        gang = gang_of(job.record, job.wants).but(avoid=())
        return regrown(snapshot(view, inventory), gang, Placement(lease.generation, lease.racks, lease.grants))

    def move_ports(self, held: Held) -> Held:
        """Give a job other ports, because another program listens on its own.

        Chooses them at random, because another head's jobs use neighbouring ports.

        Raises:
            StateError: all ports for jobs are in use.
        """
        lease, lock = held
        with AllocatorLock(self.home).held(patience_s=None):
            store, count = LeaseStore(self.home), len(lease.ports)
            taken = {port for other in store.read_all().leases for port in other.ports}
            begin = random.randrange(SSH_PORTS.start, SSH_PORTS.stop - count)  # noqa: S311 (not a secret)
            first = free_ports(taken, count, begin=begin) or free_ports(taken, count)
            if first is None:
                raise StateError("all ports that gpurun uses for jobs are in use", job=lease.job)
            changed = replace(lease, ssh_port=first)
            return changed, store.change(lock, changed)

    def _change(self, held: Held, changed: Lease) -> Held:
        faults.point()
        with AllocatorLock(self.home).held(patience_s=None):
            return changed, LeaseStore(self.home).change(held[1], changed)


class Asked:
    """Whether another user asks for a pass that may preempt a job, as the job's supervisor sees it."""

    def __init__(self, home: Path, job: str) -> None:
        self._folder = StatePath(home) / MARK
        self._job = job
        self._pause_s = FIRST_PAUSE_S
        self._next_s = 0.0

    def is_due(self) -> bool:
        """Return True if a pass should run now: there is a request, and the last pass was long enough ago."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        try:
            asked = any(name.startswith(f"{self._job}.") for name in self._folder.names())
        except (FileNotFoundError, StateError):
            return False
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S) if asked else FIRST_PAUSE_S
        self._next_s = now + (self._pause_s if asked else FIRST_PAUSE_S)
        return asked


SSH_PORTS = range(23022, 32022)
"""Below Linux's ephemeral ports (32768 …), above the registered services hosts commonly run."""


@dataclass(frozen=True)
class Pass:
    """The result of a pass.

    Attributes:
        granted: new leases with their locks held; the caller starts the supervisors or closes the locks.
        decisions: the scheduler's whole answer, per inventory file.
        snapshots: what the decisions were made from.
        left_out: queued job → why the pass did not look at it. Jobs that wait for their restart are not among them.
        problems: damaged files and unusable inventories, each once.
        failure: the error that ended the pass after it had granted something. The caller raises it after it has started
            the supervisors.
    """

    granted: tuple[tuple[Lease, LeaseLock], ...] = ()
    decisions: Mapping[str, Decisions] = field(default_factory=dict)
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[GpurunError, ...] = ()
    failure: Exception | None = None


def snapshot(view: View, inventory: Inventory, *, extra: Iterable[Gang] = ()) -> Snapshot:
    """Return the scheduler's view of one inventory, with `extra` gangs in the queue."""
    for path, jobs in by_inventory(view.queued()).items():
        theirs = inventory if path == inventory.source else loaded(path, lambda _: None)
        if theirs is not None:
            view.keep(jobs, theirs)
    found = view.snapshot(inventory, view.waiting())
    return replace(found, queue=(*found.queue, *extra))


def by_inventory(queued: Iterable[LiveJob]) -> dict[str, list[LiveJob]]:
    """Group queued jobs by their inventory; the inventory of the first gang comes first."""
    found: dict[str, list[LiveJob]] = {}
    for job in queued:
        found.setdefault(job.record.inventory, []).append(job)
    if len(found) <= 1:
        return found
    return dict(sorted(found.items(), key=lambda pair: min(queue_place(job.record) for job in pair[1])))


class _Passing:
    """One running pass. With `commit`, the caller holds the allocator lock."""

    def __init__(self, home: Path, view: View, problems: list[GpurunError], *, commit: bool) -> None:
        self._home = home
        self._commit = commit
        self._problems = problems
        self._store = JobStore(home)
        self._leases = LeaseStore(home)
        self._view = view
        self._ports = {port for lease in self._view.leases for port in lease.ports}
        self._granted: list[tuple[Lease, LeaseLock]] = []
        self._refused: dict[str, str] = {}
        self._unusable: dict[str, GpurunError] = {}
        # Each inventory is loaded once, so that a problem is reported once.
        self._load = cache(lambda path: loaded(path, lambda error: self._note(path, error)))

    def run_and_keep(self) -> Pass:
        """Run the pass. An error loses no lease that it has granted before."""
        try:
            return self.run()
        except Exception as error:
            if not self._granted:
                raise
            return Pass(tuple(self._granted), problems=tuple(self._problems), failure=error)
        except BaseException:
            for _, lock in self._granted:
                lock.close()
            raise

    def run(self) -> Pass:
        """Schedule one inventory after the other, each on the GPUs that the earlier ones left."""
        waiting, left_out = self._view.waiting(), self._view.left_out()
        queued = by_inventory(self._view.queued())
        inventories = dict(self._inventories(queued))
        decisions: dict[str, Decisions] = {}
        snapshots: dict[str, Snapshot] = {}
        for path, inventory in inventories.items():
            seen = self._view.snapshot(inventory, waiting)
            try:
                answer = schedule(seen)
            except BadInput as error:  # its pools contradict each other: no reason to stop the other inventories
                error.where = error.where or path
                self._note(path, error)
                continue
            self._carry_out(inventory, answer)
            snapshots[path], decisions[path] = seen, with_refused(answer, self._refused)
        if self._commit:
            self._preempt([one for answer in decisions.values() for one in answer.preempts])
            self._drain()
        for path, problem in self._unusable.items():
            why = f"the job's inventory cannot be used: {problem}"
            left_out |= {job.record.id: why for job in queued.get(path, ()) if job.record.id not in left_out}
        return Pass(tuple(self._granted), decisions, snapshots, left_out, tuple(self._problems))

    def _note(self, path: str, error: GpurunError) -> None:
        """Note why an inventory cannot be used."""
        self._unusable[path] = error
        self._problems.append(error)

    def _inventories(self, queued: Mapping[str, list[LiveJob]]) -> Iterator[tuple[str, Inventory]]:
        for path, jobs in queued.items():
            inventory = self._load(path)
            if inventory is not None:
                self._view.keep(jobs, inventory)
                yield path, inventory

    def _carry_out(self, inventory: Inventory, decisions: Decisions) -> None:
        for gang, placement in decisions.starts:
            job = self._view.jobs[gang.id]
            if self._commit and job.record.owner_uid == self._view.uid:
                if self._is_unchanged(job):
                    self._grant(job, placement, inventory)
            else:
                self._promise(job, placement, inventory)
        for name, kept in decisions.kept.items():
            self._view.occupancy.promise(name, kept.placement.grants, inventory)
        if self._commit:
            started = {lease.job for lease, _ in self._granted}
            for name in decisions.order:
                record = self._view.jobs[name].record
                if record.kept is not None or name in decisions.kept:
                    self._note_kept(record, decisions.kept.get(name), started)

    def _is_unchanged(self, job: LiveJob) -> bool:
        """Return whether the job's own files still match the pass's view. If not, the next pass reads them."""
        now = self._store.live_job(job.record.id, self._problems.append)
        if now is not None and at_inventory(now, os.path.realpath(now.record.inventory)) == job:
            return True
        self._store.forget(job.record.id)
        return False

    def _promise(self, job: LiveJob, placement: Placement, inventory: Inventory) -> None:
        """Promise GPUs to a job that this pass does not grant. A pass without `commit` checks what a grant would do."""
        if not self._commit:
            try:
                lease = self._lease_of(job, placement, inventory)
                self._view.occupancy.check(lease)
                self._ports.update(lease.ports)
            except StateError as error:
                self._refuse(job, error)
        self._view.occupancy.promise(job.record.id, placement.grants, inventory)

    def _refuse(self, job: LiveJob, error: StateError) -> None:
        self._problems.append(error)
        self._refused[job.record.id] = f"GPUs are free for the job, but gpurun cannot grant them: {error.message}"

    def _lease_of(self, job: LiveJob, placement: Placement, inventory: Inventory) -> Lease:
        """Return the lease of a job that starts. Raises StateError if there are no ports for it."""
        record, port_count = job.record, job.wants.ports_on(placement.grants) if job.wants is not None else 1
        ssh_port = free_ports(self._ports, port_count)
        if ssh_port is None:
            raise StateError(
                f"the job needs {port_count} consecutive ports, but too few of gpurun's {len(SSH_PORTS)} "
                "ports are free",
                job=record.id, hint="no action is needed: the job starts when other jobs have ended",
            )  # fmt: skip
        return Lease(
            job=record.id, attempt=record.attempt + 1, owner=record.owner, owner_uid=record.owner_uid,
            generation=placement.generation, racks=placement.racks, grants=placement.grants,
            ssh_port=ssh_port, granted_s=self._view.now_s,
            inventory=inventory.source, machines=machines_of(inventory, placement.grants),
            places=places_of(inventory, placement.grants), port_count=port_count,
            ids=ids_of(inventory, placement.grants, self._view.machines),
        )  # fmt: skip

    def _grant(self, job: LiveJob, placement: Placement, inventory: Inventory) -> None:
        try:
            lease = self._lease_of(job, placement, inventory)
            lock = self._leases.grant(lease, self._view.occupancy)
        except StateError as error:  # two names of one inventory are one machine, or another lease came by hand
            self._refuse(job, error)
            return
        self._granted.append((lease, lock))  # first: the supervisor repeats the next step if it fails here
        self._ports.update(lease.ports)
        mark_granted(self._store, lease)
        hosts = [grant.host for grant in lease.grants]
        AuditLog(self._home).note("grant", job=lease.job, attempt=lease.attempt, hosts=hosts)

    def _note_kept(self, record: JobRecord, kept: Kept | None, started: Collection[str]) -> None:
        if record.kept == kept or record.id in started or record.owner_uid != self._view.uid:
            return
        if self._is_unchanged(self._view.jobs[record.id]):
            self._store.get(record.id).write(record.but(kept=kept))

    def _preempt(self, preemptions: Iterable[Preemption]) -> None:
        """Request preemptions of this user's gangs, and ask other users' gangs: together, for all inventories."""
        others = []
        for preemption in preemptions:
            job = self._view.jobs[preemption.victim]
            if job.record.owner_uid != self._view.uid:
                others.append(preemption.victim)
            elif job.request is None:
                request = CancelRequest("preempt", by="scheduler", asked_s=self._view.now_s, reason=preemption.message)
                self._store.get(preemption.victim).ask_to_cancel(request)
                AuditLog(self._home).note(
                    "preempt", job=preemption.victim, taker=preemption.taker, reason=preemption.message
                )
        Allocator(self._home).ask_to_give_way(others)

    def _drain(self) -> None:
        """Ask this user's gangs to leave drained hosts, and withdraw requests of drains that ended."""
        departures = {each.gang: each for each in departures_of(self._view, self._load)}
        for name, job in self._view.jobs.items():
            if job.record.owner_uid != self._view.uid:
                continue  # their supervisors see the cordons themselves
            departure = departures.get(name)
            wanted = None if departure is None else wanted_request(departure, self._view)
            if job.request is not None and is_drain_over(job, wanted):
                self._store.get(name).withdraw(job.request)
            if wanted is not None and job.request is None:
                self._store.get(name).ask_to_cancel(wanted)
                AuditLog(self._home).note(wanted.kind, job=name, by="drain", reason=wanted.reason)


def free_ports(taken: Collection[int], count: int, *, begin: int = SSH_PORTS.start) -> int | None:
    """Return the first of `count` consecutive unused ports, from `begin` on; None if there are none."""
    run = 0
    for port in range(begin, SSH_PORTS.stop):
        run = 0 if port in taken else run + 1
        if run == count:
            return port - count + 1
    return None


def mark_granted(store: JobStore, lease: Lease) -> None:
    """Update a job's record from its lease. This also repairs a crash between the two writes, and a step of the clock
    between them: the grant was after the job was queued, and is not in the future.
    """
    folder = store.get(lease.job)
    record = folder.record()
    before, granted_s = record.granted_from, min(max(lease.granted_s, record.queued_s), head_clock()())
    folder.move(
        State.GRANTED, granted_from=before if lease.inventory in before else (*before, lease.inventory),
        attempt=lease.attempt, granted=lease.grants, granted_s=granted_s,
        kept=None, reason="", outcome=None, first_failure=None, reached="nothing", restart=None, checkpoint_s=None,
        generation=lease.generation, gpu_s=0.0, gpu_s_until_s=None,
    )  # fmt: skip


# Changes of a lease while its job runs: each step replaces one lease file by another.


Held = tuple[Lease, LeaseLock]
"""A lease and its lock."""
