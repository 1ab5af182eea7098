"""The record of a job and the values in it, which the job store keeps as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import msgspec

from gpurun.errors import BadInput, StateError
from gpurun.jobs.spec import Grant, JobSpec, Placement, RetryOn, check_gpus, check_path
from gpurun.quantities import duration
from gpurun.state.boot import HeadBoot

# The states of a job and the transitions between them.


class State(str, Enum):
    """The state of a job. Values are those that ``status --json`` prints."""

    QUEUED = "QUEUED"
    """Waits for GPUs; costs a row, not a process."""
    GRANTED = "GRANTED"
    """Has a lease; its supervisor is about to take over."""
    PREPARING = "PREPARING"
    """Image, code and data go to every host of the gang."""
    STARTING = "STARTING"
    """Containers, the job's own sshd, pre-flight."""
    RUNNING = "RUNNING"
    """horovodrun runs."""
    STOPPING = "STOPPING"
    """The gang is being ended and every host fenced; the outcome is already known."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def ended(self) -> bool:
        """Return True for final states."""
        return self in ENDED

    @property
    def holds_gpus(self) -> bool:
        """True while a lease exists for the job."""
        return self in HOLDS_GPUS


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.TIMED_OUT})
HOLDS_GPUS = frozenset({State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING})

WAYS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.GRANTED, State.CANCELLED, State.FAILED}),
    State.GRANTED: frozenset({State.PREPARING, State.STOPPING, State.QUEUED}),
    State.PREPARING: frozenset({State.STARTING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.STOPPING}),
    State.STOPPING: frozenset({*ENDED, State.QUEUED}),
    **{state: frozenset() for state in ENDED},
}
"""From each state, the states that may follow. STOPPING → QUEUED is a restart or a preemption."""


def check_way(job: str, before: State, after: State) -> None:
    """Raise StateError unless `after` may follow `before`. A job may stay in a state until its outcome is decided.

    So if two supervisors run the same job (because somebody removed its lease and put it back), the second cannot
    decide another outcome.
    """
    if after is before is State.STOPPING:
        raise StateError("gpurun has already decided the outcome of the job", job=job)
    if after is not before and after not in WAYS[before]:
        raise StateError(f"the job's state cannot change from {before.value} to {after.value}", job=job)


# How busy the GPUs of an attempt were, from the hosts' samples. Pure.


CLEARLY_PERCENT = 20.0
"""A rank that is less busy than the median by this much is named."""
MOST_POINTS = 120


@dataclass(frozen=True)
class RankUse:
    """The use of one rank's GPU during an attempt.

    Attributes:
        uuid: NVML's UUID; "" = unknown.
        samples: the number of samples, each of about one second.
        mean, most: use in percent.
        memory_mib: the most memory in use.
        last: use in percent over the last reported half minute.
    """

    rank: int
    host: str
    gpu: int
    uuid: str
    samples: int
    mean: float
    most: float
    memory_mib: int
    last: float = 0.0


@dataclass(frozen=True)
class Activity:
    """What the ranks of an attempt did. Seconds are those in RUNNING, so no step of a clock changes them.

    Attributes:
        first_step_s: when gpurun saw the first step of a rank; None = no rank has reported one.
        step: the furthest step that a rank reported.
        before: the furthest step of all earlier attempts; None = none reported a step.
        before_end: why the last of them ended: the kind of its first failure, ``time-limit``, or ``preemption``.
        repeated_s: from the first step until a step beyond `before`.
        last_step, last_saved: the furthest step, and the furthest step of a checkpoint, in the ranks' last reports.
        saved_s: how long ranks saved since the first new step.
        saved_told_s: how long a rank has saved in all, as it reported.
        idle_s: how long all GPUs were idle since the first new step, except while ranks saved; in all without a step.
        row_s: how long all GPUs have been idle in a row.
        moved_s: `row_s` when a rank last reported another step or checkpoint.
        told_s: `row_s` when the owner was told that the job is idle; None = not in this row.
        heard_s: when all this was written, by the head's clock.
        boot, boot_s: the reading of that clock, as in `JobRecord`.
    """

    first_step_s: float | None = None
    step: int | None = None
    before: int | None = None
    before_end: str = ""
    repeated_s: float = 0.0
    last_step: int | None = None
    last_saved: int | None = None
    saved_s: float = 0.0
    saved_told_s: float = 0.0
    idle_s: float = 0.0
    row_s: float = 0.0
    moved_s: float = 0.0
    told_s: float | None = None
    heard_s: float = 0.0
    boot: str = ""
    boot_s: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """The use of all ranks' GPUs during an attempt.

    Attributes:
        activity: what its ranks did, and how long its GPUs were idle.
        series: (seconds since the epoch, mean use of all GPUs in percent), oldest first, at most `MOST_POINTS`.
        told_s: when a host last sent samples, seconds since the epoch.
    """

    ranks: tuple[RankUse, ...] = ()
    series: tuple[tuple[float, float], ...] = ()
    told_s: float = 0.0
    activity: Activity = Activity()

    @property
    def mean(self) -> float | None:
        """Return the mean use of all GPUs in percent."""
        samples = sum(rank.samples for rank in self.ranks)
        return sum(rank.mean * rank.samples for rank in self.ranks) / samples if samples else None

    @property
    def memory_mib(self) -> int | None:
        """Return the most memory that a GPU had in use."""
        return max((rank.memory_mib for rank in self.ranks), default=None)

    @property
    def slowest(self) -> RankUse | None:
        """Return the rank whose GPU was clearly less busy than the others.

        In a synchronous gang, the other ranks wait for it inside NCCL, which keeps their GPUs busy.
        """
        if len(self.ranks) < 2:
            return None
        least = min(self.ranks, key=lambda rank: (rank.mean, rank.rank))
        others = [rank.mean for rank in self.ranks if rank is not least]
        from statistics import median  # noqa: PLC0415 (most commands load this file, few ask)

        return least if median(others) - least.mean >= CLEARLY_PERCENT else None


def thinned(series: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return a series of at most `MOST_POINTS`. Replaces each two neighbours by their mean if it is longer."""
    if len(series) <= MOST_POINTS:
        return tuple(series)
    pairs = zip(series[::2], series[1::2], strict=False)
    return tuple((first[0], round((first[1] + second[1]) / 2, 1)) for first, second in pairs)


ID_PATTERN = re.compile(r"j-[0-9a-f]{8}")
RequestKind = Literal["cancel", "preempt"]
Rehearsal = Literal["", "due", "passed"]
RESTART_MOST_S = 600.0
"""No back-off is longer. Only a retry's own wait may be."""
AVOID_MOST_S = 600.0
"""A job avoids a host that could not start its gang for no longer."""
_STAMPS = (
    "submitted_s", "queued_s", "granted_s", "started_s", "checkpoint_s", "ended_s", "gpu_s_until_s", "stopping_s",
)  # fmt: skip
"""The times of a record that are past."""


@dataclass(frozen=True)
class FirstFailure:
    """The first failure of an attempt, without the failures that it caused.

    Attributes:
        rank: the first rank that failed, if one did.
        exit_code: the exit code (128 + n for signal n) of the rank, the launcher or the container that failed, if it
            exited.
        excerpt: the last lines that the rank printed; of a gang that hangs, where its ranks stand.
        kind: the class of the cause: ``rank``, ``launcher``, ``container``, ``host-lost``, ``hang``, ``xid``,
            ``gpu-lost``, ``ecc``, ``oom``, ``disk-full``, ``engine``, ``link``, ``idle``; "" = another step than
            RUNNING failed.
        evidence: the host's evidence word for word, such as a line of its kernel's log.
        cordon: the host's hardware is at fault: it gets no new gangs until a person uncordons it.
    """

    reason: str
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None
    excerpt: tuple[str, ...] = ()
    kind: str = ""
    evidence: str = ""
    cordon: bool = False


@dataclass(frozen=True)
class Kept:
    """GPUs that the scheduler keeps for a queued job until the job starts.

    Attributes:
        why: ``preemption``: gpurun preempted gangs on these GPUs for the job; ``patience``: others overtook the job
            for long enough, so it gets these GPUs when the gangs on them end.
    """

    placement: Placement
    why: Literal["preemption", "patience"]


@dataclass(frozen=True)
class GpuHolder:
    """The holder of GPUs of a host, as the host reports it. Unknown values are "" or -1.

    Attributes:
        gpus: all GPU indices that the holder has there.
        job: the holder's job; "" also if no job holds them, but a process that no gpurun job started.
        attempt: the attempt of that job.
        user: the account of the job's owner on its head node, or of the process on the host.
        uid: the same account, by number.
        head: the holder's head node.
        state: the id of the holder's state directory.
        why: the host's evidence that the holder still needs them.
        process: that process, with its user and pid.

    Raises:
        ValueError: the index of a GPU is out of range, or occurs twice; readers of a file treat that as damage.
    """

    gpus: tuple[int, ...]
    job: str = ""
    attempt: int = 0
    user: str = ""
    uid: int = -1
    head: str = ""
    state: str = ""
    why: str = ""
    process: str = ""

    def __post_init__(self) -> None:
        check_gpus(self.gpus)

    @property
    def words(self) -> str:
        """Describe the holder for people: ``job j-0a1b2c3d of bob on head-2``, ``python3 of bob (pid 4711)``."""
        if self.process:
            return self.process
        owner = f" of {self.user}" if self.user else ""
        place = f" on {self.head}" if self.head else ""
        return f"{f'job {self.job}' if self.job else 'an unknown job'}{owner}{place}"


@dataclass(frozen=True)
class HostRefusal:
    """A host refused GPUs to this job: another job claims them there, or a process that no job started uses them.

    Attributes:
        host: the host's name in the job's inventory.
        until_s: passes treat the holder's GPUs as taken until then, seconds since the epoch.
        pause_s: how long this refusal counts; the next refusal of this host counts twice as long.
    """

    host: str
    holder: GpuHolder
    until_s: float
    pause_s: float


@dataclass(frozen=True)
class StartFailure:
    """Why a host could not start its part of a gang. The newest one of each host (`gpurun.supervisor.verdict.causes`).

    Attributes:
        host: the host's name in the job's inventory.
        attempt: the attempt that failed there.
        kind: the class of the failure, such as ``no-space`` or ``docker``.
        words: the failure, without what differs between hosts and attempts, to compare it with other hosts' failures.
        reason: the failure, for people.
        at_s: when it happened, seconds since the epoch.
        until_s: passes avoid the host for this job until then.
        is_sound: a check that depends on no job found nothing wrong with the host.
        times: how often in a row the host failed in this way.
        lacks_mib: how much space an image or a data set lacks on the host; 0 = unknown, or another failure.
        first_s: when the row of failures of this kind began on the host, all of them while it was sound; 0 = at `at_s`.
    """

    host: str
    attempt: int
    kind: str
    words: str
    reason: str
    at_s: float
    until_s: float
    is_sound: bool = False
    times: int = 1
    lacks_mib: int = 0
    first_s: float = 0.0

    @property
    def since_s(self) -> float:
        """Return when the row began. A clock that was set back makes it no longer than the newest failure."""
        return min(self.first_s or self.at_s, self.at_s)


@dataclass(frozen=True)
class Restart:
    """A job's next start after a failed attempt, or the next placement of a gang that could not start.

    Attributes:
        at_s: the earliest start, seconds since the epoch.
        attempt: the number of this start among the starts that ``max_restarts`` allows, the first start included; 0 = a
            placement, which does not count. For a retry: which of the job's retries it is.
        of: the number of allowed starts, or of retries; None = no limit, because the gang is formed again.
        is_retry: the program failed, no host: a start that the job's ``retry`` allows.
        wait_s: a retry's wait, if its recipe says it.
    """

    at_s: float
    attempt: int
    of: int | None
    is_retry: bool = False
    wait_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Return whether the job may start now. After the clock was set back, a job does not wait for hours longer."""
        return now_s >= self.at_s or self.at_s - now_s > max(RESTART_MOST_S, self.wait_s + 1.0)

    @property
    def retry_words(self) -> str:
        """Return which retry it is: ``retry 1 of 3``; "" for another start."""
        return f"retry {self.attempt} of {self.of}" if self.is_retry else ""

    def words(self, now_s: float) -> str:
        """Describe the restart for people: ``restarts in 12s (attempt 3 of 5)``, ``retries in 12s (retry 1 of 3)``,
        ``is placed again in 12s``. Afterwards it may still wait for GPUs.
        """
        left = duration(max(1, round(self.at_s - now_s)))
        if self.is_retry:
            when = "waits to be retried" if self.is_due(now_s) else f"retries in {left}"
            return f"{when} ({self.retry_words})"
        if not self.attempt:
            return "waits to be placed again" if self.is_due(now_s) else f"is placed again in {left}"
        which = f"(attempt {self.attempt})" if self.of is None else f"(attempt {self.attempt} of {self.of})"
        if self.is_due(now_s):
            return f"waits to be restarted {which}"
        return f"restarts in {left} {which}"


@dataclass(frozen=True)
class Setback:
    """How the last attempt that counted as a failure went, for the comparison in `gpurun.supervisor.verdict.ends`.

    Attributes:
        said: the reason, if the kind alone is not specific.
        step: the furthest step that a rank reported; None = no rank reported one.
        ran_s: seconds in RUNNING.
        fruitless: the number of attempts without progress that hosts' faults ended one after the other, with this one.
        furthest, saved: the furthest step that a rank reported, and the furthest that a rank reported as saved, in this
            or an earlier attempt; None = no rank reported one.
        futile: how many ends of the program itself came one after the other without progress, including this one.
        is_retried: a retry follows.
    """

    attempt: int
    kind: str
    said: str
    rank: int | None
    exit_code: int | None
    step: int | None
    ran_s: float
    fruitless: int = 0
    furthest: int | None = None
    saved: int | None = None
    futile: int = 0
    is_retried: bool = False


@dataclass(frozen=True)
class Unjudged:
    """A retry that is decided once an attempt's outputs are on the head: did the attempt make progress?

    Attributes:
        outcome: the job's end if it is not retried: FAILED or TIMED_OUT.
        cause: what ended the attempt.
        before: how the attempt before it failed, if one did.
    """

    outcome: State
    cause: RetryOn
    before: Setback | None = None


@dataclass(frozen=True)
class OutputsLeft:
    """Outputs of a job that are not on the head.

    Attributes:
        count: the number of files, or of hosts that did not list theirs.
        first: the first of them, each with the reason.
        hosts: hosts that keep their copies, because they have more than the head. None: no content is missing; for
            example, the file is a pipe.
    """

    count: int
    first: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    def words(self, job: str, *, is_over: bool = True) -> str:
        """Describe them for people.

        Args:
            is_over: the job ends, or has ended: gpurun copies nothing from a host that a later attempt may use.
        """
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        kept = f"; copies remain on {', '.join(self.hosts)}" if self.hosts else ""
        kept += f", and `gpurun outputs {job}` fetches them" if kept and is_over else ""
        return f"not all outputs are on the head: {', '.join(self.first)}{more}{kept}"


class JobRecord(msgspec.Struct, frozen=True, gc=False):
    """The state of a job. Times are seconds since the epoch, by the head's clock (`gpurun.state.clock`).

    Not a dataclass, because a pass reads ten thousand of them.

    Attributes:
        owner_uid: the user who submitted; only that user's processes run it.
        inventory: absolute path of the inventory that the job was submitted with.
        granted_from: the inventories of its grants, with links resolved at the grant.
        outcome: set in STOPPING: the state in which the job will end once every host is fenced.
        ladder: set in STOPPING: ranks may be running, so they get SIGTERM before SIGKILL.
        stopping_s: when the attempt entered STOPPING; None = an older gpurun moved it there.
        reached: how far the attempt has changed its hosts: not at all, files and keys, or containers. The fence checks
            this much. Written before the change.
        attempt: 0 before the first grant, then 1, 2, …
        avoid: hosts that failed an earlier attempt; those of the last attempt come last.
        code: the exit code of ``submit --follow`` and ``wait`` after the job's end.
        checkpoint_s: when the attempt's ranks last reported a checkpoint; None = they have not.
        kept: GPUs that the last pass keeps for the queued job.
        restart: from the end of a failed attempt to the next grant: when the job will restart.
        setback: the last failed attempt, kept to recognise a later attempt that fails in the same way.
        refusals: hosts that refused GPUs, because another job or a process holds them (`gpurun.leases.lease`).
        placements: how often the job was placed since it last ran, and its gang could not start.
        start_failures: why; the newest failure of each host. Empty once the gang runs.
        outputs_left: outputs that are not on the head after an attempt; None = all are on the head.
        rehearsal: "due": the current or next attempt is a rehearsal; "passed": the rehearsal succeeded, and is
            stopping.
        uncut: hosts of an elastic gang whose ranks may still wait for ranks of a host that has left.
        generation: the GPU generation of the last grant; "" = an older gpurun granted it.
        gpu_s: GPU seconds that the attempt used before its gang last changed its size.
        gpu_s_until_s: when that was; None = it has not changed.
        boot, boot_s: the reading of the head's clock by which the times are; "" = unknown.
        retries: how often the job was retried after its program failed, hung or reached its time limit.
        unjudged: in STOPPING, with the outcome QUEUED: the retry that is not decided yet.

    Raises:
        ValueError: `inventory` is not a path; readers of a file treat that as damage.
    """

    id: str
    name: str
    owner: str
    owner_uid: int
    inventory: str
    gpus: int
    state: State
    submitted_s: float
    queued_s: float
    pool: str | None = None
    priority: int = 0
    outcome: State | None = None
    ladder: bool = False
    reached: Literal["nothing", "files", "containers"] = "nothing"
    attempt: int = 0
    restarts: int = 0
    granted: tuple[Grant, ...] = ()
    granted_s: float | None = None
    started_s: float | None = None
    checkpoint_s: float | None = None
    ended_s: float | None = None
    reason: str = ""
    code: int | None = None
    avoid: tuple[str, ...] = ()
    kept: Kept | None = None
    first_failure: FirstFailure | None = None
    restart: Restart | None = None
    setback: Setback | None = None
    refusals: tuple[HostRefusal, ...] = ()
    placements: int = 0
    uncut: tuple[str, ...] = ()
    outputs_left: OutputsLeft | None = None
    granted_from: tuple[str, ...] = ()
    rehearsal: Rehearsal = ""
    generation: str = ""
    gpu_s: float = 0.0
    gpu_s_until_s: float | None = None
    stopping_s: float | None = None
    start_failures: tuple[StartFailure, ...] = ()
    boot: str = ""
    boot_s: float = 0.0
    retries: int = 0
    unjudged: Unjudged | None = None

    def __post_init__(self) -> None:
        check_path(self.inventory)

    def but(self, **changes: Any) -> JobRecord:
        """Return the record with some attributes changed."""
        return msgspec.structs.replace(self, **changes)

    def on(self, boot: HeadBoot) -> JobRecord:
        """Return the record with its times by another reading of the head's clock."""
        if boot.is_like(self.boot, self.boot_s):
            return self
        then = HeadBoot(self.boot, self.boot_s)
        changes: dict[str, Any] = {"boot": boot.id, "boot_s": boot.began_s}
        for name in _STAMPS:
            stamp_s = getattr(self, name)
            if stamp_s is not None:
                changes[name] = boot.moved(stamp_s, then)
        if self.restart is not None:
            changes["restart"] = replace(self.restart, at_s=boot.moved_ahead(self.restart.at_s, then))
        if self.refusals:
            changes["refusals"] = tuple(
                replace(each, until_s=boot.moved_ahead(each.until_s, then)) for each in self.refusals
            )
        if self.start_failures:
            changes["start_failures"] = tuple(
                replace(
                    each,
                    at_s=boot.moved(each.at_s, then),
                    until_s=boot.moved_ahead(each.until_s, then),
                    first_s=boot.moved(each.since_s, then),
                )
                for each in self.start_failures
            )
        return msgspec.structs.replace(self, **changes)

    def avoiding(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Return the hosts to avoid after these hosts have failed the job, too."""
        failed = sorted({*hosts})
        return (*(host for host in self.avoid if host not in failed), *failed)

    @property
    def failed_to_start(self) -> tuple[str, ...]:
        """Return the hosts that failed before the current attempt could run."""
        return tuple(each.host for each in self.start_failures if each.attempt == self.attempt)

    def avoided(self, now_s: float) -> tuple[str, ...]:
        """Return the hosts to avoid now. A clock that was set back prolongs nothing."""
        recent = [each.host for each in self.start_failures if 0.0 < each.until_s - now_s <= AVOID_MOST_S]
        return self.avoiding(recent) if recent else self.avoid

    @property
    def exit_code(self) -> int | None:
        """Return the job's own exit code: 0, or that of the first failing rank; None if no rank ended."""
        if State.SUCCEEDED in (self.state, self.outcome):
            return 0
        return None if self.first_failure is None else self.first_failure.exit_code

    def last_words(self) -> str:
        """Return the final reason, including outputs that are still on hosts."""
        left = self.outputs_left
        return "; ".join(filter(None, (self.reason, left.words(self.id) if left and left.hosts else "")))

    def gpu_s_at(self, now_s: float) -> float:
        """Return the attempt's GPU seconds until `now_s`. Each GPU counts from the grant, or from when it joined."""
        since_s = self.gpu_s_until_s or self.granted_s or now_s
        return self.gpu_s + sum(len(grant.gpus) for grant in self.granted) * max(0.0, now_s - since_s)

    def waits_for_restart(self, now_s: float) -> bool:
        """Return True while the job is queued but must not start yet."""
        return self.state is State.QUEUED and self.restart is not None and not self.restart.is_due(now_s)

    @property
    def has_saved(self) -> bool:
        """Return whether this attempt has reported a checkpoint."""
        saved_s, started_s = self.checkpoint_s, self.started_s
        return saved_s is not None and started_s is not None and saved_s >= started_s

    def is_past(self, attempt: int) -> bool:
        """Return whether an attempt has ended: the job has ended, waits for the next attempt, or has begun it."""
        return self.state.ended or self.attempt > attempt or (self.attempt == attempt and self.state is State.QUEUED)

    def story(self, now_s: float) -> str:
        """Return the reason, and the time of the restart if there is one."""
        if self.rehearsal == "due" and not self.reason and not self.state.ended:
            return "waits to rehearse on one GPU" if self.state is State.QUEUED else "rehearses on one GPU"
        if self.state is not State.QUEUED or self.restart is None:
            return self.reason
        return f"{self.restart.words(now_s)}: {self.reason}"


def unknown_spec(record: JobRecord) -> JobSpec:
    """Return a substitute for the damaged spec of a job that holds GPUs, enough to count and free its GPUs."""
    return JobSpec(name=record.name, image="", gpus=record.gpus, command=(), pool=record.pool)


@dataclass(frozen=True)
class CancelRequest:
    """A request to end a job's attempt.

    Attributes:
        kind: ``cancel``: end the job; ``preempt``: release its GPUs and queue it again.
        drain: the hosts whose drain is the cause; a pass withdraws the request if the drain ends.
    """

    kind: RequestKind
    by: str
    asked_s: float
    reason: str = ""
    drain: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """Return the reason of a job that ends because of this request, for people."""
        if self.kind == "preempt":
            return f"{'moved' if self.drain else 'preempted'}: {self.reason}"
        return f"drained: {self.reason}" if self.drain else f"cancelled by {self.by}"


# Where a job comes from: what a person later needs to identify the code and the version of gpurun.


@dataclass(frozen=True)
class Origin:
    """The head and the workdir at a job's submission.

    Attributes:
        gpurun, python: versions.
        head: the machine's name.
        commit: the commit of the workdir's Git repository; "" = there is none.
        diff: uncommitted changes as ``git diff --binary`` prints them; left out if too long.
        untracked: untracked files of the workdir.
    """

    gpurun: str = ""
    python: str = ""
    head: str = ""
    commit: str = ""
    diff: str = ""
    untracked: int = 0


# What a person means by the name of a job or of a sweep: one rule for both. Pure.


MOST_NAMED = 5
"""So many jobs or sweeps of one name are listed in an error."""


@dataclass(frozen=True)
class Living:
    """A job or a sweep that has not ended."""

    id: str
    state: str
    since_s: float
    is_mine: bool


class Ambiguous(BadInput):
    """A name, or the beginning of an id, means several jobs or sweeps."""


def meant(
    text: str, things: str, ids: Iterable[str], living: Sequence[Living], newest: Callable[[bool], str | None]
) -> str | None:
    """Return the id that `text` means: an unambiguous beginning of it, or a name. None if nothing matches.

    A name means what has this name and has not ended, else what has it and began last. This user's come before all
    others, so no other user chooses what a name means.

    Args:
        things: ``jobs`` or ``sweeps``, for errors.
        living: those of this name that have not ended.
        newest: returns the newest of this name; with True, the newest of this user's.

    Raises:
        Ambiguous: several match, such as two jobs of one name that have not ended.
    """
    return (
        _the_only(text, things, [each for each in living if each.is_mine])
        or _beginning_with(text, ids)
        or newest(True)
        or _the_only(text, things, living)
        or newest(False)
    )


def _beginning_with(text: str, ids: Iterable[str]) -> str | None:
    """Return the id that begins so, with or without its letter and dash."""
    begins = [each for each in ids if text and (each.startswith(text) or each.startswith(text, 2))]
    if len(begins) > 1:
        raise Ambiguous(
            f"{text!r} is the beginning of several ids: {', '.join(begins[:MOST_NAMED])}",
            hint="give more characters of the id",
        )
    return begins[0] if begins else None


def _the_only(name: str, things: str, living: Sequence[Living]) -> str | None:
    if len(living) > 1:
        each = sorted(living, key=lambda one: one.since_s, reverse=True)
        shown = ", ".join(f"{one.id} ({one.state})" for one in each[:MOST_NAMED])
        more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
        raise Ambiguous(
            f"{name!r} is the name of {len(each)} {things} that have not ended: {shown}{more}",
            hint="give the id instead of the name",
        )
    return living[0].id if living else None
