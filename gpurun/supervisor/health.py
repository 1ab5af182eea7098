"""Watch the hardware, the engines, the output and the meeting of a running gang: streams of each host report causes.

`gpurun.supervisor.watch` handles hosts that cannot be reached. This module only waits until such a host is back, and
then asks for what it missed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from gpurun.errors import OUTLIVED, BadInput, GpurunError, HostUnreachable, StateError, StateUnavailable
from gpurun.inventory.model import idle_rules
from gpurun.jobs import folder
from gpurun.jobs.record import Activity, GpuUse, RankUse, State, thinned
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers import ALONE, launcher_of
from gpurun.launch.launchers.line import read_line
from gpurun.launch.launchers.table import LAUNCHERS
from gpurun.msgspec_types import ready
from gpurun.remote.agent import BAD_ANSWER, RemoteOpFailed
from gpurun.state.boot import HeadBoot
from gpurun.supervisor.hang import LAST_LOOK_S, steps_told
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.slow import SlowWatch
from gpurun.supervisor.telling import tell
from gpurun.supervisor.verdict.causes import Cause, cause_of, first_cause, rank_of
from gpurun.supervisor.verdict.ends import End
from gpurun.supervisor.verdict.idle import (
    ActivityCount,
    Gpu,
    IdlePolicy,
    rank_told,
    unused_warning,
)

# Add up how busy the gang's GPUs are, for the history and the idle rules, from the half-minute reports of each host.


WRITE_EVERY_S = 60.0
POINT_EVERY_S = 30.0
MOST_SAMPLES = 1000
SAMPLE_S = 1.0
"""How long a sample of a host is about."""


@dataclass(frozen=True)
class _UseLine:
    """A host's report about one GPU; see `gpurun.node.gpus`."""

    index: int
    uuid: str
    samples: int
    mean: float
    most: float
    memory_mib: int


class GpuUseMeter:
    """The GPU use of one attempt, and what its ranks do. Threads of several hosts add to it."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._ranks: dict[int, RankUse] = {}
        self._series: list[tuple[float, float]] = []
        self._told_s, self._written_s = 0.0, 0.0
        self._count = ActivityCount(Activity())
        self._is_read = False
        self._read()

    def _read(self) -> bool:
        """Read once what an earlier supervisor wrote. Return False if that fails now: nothing may replace it then."""
        if not self._is_read:
            job = self._job
            try:
                use = folder.read_use(job.folder, job.lease.attempt)
                did = use.activity if use is not None else _before(job)
            except StateUnavailable:
                return False
            use = use or GpuUse()
            self._ranks = {rank.rank: rank for rank in use.ranks}
            self._series, self._told_s, self._is_read = list(use.series), use.told_s, True
            heard_s = job.clock.boot.moved(did.heard_s, HeadBoot(did.boot, did.boot_s))
            self._count = ActivityCount(did, away_s=job.clock.elapsed_s(heard_s))
        return True

    def add(self, host: str, item: Mapping[str, Any]) -> None:
        """Add a host's report. Ignores impossible values, and GPUs that are not the gang's."""
        try:
            lines = msgspec.convert(item.get("gpus"), ready(list[_UseLine]))
        except (msgspec.ValidationError, OverflowError):
            return
        with self._lock:
            if not self._read():  # this half-minute is lost
                return
            known = len(self._ranks)
            for line in lines:
                self._add(host, line)
            now_s = self._job.clock()
            self._told_s = now_s
            reports = {(host, line.index): (_seen_percent(line), line.samples * SAMPLE_S) for line in lines}
            self._count.add_use(reports, self._gpus, now_s)
            if self._ranks and (not self._series or now_s - self._series[-1][0] >= POINT_EVERY_S):
                last = [rank.last for rank in self._ranks.values()]
                self._series = list(thinned([*self._series, (round(now_s, 1), round(sum(last) / len(last), 1))]))
            is_due = now_s - self._written_s >= WRITE_EVERY_S or len(self._ranks) > known
        if is_due:
            self.write()

    @property
    def _gpus(self) -> set[Gpu]:
        return {(grant.host, gpu) for grant in self._job.lease.members for gpu in grant.gpus}

    def _add(self, host: str, line: _UseLine) -> None:
        rank = rank_of(self._job.lease.grants, host, line.index)
        if rank is None or not 0 < line.samples <= MOST_SAMPLES:
            return
        mean, most = _percent(line.mean), _percent(line.most)
        memory_mib = min(max(line.memory_mib, 0), 1 << 40)
        before = self._ranks.get(rank)
        if before is None or (before.host, before.gpu) != (host, line.index):
            before = RankUse(rank, host, line.index, line.uuid[:80], 0, 0.0, 0.0, 0)
        samples = before.samples + line.samples
        self._ranks[rank] = replace(
            before, samples=samples, mean=round((before.mean * before.samples + mean * line.samples) / samples, 2),
            most=max(before.most, most), memory_mib=max(before.memory_mib, memory_mib), last=mean,
        )  # fmt: skip

    def heard(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what hosts answered about their ranks: ``gang.progress`` by host."""
        seating, ran_s = self._job.seating, self._job.ran_s or 0.0
        ranks = [rank_told(files) for host, said in told.items() for _, files in seating.own(host, said["ranks"])]
        with self._lock:
            if not self._read() or self._job.record.rehearsal:
                return
            had_step = self._count.did.first_step_s is not None
            self._count.add_ranks(ranks, ran_s, is_whole=told.keys() >= {*self._job.members})
            has_step = self._count.did.first_step_s is not None
            is_due = has_step and (not had_step or self._job.clock() - self._written_s >= WRITE_EVERY_S)
        if is_due:
            self.write()

    def due(self, policy: IdlePolicy) -> tuple[Literal["tell", "act"] | None, Activity]:
        """Return what the idle rules demand now, and why. Without fresh reports of all GPUs they demand nothing."""
        with self._lock:
            is_known = self._is_read and self._count.is_fresh(self._gpus, self._job.clock())
            return policy.step(self._count.did) if is_known else None, self._count.did

    def told_owner(self) -> None:
        """Keep that the owner was told, also for the next supervisor."""
        with self._lock:
            self._count.tell()
        self.write()

    def write(self) -> None:
        """Write it into the job's folder. If the disk is full it is lost, and the job continues."""
        with self._lock:
            did = self._count.did
            if not self._is_read or not (self._ranks or did.last_step is not None):
                return
            clock = self._job.clock
            self._written_s = clock()
            did = replace(did, heard_s=self._written_s, boot=clock.boot.id, boot_s=clock.boot.began_s)
            use = GpuUse(_in_order(self._ranks.values()), tuple(self._series), self._told_s, did)
            try:
                folder.write_use(self._job.folder, self._job.lease.attempt, use)
            except (FileNotFoundError, StateError):
                return


def _before(job: SupervisedJob) -> Activity:
    """Return the activity of an attempt that begins: how far the attempts before it came. Raises StateUnavailable."""
    for attempt in range(job.lease.attempt - 1, 0, -1):
        use = folder.read_use(job.folder, attempt)
        if use is not None and (steps := [s for s in (use.activity.step, use.activity.before) if s is not None]):
            setback = job.record.setback
            has_failed = setback is not None and setback.attempt >= attempt  # one after it may have come to no step
            why = (setback.kind or "start") if setback is not None and has_failed else "preemption"
            return Activity(before=max(steps), before_end=why)
    return Activity()


def _seen_percent(line: _UseLine) -> float | None:
    """Return how busy a GPU was in its busiest second; None for what cannot be."""
    is_sane = 0 <= line.mean <= 100 and 0 <= line.most <= 100 and 0 < line.samples <= MOST_SAMPLES
    return max(line.mean, line.most) if is_sane else None


def _percent(value: float) -> float:
    return min(max(value, 0.0), 100.0) if value == value else 0.0  # noqa: PLR0124 - not a number is not itself


def _in_order(ranks: Iterable[RankUse]) -> tuple[RankUse, ...]:
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


# Find out whether a stopped Docker engine, or a host that went away, ended a gang.


ENGINE_TIMEOUT_S = 25.0
REACH_TIMEOUT_S = 5.0
BEFORE_S = 60.0
"""How long the new engine may have taken to start after the gang's end, if no supervisor watched it."""
AFTER_LAUNCHER_S = 10.0
"""How long the launcher's container may outlive the new engine's start: it ends what an engine that died has left."""
AFTER_RANK_S = 60.0
"""How long the launcher on another host may take to notice that ranks were broken off, and to explain itself."""


def stopped_engines(job: SupervisedJob, ended_s: float | None, out_s: Mapping[str, float]) -> list[Cause]:
    """Return causes for hosts that are gone or whose engine stopped under a failed gang, in rank order.

    Args:
        ended_s: when the launcher ended, on the monotonic clock; None = it has not, or that is not known.
        out_s: when a host's engine last failed to answer, on the monotonic clock.
    """
    answers, gone = _ask(job, job.members)
    now = time.monotonic()
    ended_ago_s = 0.0 if ended_s is None else now - ended_s
    causes = []
    for host in job.members:
        if host in gone:
            causes.append(Cause(now, host, "host-lost", "the host cannot be reached", gone[host].message, "host"))
            continue
        seen_out = host in out_s and now - out_s[host] <= BEFORE_S
        why = stopped(answers.get(host, {}), ended_ago_s, is_first=host == job.hosts[0], seen_out=seen_out)
        if why:
            causes.append(Cause(now, host, "engine", why, answers[host]["why"], "host"))
    return causes


def _ask(job: SupervisedJob, hosts: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], dict[str, GpurunError]]:
    """Ask hosts about their engines; also return the errors of hosts that cannot be reached."""
    gone: dict[str, GpurunError] = dict(job.links.open(hosts, timeout_s=REACH_TIMEOUT_S))
    asked = job.links.each(
        lambda agent: agent.call("gang.engine", job=job.lease.job, timeout_s=ENGINE_TIMEOUT_S).value,
        [host for host in hosts if host not in gone],
    )
    lost = {host: error for host, error in asked.failed.items() if isinstance(error, HostUnreachable)}
    return dict(asked.ok), gone | lost


def stopped(answer: Mapping[str, Any], ended_ago_s: float, *, is_first: bool, seen_out: bool) -> str | None:
    """Return a message about an engine that ended a gang; None if it did not. Pure.

    With live-restore, containers outlive their engine, so the engine does not explain what happens to them later.

    Args:
        answer: the answer of `gpurun.node.docker.compare`.
        ended_ago_s: how long ago the launcher ended.
        is_first: it is the launcher's host.
        seen_out: it did not answer in the last minute.
    """
    if answer.get("state") == "gone":
        return "the host's Docker engine has stopped"
    if answer.get("state") != "restarted":
        return None
    outlived_s = float(answer["up_s"]) - ended_ago_s
    if outlived_s > (AFTER_LAUNCHER_S if is_first else AFTER_RANK_S) or (outlived_s < -BEFORE_S and not seen_out):
        return None
    return "the host's Docker engine stopped and started again"


RETRY_S = 1.0
RECENT_TIMEOUT_S = 5.0
NEVER_RAN_S = 60.0
MOST_ALIKE = 5
"""An Xid can occur a thousand times a second; the first ones have all the information."""
FOR_GOOD = ("unknown-op", "bad-request", "internal", BAD_ANSWER)
"""Failures of the watch that a retry would not fix. A Docker that restarts is not among them."""


class IdleWatch:
    """Applies the idle rules of the job's pool, and the job's own time. Only the main loop uses it."""

    def __init__(self, job: SupervisedJob, use: GpuUseMeter) -> None:
        self._job, self._use = job, use
        self._is_told = self._is_warned = False

    @cached_property
    def _policy(self) -> IdlePolicy | None:
        job = self._job
        if job.record.rehearsal:
            return None
        return IdlePolicy.of(idle_rules(job.inventory.pools, job.spec.pool), job.spec.idle_timeout_s)

    def end(self) -> End | None:
        """Return the end that is due; None while there is none. Tells the owner what follows."""
        policy, job = self._policy, self._job
        if policy is None:
            return None
        step, did = self._use.due(policy)
        if step == "act":
            return policy.end(did, job.clock())
        if step == "tell":
            words = policy.warning(did)
            job.note(words, warning=job.record.attempt, about="idle")
            tell(job, "idle", reason=words)
            self._use.told_owner()
        elif did.told_s is None and self._is_told:
            job.note("the job is not idle any more: its GPUs or its ranks work", over="idle")
        elif did.told_s is None and policy.is_unused(did) and not self._is_warned:
            job.note(unused_warning(policy, did), warning=job.record.attempt)
            self._is_warned = True
        self._is_told = step == "tell" or did.told_s is not None
        return None


class HealthWatch:
    """Failures that the gang's hosts report. Separate threads write, the main loop reads."""

    def __init__(self, job: SupervisedJob, stop: threading.Event, slow: SlowWatch) -> None:
        self._job = job
        self._stop = stop
        self._slow = slow
        self._causes: list[Cause] = []
        self._told: set[tuple[str, str]] = set()
        self._alike: Counter[tuple[str, str, int | None]] = Counter()
        self._containers: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._use = GpuUseMeter(job)
        self._idle = IdleWatch(job, self._use)

    def threads(self, hosts: Iterable[str]) -> list[threading.Thread]:
        """Return a thread for each of these hosts, not started. It ends when the host leaves the gang."""
        return [
            threading.Thread(target=self._follow, args=(host,), name=f"health {host}", daemon=True) for host in hosts
        ]

    def fatal(self) -> Cause | None:
        """Return the first failure that the gang cannot survive, on one of its present hosts."""
        with self._lock:
            fatal = [cause for cause in self._causes if cause.fatal and cause.host in self._job.members]
            return min(fatal, key=lambda cause: cause.at_s, default=None)

    def forget(self, hosts: Collection[str]) -> None:
        """Forget failures of hosts that have left, because they do not count if the hosts come back."""
        with self._lock:
            self._causes = [cause for cause in self._causes if cause.host not in hosts]

    def first(self, lines: list[str], own: list[str], *, hangs: bool) -> Cause | None:
        """Return the cause of an attempt that has just failed, after one more look at every host that answers; see
        `first_cause`.
        """
        hosts = [host for host in self._job.members if self._job.links.is_open(host)]
        age_s = self._age_s()
        looked = self._job.links.each(
            lambda agent: (
                agent.call("health.recent", job=self._job.lease.job, age_s=age_s, timeout_s=RECENT_TIMEOUT_S).value
            ),
            hosts,
        )
        for host, found in looked.ok.items():
            self._take(host, found)
        with self._lock:
            return first_cause(tuple(self._causes), lines, own, now_s=time.monotonic(), hangs=hangs)

    def heard(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what hosts answered about their ranks."""
        self._use.heard(told)

    def idle_end(self) -> End | None:
        """Return the end that the idle rules demand now; tell the owner before."""
        return self._idle.end()

    def close(self) -> None:
        """Store how busy the GPUs were, and how far the ranks came."""
        with suppress(*OUTLIVED):
            self._use.heard(steps_told(self._job, LAST_LOOK_S))
        self._use.write()

    def _follow(self, host: str) -> None:
        gpus = next(list(grant.gpus) for grant in self._job.lease.grants if grant.host == host)
        while not self._stop.is_set() and host in self._job.members:
            try:
                agent = self._job.links.agent(host)
                self._ask_containers(host)
                with agent.stream(
                    "health.watch", job=self._job.lease.job, gpus=gpus, age_s=self._age_s(),
                    use_every_s=self._slow.every_s,
                ) as stream:  # fmt: skip
                    for reply in stream:
                        self._take(host, reply.value or [])
                        if self._stop.is_set():
                            return
            except RemoteOpFailed as error:
                if error.kind in FOR_GOOD:
                    self._job.note(f"gpurun cannot watch the hardware of {host}: {error.message}")
                    return
                self._stop.wait(RETRY_S)
            except OUTLIVED:  # the head's own failures, too: nothing else would begin the watch again
                self._stop.wait(RETRY_S)

    def _ask_containers(self, host: str) -> None:
        found = self._job.links.agent(host).call("gang.inspect", job=self._job.lease.job).value
        self._containers[host] = tuple(one["id"] for one in found)

    def _age_s(self) -> float:
        """Return how long the attempt has run."""
        ran_s = self._job.ran_s
        return NEVER_RAN_S if ran_s is None else max(1.0, ran_s)

    def _take(self, host: str, items: list[Mapping[str, Any]]) -> None:
        for item in items:
            if item["kind"] == "use":
                self._use.add(host, item)
                self._slow.add_gpus(host, item)
                continue
            if item["kind"] == "nvml":
                self._job.note(f"{host}: {item['text']}")
                continue
            containers = self._containers.get(host, ())
            mine = self._of_own_rank(item, host)
            cause = cause_of(mine, host, self._job.lease.grants, containers, time.monotonic())
            if cause is None:
                continue
            with self._lock:
                alike = (host, cause.text, cause.gpu)
                if (host, cause.evidence) in self._told or self._alike[alike] >= MOST_ALIKE:
                    continue
                self._told.add((host, cause.evidence))
                self._alike[alike] += 1
                self._causes.append(cause)
            self._job.events.emit("host", host=host, state=cause.kind, reason=cause.reason, evidence=cause.evidence)

    def _of_own_rank(self, item: Mapping[str, Any], host: str) -> Mapping[str, Any]:
        rank = item.get("rank")
        return item if rank is None or self._job.seating.has(host, rank) else {**item, "rank": None}


# Notice that each rank of a gang starts a launcher: several processes share each GPU, or several models are trained.


FIRST_LOOK_S, LOOKS = 15.0, 8
"""When the first look is, and how many there are: each waits twice as long as the one before, the last 32 minutes."""
ASK_TIMEOUT_S = 10.0
NAMES = [
    *((typed.name, words.split()) for typed in LAUNCHERS for words in typed.programs),
    *((typed.name, ["-m", *words.split()]) for typed in LAUNCHERS for words in typed.modules),
]
"""The launchers' names, and the words that their command lines begin with."""


def is_watched(spec: JobSpec) -> bool:
    """Return whether no rank of a job should start a launcher: a rank has one GPU, and nobody typed the launcher."""
    try:
        line = read_line(spec.command)
    except BadInput:  # of an older gpurun
        return False
    return spec.gpus > 1 and not spec.one_per_host and line.typed is None and line.hidden is None


class StarterWatch:
    """Asks the gang's hosts in a separate thread, until a launcher is found or the ranks have run for long."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job whose ranks may start launchers."""
        if not is_watched(self._job.spec):
            return []
        return [threading.Thread(target=self._follow, name="starters", daemon=True)]

    def look(self) -> bool:
        """Ask every host that answers. Return whether the job has been warned."""
        job = self._job
        hosts = [host for host in job.hosts if job.links.is_open(host)]
        told = job.links.each(
            lambda agent: agent.call(
                "ranks.starters", job=job.lease.job, attempt=job.record.attempt, names=[words for _, words in NAMES],
                timeout_s=ASK_TIMEOUT_S,
            ).value,
            hosts,
        )  # fmt: skip
        found = {each["rank"]: each["which"] for answer in told.ok.values() for each in answer}
        if not found:
            return False
        name = NAMES[min(*found.values(), len(NAMES) - 1)][0]
        job.note(warning_of_starters(len(found), name), warning=job.record.attempt)
        return True

    def _follow(self) -> None:
        for number in range(LOOKS):
            if self._stop.wait(FIRST_LOOK_S * 2**number):
                return
            with suppress(*OUTLIVED):  # the head has no thread for a moment
                if self.look():
                    return


def warning_of_starters(ranks: int, name: str) -> str:
    """Return what a person is told."""
    who = f"{ranks} ranks each started" if ranks > 1 else "a rank started"
    return (
        f"{who} {name} itself, although gpurun started one rank for each GPU: the processes of {name} may share GPUs, "
        f"or train several models. --one-per-host runs the command once on each host; --launcher lets gpurun start the "
        f"ranks. If you want {name} in each rank, submit with --launcher {ALONE} and write {name} in the command"
    )


# Notice ranks that end with 0 and have never formed a group: they were to train one model, and each trained its own.


FIRST_S, OFTEN_S, OFTEN, SELDOM_S = 0.3, 1.0, 15, 5.0
"""When the first look is, how long the next so many wait, and how long all others."""
LATE_S = 10.0
"""The first look at a gang that has run for longer may have missed its group."""
GAP_S = 30.0
"""A kernel remembers a closed connection for a minute; looks that are further apart may have missed one."""
MEETING_TIMEOUT_S = 10.0


def is_judged(spec: JobSpec) -> bool:
    """Return whether a job's ranks must form a group: its launcher is for nothing else, and its size does not change.

    Not one process for each host: it starts others, which may not be ranks.
    """
    return (
        spec.gpus > 1 and bool(launcher_of(spec).joins) and not spec.one_per_host and spec.min_gpus is None
        and spec.roles is None
    )  # fmt: skip


class MeetingWatch:
    """Looks at the ranks' connections in a separate thread, until some are found, and once more at the end."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._lock = threading.Lock()
        self._is_open = is_judged(job.spec)
        self._ranks: set[int] = set()
        self._ports: set[int] = set()
        self._looked_s: float | None = None

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job whose ranks need no group."""
        return [threading.Thread(target=self._follow, name="meeting", daemon=True)] if self._is_open else []

    def end(self, end: End) -> None:
        """Say it if a gang that succeeds has formed no group."""
        with suppress(*OUTLIVED):
            if end.outcome is State.SUCCEEDED and self.look() and self._has_seen_all():
                self._job.note(warning_of_meeting(self._job.spec), warning=self._job.record.attempt)

    def look(self) -> bool:
        """Ask the gang's hosts. Return whether it may still be that the ranks have not met."""
        with self._lock:
            if self._is_open:
                self._is_open = False  # unless all goes well
                self._is_open = self._look()
            return self._is_open

    def _look(self) -> bool:
        job, now_s = self._job, time.monotonic()
        first_s = min((rank.started_s for rank in job.reports.all), default=now_s)
        if now_s - first_s > LATE_S if self._looked_s is None else now_s - self._looked_s > GAP_S:
            return False
        self._looked_s = now_s
        port = job.lease.ssh_port
        has_sshd = job.launcher.argv is not None
        addresses = [job.accounts[host].address for host in job.hosts if host in job.accounts]
        told = job.links.each(
            lambda agent: agent.call(
                "ranks.look", job=job.lease.job, attempt=job.record.attempt, addresses=addresses,
                ports=sorted(self._ports) if has_sshd else [port], spared=[port] if has_sshd else [],
                timeout_s=MEETING_TIMEOUT_S,
            ).value,
            job.hosts,
        )  # fmt: skip
        for host, said in told.ok.items():
            self._ranks.update(rank for rank in said["ranks"] if job.seating.has(host, rank))
            self._ports.update(said["ports"])
        is_whole = len(told.ok) == len(addresses) == len(job.hosts)
        return is_whole and not any(said["met"] for said in told.ok.values())

    def _has_seen_all(self) -> bool:
        """Return whether every rank was seen while it ran, and where the gang meets is known."""
        return len(self._ranks) == self._job.spec.gpus and bool(self._ports)

    def _follow(self) -> None:
        looks, wait_s = 0, FIRST_S
        while not self._stop.wait(wait_s):
            with suppress(*OUTLIVED):  # the head has no thread for a moment: then it cannot be known
                if not self.look():
                    return
            looks += 1
            wait_s = OFTEN_S if looks < OFTEN else SELDOM_S


def warning_of_meeting(spec: JobSpec) -> str:
    """Return what a person is told."""
    return (
        f"the {spec.gpus} ranks ended without a connection to each other, so each rank may have trained a model of its "
        f"own. With the launcher {spec.launcher}, a program must call {launcher_of(spec).joins} to connect its ranks. "
        f"Use --launcher {ALONE} for ranks that need no connection"
    )
