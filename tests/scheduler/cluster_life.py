"""A cluster in virtual time with all that happens to one: jobs come, run, are preempted, fail, move and grow; hosts are
cordoned, drained and used by others; waiters die, specs are damaged, and the head's clock is set.

Each event is followed by a pass, as in production, and `watch.Watch` looks at each pass.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from never import Broken
from watch import Watch

from gpurun.inventory.model import Inventory
from gpurun.jobs.record import JobRecord, Kept, State
from gpurun.jobs.spec import Placement, Wants
from gpurun.jobs.store import LiveJob
from gpurun.leases.occupancy import Occupancy, View
from gpurun.scheduler.explain import Tenant, departures
from gpurun.scheduler.model import Decisions, Gang, Policy, Running, Snapshot
from gpurun.scheduler.passes import growth, schedule

SOURCE = "/inventory.yaml"
NEVER = float("inf")


@dataclass(frozen=True)
class Job:
    """One job of a history. Times are true seconds, whatever the head's clock says.

    Attributes:
        gang: `submitted_s` is the true time.
        lasts_s: how long it works; inf = for ever.
        stops_s: from the order to stop until its GPUs are free.
        out_s: from when until when no pass may start it: its owner has no waiter, or its spec is damaged.
    """

    gang: Gang
    lasts_s: float
    stops_s: float = 5.0
    prepares_s: float = 0.0
    out_s: tuple[float, float] = (NEVER, NEVER)
    is_damaged: bool = False


@dataclass(frozen=True, order=True)
class Event:
    """Something that happens to the cluster at a true time.

    Attributes:
        what: ``cordon``, ``drain``, ``out`` or ``take`` a host until a time; ``fault`` of a gang; ``clock`` set.
    """

    at_s: float
    what: str
    host: str = ""
    until_s: float = NEVER
    by_s: float = 0.0
    gpus: tuple[int, ...] = ()


@dataclass
class History:
    """Runs a world to its end."""

    inventory: Inventory
    policy: Policy
    jobs: list[Job]
    events: list[Event] = field(default_factory=list)
    seed: int = 0
    grows: float = 0.0
    now_s: float = 0.0
    offset_s: float = 0.0
    running: dict[str, Running] = field(default_factory=dict)
    queue: dict[str, Gang] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    draining: dict[str, None] = field(default_factory=dict)
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    kills: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.by_id = {job.gang.id: job for job in self.jobs}
        self.left = {job.gang.id: job.lasts_s for job in self.jobs}
        self.wanted = {job.gang.id: job.gang for job in self.jobs}
        self.watch = Watch(self.policy)
        self._number = count()
        self._agenda: list[tuple[float, int, tuple[object, ...]]] = []
        for job in self.jobs:
            self._plan(job.gang.submitted_s, "comes", job)
            for at_s in job.out_s:
                self._plan(at_s, "changes")
        for event in self.events:
            self._plan(event.at_s, "happens", event)

    @property
    def clock_s(self) -> float:
        """What the head's clock says."""
        return self.now_s + self.offset_s

    def run(self) -> History:
        """Go from event to event until nothing happens any more.

        Raises:
            Broken: a pass broke a promise.
        """
        wake_s, most = None, 200 + 60 * len(self.jobs)
        decisions = None
        while self._agenda or wake_s is not None:
            times = [self._agenda[0][0]] if self._agenda else []
            times += [wake_s - self.offset_s + 1e-6] if wake_s is not None else []
            self.now_s = max(self.now_s, min(times))
            while self._agenda and self._agenda[0][0] <= self.now_s:
                _, _, (what, *about) = heapq.heappop(self._agenda)
                getattr(self, f"_{what}")(*about)
            decisions = self._pass()
            wake_s = decisions.wake_s
            self.passes += 1
            if self.passes > most:
                raise Broken(f"a cluster of {len(self.jobs)} jobs comes to no end after {self.passes} passes")
        if decisions is not None:
            self.watch.end(self._before, self._really_taken(), decisions)
        return self

    def _plan(self, at_s: float, what: str, *about: object) -> None:
        if at_s < NEVER:
            heapq.heappush(self._agenda, (at_s, next(self._number), (what, *about)))

    # what happens

    def _comes(self, job: Job) -> None:
        gang = job.gang.but(submitted_s=self.clock_s)
        self.wanted[gang.id] = self.queue[gang.id] = gang

    def _changes(self) -> None:
        """A waiter dies or comes back, or a file is damaged or repaired."""

    def _happens(self, event: Event) -> None:
        match event.what:
            case "cordon" | "drain" | "out":
                self.unusable[event.host] = f"{event.what}: fan"
                if event.what == "drain":
                    self.draining[event.host] = None
                self._plan(event.until_s, "back", event.host)
            case "take":
                self.taken[event.host] = event.gpus
                self._plan(event.until_s, "left", event.host)
            case "clock":
                self.offset_s += event.by_s
                self.watch.clock_was_set(event.by_s)
            case "fault":
                going_on = sorted(job for job, run in self.running.items() if not run.stopping)
                if going_on:
                    run = self.running[self.rng.choice(going_on)]
                    host = self.rng.choice([grant.host for grant in run.placement.grants])
                    gang = self.wanted[run.gang.id]
                    others = tuple(name for name in gang.avoid if name != host)
                    self.wanted[gang.id] = gang.but(avoid=(*others, host))
                    self._stop(gang.id)

    def _back(self, host: str) -> None:
        self.unusable.pop(host, None)
        self.draining.pop(host, None)

    def _left(self, host: str) -> None:
        self.taken.pop(host, None)

    def _runs(self, job: str, attempt: int) -> None:
        run = self.running.get(job)
        if run is not None and run.gang.attempts == attempt:
            self.running[job] = replace(run, running_s=self.clock_s)

    def _ends(self, job: str, attempt: int) -> None:
        run = self.running.get(job)
        if run is not None and run.gang.attempts == attempt and not run.stopping:
            del self.running[job]

    def _stopped(self, job: str, attempt: int, worked_from_s: float) -> None:
        run = self.running.get(job)
        if run is not None and run.gang.attempts == attempt:
            del self.running[job]
            self.left[job] = max(1.0, self.left[job] - max(0.0, self.now_s - worked_from_s))
            gang = self.wanted[job].but(attempts=attempt + 1, requeued=True)
            self.wanted[job] = self.queue[job] = gang

    def _stop(self, job: str) -> None:
        run = self.running[job]
        self.running[job] = replace(run, stopping=True, told_s=self.clock_s)
        self._plan(self.now_s + self.by_id[job].stops_s, "stopped", job, run.gang.attempts, self.began[job])

    # the pass

    def _is_left_out(self, job: str) -> bool:
        from_s, until_s = self.by_id[job].out_s
        return from_s <= self.now_s < until_s

    def snapshot(self) -> Snapshot:
        """What the caller of a pass reads, by the rules of `gpurun.leases.occupancy`."""
        queue = tuple(gang for job, gang in self.queue.items() if not self._is_left_out(job))
        left_out = [gang for job, gang in self.queue.items() if self._is_left_out(job) and gang.kept is not None]
        taken = self._really_taken()
        if left_out:
            for host, gpus in _promised(self.inventory, left_out, self.by_id, self.clock_s).items():
                taken[host] = tuple(sorted({*gpus, *taken.get(host, ())} - self._used(host)))
        running = tuple(self.running.values())
        return Snapshot(self.inventory, running, queue, dict(self.unusable), taken, self.clock_s)

    def _really_taken(self) -> dict[str, tuple[int, ...]]:
        found = {host: tuple(sorted({*gpus} - self._used(host))) for host, gpus in self.taken.items()}
        return {host: gpus for host, gpus in found.items() if gpus}

    def _used(self, host: str) -> set[int]:
        grants = (grant for run in self.running.values() for grant in run.placement.grants if grant.host == host)
        return {gpu for grant in grants for gpu in grant.gpus}

    def _pass(self) -> Decisions:
        self._drain()
        self._grow()
        self._before = before = self.snapshot()
        decisions = schedule(before, self.policy)
        self.watch.passed(before, self._really_taken(), decisions)
        for gang, placement in decisions.starts:
            self._start(gang, placement)
        for preemption in decisions.preempts:
            self.kills += 1
            self._stop(preemption.victim)
        for job in decisions.never:
            del self.queue[job]
        for job, gang in self.queue.items():
            if not self._is_left_out(job):
                self.queue[job] = gang.but(kept=self.hand_back(decisions.kept.get(job)))
        return decisions

    def hand_back(self, kept: Kept | None) -> Kept | None:
        """What the caller of a pass stores, and gives to the next one."""
        return kept

    def _start(self, gang: Gang, placement: Placement) -> None:
        del self.queue[gang.id]
        job = self.by_id[gang.id]
        prepared = self.clock_s if not job.prepares_s else None
        self.running[gang.id] = Running(gang.but(kept=None), placement, self.clock_s, prepared)
        runs_s = self.now_s + job.prepares_s
        self.began[gang.id] = runs_s
        if job.prepares_s:
            self._plan(runs_s, "runs", gang.id, gang.attempts)
        limit_s = NEVER if gang.wants.time_limit_s is None else gang.wants.time_limit_s
        ends_s = min(self.left[gang.id], limit_s)
        self._plan(runs_s + ends_s + min(job.stops_s, gang.stop_allowance_s), "ends", gang.id, gang.attempts)

    def _drain(self) -> None:
        if not self.draining:
            return
        tenants = [
            Tenant(self.wanted[job].wanting(max_restarts=1), run.placement.grants, hosts, stopping=run.stopping)
            for job, run in self.running.items()
            if (hosts := tuple(grant.host for grant in run.placement.grants if grant.host in self.draining))
        ]
        for found in departures(self.inventory, self.unusable, self.draining, tenants, self.clock_s):
            if found.fate == "moves":
                self._stop(found.gang)

    def _grow(self) -> None:
        if not self.grows or self.rng.random() > self.grows:
            return
        small = [
            job
            for job, run in self.running.items()
            if run.gang.wants.min_gpus is not None and not run.stopping and run.placement.gpus < self.wanted[job].gpus
        ]
        for job in small[:1]:
            run = self.running[job]
            more = growth(self.snapshot(), self.wanted[job], run.placement, self.policy)
            if more is not None:
                racks = tuple(dict.fromkeys((*run.placement.racks, *more.racks)))
                placement = replace(run.placement, racks=racks, grants=(*run.placement.grants, *more.grants))
                self.running[job] = replace(run, gang=run.gang.sized(placement.gpus), placement=placement)


def _promised(
    inventory: Inventory, gangs: list[Gang], jobs: dict[str, Job], now_s: float
) -> dict[str, tuple[int, ...]]:
    """The GPUs that production counts as taken because they are kept for jobs that no pass may start."""
    live = {}
    for gang in gangs:
        at_s = gang.submitted_s
        record = JobRecord(
            gang.id, gang.id, "u", 1, SOURCE, gang.gpus, State.QUEUED, at_s, at_s, kept=gang.kept
        )  # fmt: skip
        live[gang.id] = LiveJob(record, None if jobs[gang.id].is_damaged else Wants(), None)
    view = View(live, (), Occupancy(), {}, 0, lambda _: False, now_s)
    view.keep(view.queued(), inventory)
    return view.occupancy.taken(inventory)
