"""Replay of a trace in virtual time, each pass by the scheduler that `gpurun submit` uses."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gpurun.errors import GpurunError, NeverFits
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Constraints
from gpurun.quantities.counts import count
from gpurun.scheduler.model import ENDLESS, Decisions, Gang, Placement, Running, Snapshot, Wants
from gpurun.scheduler.policy import Policy
from gpurun.scheduler.schedule import arrange, schedule
from gpurun.scheduler.state import Arranged
from gpurun.simulate.trace import TraceJob
from gpurun.simulate.yardsticks import Yardstick, strict_pass, strictly_arranged

GRACE_S = 15.0
"""A preempted gang keeps its GPUs this long: `JobSpec.grace_s` unless given."""

EVERY = 256
"""Events between two reports of progress."""

MOST_NAMED = 5
"""Waiting jobs that the error about a stuck replay explains."""


class Stuck(GpurunError):
    """Nothing runs, nothing will happen any more, and jobs wait: the scheduler's rules contradict each other."""


@dataclass(frozen=True)
class Span:
    """GPUs that one job held from start to end; a job that is preempted has several."""

    start_s: float
    end_s: float
    placement: Placement


@dataclass
class Outcome:
    """The result of one job. `spans` are its attempts; between them it waited."""

    job: TraceJob
    spans: list[Span] = field(default_factory=list)

    @property
    def ended_s(self) -> float:
        """When the last attempt ended."""
        return self.spans[-1].end_s

    @property
    def wait_s(self) -> float:
        """Seconds from submission to end in which it held no GPU."""
        return self.ended_s - self.job.submitted_s - sum(span.end_s - span.start_s for span in self.spans)


@dataclass(frozen=True)
class ClusterSample:
    """The cluster from one event to the next.

    Attributes:
        free_whole: of the free GPUs, those on hosts where nothing runs; the others are fragments.
    """

    at_s: float
    used: int
    free: int
    queued: int
    queued_gpus: int
    free_whole: int


@dataclass
class Replay:
    """A finished replay: outcomes in the trace's order, samples in time."""

    inventory: Inventory
    policy: Policy | Yardstick
    outcomes: list[Outcome]
    samples: list[ClusterSample]
    preemptions: int = 0


Progress = Callable[[int], None]
"""Called now and then with the number of jobs that have ended."""


def replay(
    jobs: Sequence[TraceJob],
    inventory: Inventory,
    policy: Policy | Yardstick,
    *,
    source: str = "",
    progress: Progress | None = None,
    factor: Callable[[Placement], float] = lambda _: 1.0,
    is_kept_in_rack: bool = False,
) -> Replay:
    """Run a trace to its end.

    Args:
        jobs: in order of submission.
        source: what messages call the trace.
        factor: a job's duration where it is placed, over its duration in the trace.
        is_kept_in_rack: keep each gang in one rack if some rack can hold it.

    Raises:
        NeverFits: a job could never run on this inventory; names its line.
        BadInput: the pools contradict each other.
        Stuck: jobs wait for ever; names them, with the time and what each is told.
    """
    cluster = _Cluster(jobs, inventory, policy, factor)
    if is_kept_in_rack:
        cluster.keep_in_racks()
    cluster.refuse_impossible(source)
    for events, _ in enumerate(cluster.events()):
        if progress is not None and events % EVERY == 0:
            progress(cluster.ended)
    if progress is not None:
        progress(cluster.ended)
    return Replay(inventory, policy, cluster.outcomes, cluster.samples, cluster.preemptions)


class _Cluster:
    """Virtual time: the queue, what runs, and when what ends."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        inventory: Inventory,
        policy: Policy | Yardstick,
        factor: Callable[[Placement], float],
    ) -> None:
        self.jobs, self.inventory, self.policy = jobs, inventory, policy
        empty = Snapshot(inventory)
        self.arranged = strictly_arranged(empty) if isinstance(policy, Yardstick) else arrange(empty)
        self.outcomes = [Outcome(job) for job in jobs]
        shared: dict[object, Wants] = {}
        self.gangs = [_gang(number, job, shared) for number, job in enumerate(jobs)]
        self.factor = factor
        self.left = [job.duration_s for job in jobs]  # seconds of work that remain, as the trace counts them
        self.limits = [job.time_limit_s or ENDLESS for job in jobs]  # what remains of time limits
        self.queue: dict[str, Gang] = {}
        self.running: dict[str, Running] = {}
        self.ends: list[tuple[float, str, int]] = []  # (time, id, attempt)
        self.stops: set[str] = set()
        self.samples: list[ClusterSample] = []
        self.wake_s: float | None = None
        self.decisions = Decisions()
        self.submitted = self.ended = self.preemptions = 0

    def keep_in_racks(self) -> None:
        """Ask for one rack for each gang that a rack can hold."""
        known: dict[object, str | None] = {}
        for number, gang in enumerate(self.gangs):
            near = gang.wanting(constraints=replace(gang.wants.constraints, locality="rack"))
            if self._never(near, known) is None:
                self.gangs[number] = near

    def refuse_impossible(self, source: str) -> None:
        """Every job must be able to run alone on the empty inventory, pools included."""
        known: dict[object, str | None] = {}
        for gang, job in zip(self.gangs, self.jobs, strict=True):
            if (message := self._never(gang, known)) is not None:
                raise NeverFits(message, where=f"{source}:{job.line}", job=job.job_id)

    def _never(self, gang: Gang, known: dict[object, str | None]) -> str | None:
        """Why a gang can never run; None if it can."""
        key = (gang.gpus, gang.wants.constraints, gang.wants.pool, gang.wants.preemptible)
        if key not in known:
            never = self._decide(Snapshot(self.inventory, queue=(gang,)), None).never
            known[key] = never[gang.id].message if never else None
        return known[key]

    def events(self) -> Iterator[float]:
        """Go from event to event, with a pass at each; yields the time."""
        now = 0.0
        while self.ended < len(self.jobs):
            times = [self.ends[0][0]] if self.ends else []
            if self.submitted < len(self.jobs):
                times.append(self.jobs[self.submitted].submitted_s)
            if self.wake_s is not None:
                times.append(self.wake_s)
            if not times:
                raise self._stuck(now)
            now = min(times)
            self._end_until(now)
            self._submit_until(now)
            self._pass(now)
            yield now

    def _end_until(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            at_s, job, attempt = heapq.heappop(self.ends)
            running = self.running.get(job)
            if running is not None and running.gang.attempts == attempt:
                self._end(running, at_s)

    def _end(self, running: Running, now: float) -> None:
        number = int(running.gang.id)
        del self.running[running.gang.id]
        self.arranged.index.give(self.arranged.index.masks(running.placement))
        self.outcomes[number].spans.append(Span(running.granted_s, now, running.placement))
        if running.gang.id in self.stops:
            self.stops.discard(running.gang.id)
            ran_s = max(0.0, now - GRACE_S - running.granted_s)
            self.left[number] -= ran_s / self.factor(running.placement)
            self.limits[number] -= ran_s
            attempts = running.gang.attempts + 1
            self.queue[running.gang.id] = running.gang.but(attempts=attempts, requeued=True, kept=None)
        else:
            self.ended += 1

    def _submit_until(self, now: float) -> None:
        while self.submitted < len(self.jobs) and self.jobs[self.submitted].submitted_s <= now:
            gang = self.gangs[self.submitted]
            self.queue[gang.id] = gang
            self.submitted += 1

    def _pass(self, now: float) -> None:
        snapshot = Snapshot(
            self.inventory, running=tuple(self.running.values()), queue=tuple(self.queue.values()), now_s=now
        )
        self.decisions = decisions = self._decide(snapshot, self.arranged)
        for gang, placement in decisions.starts:
            del self.queue[gang.id]
            started = gang.but(kept=None) if gang.kept else gang
            self.running[gang.id] = Running(started, placement, now, now)
            heapq.heappush(self.ends, (now + self._runs_for(gang, placement), gang.id, gang.attempts))
        for preemption in decisions.preempts:
            self._stop(preemption.victim, now)
        for job, gang in self.queue.items():
            kept = decisions.kept.get(job)
            if gang.kept != kept:
                self.queue[job] = gang.but(kept=kept)
        self.wake_s = decisions.wake_s if self.queue else None
        self._sample(now)

    def _decide(self, snapshot: Snapshot, arranged: Arranged | None) -> Decisions:
        if not isinstance(self.policy, Yardstick):
            return schedule(snapshot, self.policy, arranged)
        durations_s = {gang.id: self.jobs[int(gang.id)].duration_s for gang in snapshot.queue}
        return strict_pass(snapshot, self.policy, arranged or strictly_arranged(snapshot), durations_s)

    def _stuck(self, now: float) -> Stuck:
        told = [
            f"{self.jobs[int(job)].job_id}: {self.decisions.waits[job].message}"
            for job in islice(self.queue, MOST_NAMED)
        ]
        more = f"; and {len(self.queue) - MOST_NAMED} more" if len(self.queue) > MOST_NAMED else ""
        wait = count(len(self.queue), "job waits", "jobs wait")
        return Stuck(
            f"the simulation is stuck at {now:.0f} s: no job runs, no later event can start a job, and {wait}: "
            f"{'; '.join(told)}{more}",
            hint="report this defect of gpurun's scheduler, and attach the trace and the inventory",
        )  # fmt: skip

    def _stop(self, victim: str, now: float) -> None:
        running = self.running[victim]
        self.running[victim] = replace(running, stopping=True)
        if running.granted_s + self._runs_for(running.gang, running.placement) > now + GRACE_S:  # else it ends first
            self.stops.add(victim)
            self.preemptions += 1
            heapq.heappush(self.ends, (now + GRACE_S, victim, running.gang.attempts))

    def _runs_for(self, gang: Gang, placement: Placement) -> float:
        number = int(gang.id)
        return min(self.left[number] * self.factor(placement), self.limits[number])

    def _sample(self, now: float) -> None:
        index = self.arranged.index
        free = index.total_free
        self.samples.append(
            ClusterSample(
                at_s=now,
                used=index.capacity - free,
                free=free,
                queued=len(self.queue),
                queued_gpus=sum(gang.gpus for gang in self.queue.values()),
                free_whole=index.free_on_empty_hosts() if free else 0,
            )
        )


def _gang(number: int, job: TraceJob, shared: dict[object, Wants]) -> Gang:
    key = (job.generation, job.gpus_per_host, job.pool, job.priority, job.preemptible, job.time_limit_s)
    wants = shared.get(key)
    if wants is None:
        generations = (job.generation,) if job.generation else ()
        wants = shared[key] = Wants(
            constraints=Constraints(generations, gpus_per_host=job.gpus_per_host), pool=job.pool,
            priority=job.priority, preemptible=job.preemptible, time_limit_s=job.time_limit_s,
        )  # fmt: skip
    return Gang(f"{number:09d}", job.gpus, job.submitted_s, wants)
