"""Replay of a trace in virtual time, each pass by the scheduler that `gpurun submit` uses."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from gpurun.errors import BadInput, GpurunError, NeverFits
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Constraints, Grant, Locality, Placement, Wants
from gpurun.quantities import count
from gpurun.scheduler.model import DEFAULT, ENDLESS, Decisions, Gang, Policy, Reason, Refusal, Running, Snapshot, Wait
from gpurun.scheduler.passes import arrange, schedule
from gpurun.scheduler.placement import Capacity, Index, Lane, choose_gpus, need_of, try_place
from gpurun.scheduler.state import Arranged

# A trace: jobs with the time they were submitted and how long they ran, read from CSV.


ALIASES = {
    "job_id": ("jobid", "id", "job"),
    "submit_time_s": ("submission_time", "submit_time", "timestamp", "submitted_s"),
    "duration_s": ("duration", "run_time", "runtime"),
    "gpus": ("num_gpu", "num_gpus", "gpu_num", "gpu_count"),
    "pool": ("vc", "queue"),
    "time_limit_s": ("time_limit",),
}
"""Ours, and what others call it: ElasticFlow/ITP, Tiresias, Helios, AdaptDL's Philly."""

REQUIRED = ("submit_time_s", "duration_s", "gpus")
TRUE, FALSE = ("1", "true", "yes", "y"), ("", "0", "false", "no", "n")
MAX_GPUS = 1_000_000


@dataclass(frozen=True)
class TraceJob:
    """One line of a trace.

    Attributes:
        line: where it stands in the file, for messages.
        submitted_s: seconds; only differences matter.
    """

    job_id: str
    submitted_s: float
    duration_s: float
    gpus: int
    line: int
    gpus_per_host: int | None = None
    generation: str | None = None
    pool: str | None = None
    priority: int = 0
    preemptible: bool = False
    time_limit_s: float | None = None


def read_trace(path: Path) -> tuple[TraceJob, ...]:
    """The jobs of a CSV file in order of submission, those of one time in the file's order.

    Raises:
        BadInput: names the file and the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse_trace(file, str(path))
    except OSError as error:
        raise BadInput(f"cannot read the trace: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"the trace is not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceJob, ...]:
    """As `read_trace`, from lines of text; `name` is what messages call the file."""
    reader = csv.reader(lines, strict=True)
    try:
        columns = _columns(next(reader, []), name)
        jobs = list(_jobs(reader, columns, name))
    except csv.Error as error:
        raise BadInput(f"the trace is not valid CSV: {error}", where=f"{name}:{reader.line_num}") from error
    if not jobs:
        raise BadInput("the trace has no jobs", where=name)
    seen: dict[str, int] = {}
    for job in jobs:
        if seen.setdefault(job.job_id, job.line) != job.line:
            message = f"job_id {job.job_id!r} is also on line {seen[job.job_id]}"
            raise BadInput(message, where=f"{name}:{job.line}")
    return tuple(sorted(jobs, key=lambda job: job.submitted_s))


def _columns(header: list[str], name: str) -> dict[str, int]:
    found = {title.strip().lower(): at for at, title in reversed(list(enumerate(header)))}
    columns = {}
    for column in TraceJob.__dataclass_fields__:
        ours = "submit_time_s" if column == "submitted_s" else column
        for title in (ours, *ALIASES.get(ours, ())):
            if title in found and ours != "line":
                columns[ours] = found[title]
                break
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        known = ", ".join((*REQUIRED, "job_id"))
        raise BadInput(f"the trace has no column {missing[0]}; the header must name {known}", where=f"{name}:1")
    return columns


def _jobs(rows: Iterator[list[str]], columns: Mapping[str, int], name: str) -> Iterator[TraceJob]:
    for row in rows:
        line = rows.line_num  # type: ignore[attr-defined]
        if not row:
            continue
        where = f"{name}:{line}"
        if len(row) <= max(columns.values()):
            raise BadInput(f"the line has {count(len(row), 'column')}, fewer than the header", where=where)
        yield _job(_Row({column: row[at].strip() for column, at in columns.items()}, where), line)


@dataclass(frozen=True)
class _Row:
    cells: Mapping[str, str]
    where: str

    def wrong(self, column: str, wanted: str) -> BadInput:
        return BadInput(f"{column} {self.cells[column]!r} must be {wanted}", where=self.where)

    def number(self, column: str, least: float) -> float:
        try:
            value = float(self.cells[column])
        except ValueError:
            value = _timestamp(self.cells[column]) if column == "submit_time_s" else math.nan
        if not math.isfinite(value) or value < least:
            raise self.wrong(column, "a number" if least == -math.inf else f"a number of at least {least:g}")
        return value

    def whole(self, column: str, least: int, most: int = MAX_GPUS) -> int:
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        if not (least <= value <= most) or value != int(value):
            raise self.wrong(column, f"a whole number from {least} to {most}")
        return int(value)

    def flag(self, column: str) -> bool:
        text = self.cells.get(column, "").lower()
        if text not in TRUE and text not in FALSE:
            raise self.wrong(column, "true or false")
        return text in TRUE

    def given(self, column: str) -> bool:
        return bool(self.cells.get(column))


def _job(row: _Row, line: int) -> TraceJob:
    return TraceJob(
        job_id=row.cells.get("job_id") or f"line-{line}",
        submitted_s=row.number("submit_time_s", -math.inf),
        duration_s=row.number("duration_s", 0.0),
        gpus=row.whole("gpus", 1),
        line=line,
        gpus_per_host=row.whole("gpus_per_host", 1) if row.given("gpus_per_host") else None,
        generation=row.cells.get("generation") or None,
        pool=row.cells.get("pool") or None,
        priority=row.whole("priority", -MAX_GPUS) if row.given("priority") else 0,
        preemptible=row.flag("preemptible"),
        time_limit_s=row.number("time_limit_s", 0.0) if row.given("time_limit_s") else None,
    )


def _timestamp(text: str) -> float:
    """A date and time as Helios and Philly write it, in seconds; UTC where it does not say."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()


# The published simulators' policies, `fifo` and `sjf`, with which the scheduler is compared.


@dataclass(frozen=True)
class Yardstick:
    """A strict queue.

    Attributes:
        shortest_first: durations are known, and the shortest job goes first; else the first that was submitted.
    """

    name: str
    shortest_first: bool = False


FIFO, SJF = Yardstick("fifo"), Yardstick("sjf", shortest_first=True)

POLICIES: Mapping[str, Policy | Yardstick] = {policy.name: policy for policy in (DEFAULT, FIFO, SJF)}


def strict_pass(
    snapshot: Snapshot, yardstick: Yardstick, arranged: Arranged, durations_s: Mapping[str, float]
) -> Decisions:
    """Decide one pass of a strict queue.

    Args:
        arranged: by `strictly_arranged`; agrees with the snapshot, and the pass adds its starts.
        durations_s: how long each gang of the queue runs.
    """
    first: dict[str, float] = durations_s if yardstick.shortest_first else {}  # type: ignore[assignment]
    order = sorted(snapshot.queue, key=lambda gang: (first.get(gang.id, 0.0), gang.submitted_s, gang.id))
    starts: list[tuple[Gang, Placement]] = []
    waits: dict[str, Wait] = {}
    never: dict[str, Refusal] = {}
    for gang in order:
        if not arranged.capacity.could_hold(gang):
            never[gang.id] = arranged.capacity.refuse(arranged.index, gang)
            continue
        head = next(iter(waits), None)
        placement = arranged.capacity.place(arranged.index, gang) if head is None else None
        if placement is not None:
            arranged.index.take(arranged.index.masks(placement))
            starts.append((gang, placement))
        else:
            message = f"waits behind {head}" if head else arranged.capacity.refuse(arranged.index, gang).message
            waits[gang.id] = Wait(Reason.NO_ROOM, message, behind=head)
    return Decisions(tuple(starts), waits=waits, never=never, order=tuple(gang.id for gang in order))


def strictly_arranged(snapshot: Snapshot) -> Arranged:
    """The snapshot's index, and its inventory's capacity for consolidated gangs."""
    return Arranged(Index(snapshot), Capacity(snapshot.inventory, try_consolidated))


def try_consolidated(
    index: Index, gang: Gang, *, avoid: bool = True, locality: Locality | None = None
) -> Placement | None:
    """As `try_place`, consolidated. Gangs that ask for certain hosts or numbers per host are placed by that."""
    need = need_of(index, gang, avoid=avoid, locality=locality)
    if not need.plain or need.per_host or need.locality != "any":
        return try_place(index, gang, avoid=avoid, locality=locality)
    for lane in index.lanes(gang.wants.constraints):
        hosts = _hosts(index, lane, gang.gpus)
        if hosts is not None:
            grants = [Grant(index.hosts[n].name, choose_gpus(index.hosts[n], index.free[n], gpus)) for n, gpus in hosts]
            racks = dict.fromkeys(index.hosts[n].rack for n, _ in hosts)
            return Placement(lane.generation, tuple(racks), tuple(grants))
    return None


def _hosts(index: Index, lane: Lane, gpus: int) -> list[tuple[int, int]] | None:
    size = max(index.full[host].bit_count() for shelf in lane.shelves for level in shelf.levels for host in level)
    if gpus <= size:
        best = next(_at_least(lane, range(gpus, size + 1)), None)
        return None if best is None else [(best, gpus)]
    whole, rest = divmod(gpus, size)
    free = _at_least(lane, range(size, size + 1))
    hosts = [(host, size) for host, _ in zip(free, range(whole), strict=False)]
    if len(hosts) < whole:
        return None
    if rest:
        taken = {host for host, _ in hosts}
        freest = next((host for host in _at_least(lane, range(size, rest - 1, -1)) if host not in taken), None)
        if freest is None:
            return None
        hosts.append((freest, rest))
    return hosts


def _at_least(lane: Lane, levels: range) -> Iterator[int]:
    for free in levels:
        yield from sorted(host for shelf in lane.shelves for host in shelf.levels[free])


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
