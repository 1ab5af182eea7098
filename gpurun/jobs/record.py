"""What is known of one job: the values that the job store keeps as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gpurun.jobs.spec import Grant, JobSpec, Placement, check_gpus, check_path
from gpurun.jobs.states import State

ID_PATTERN = re.compile(r"j-[0-9a-f]{8}")
RequestKind = Literal["cancel", "preempt"]
Rehearsal = Literal["", "due", "passed"]
RESTART_MOST_S = 600.0
"""No back-off is longer."""


@dataclass(frozen=True)
class FirstFailure:
    """What went wrong first, not the avalanche behind it.

    Attributes:
        rank: the first rank that failed, if one did.
        exit_code: that rank's exit code (128 + n for signal n), if it exited.
        excerpt: the last lines the rank printed.
        kind: the class of the cause: ``rank``, ``launcher``, ``container``, ``host-lost``, ``hang``, ``xid``,
            ``gpu-lost``, ``ecc``, ``oom``, ``disk-full``, ``engine``; "" = another step than RUNNING failed.
        evidence: what a host saw of it, word for word, such as a line of its kernel's log.
        cordon: the host's hardware is at fault: it gets no new gangs until a person says so.
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
        why: ``preemption``: gangs on these GPUs were told to stop for the job; ``patience``: others overtook the job
            for long enough, so it gets these GPUs when the gangs on them end.
    """

    placement: Placement
    why: Literal["preemption", "patience"]


@dataclass(frozen=True)
class GpuHolder:
    """Who holds GPUs of a host, as the host says. What the host does not know is "" or -1.

    Attributes:
        gpus: all indices that the holder has there.
        job: the holder's job.
        attempt: which start of that job.
        user: the account of the job's owner on its head node.
        uid: the same account, by number.
        head: the holder's head node.
        state: the id of the holder's state directory.
        why: how the host knows that the holder still needs them.

    Raises:
        ValueError: there can be no such GPU, or it is named twice; what reads a file takes that for damage.
    """

    gpus: tuple[int, ...]
    job: str = ""
    attempt: int = 0
    user: str = ""
    uid: int = -1
    head: str = ""
    state: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        check_gpus(self.gpus)

    @property
    def words(self) -> str:
        """For people: ``job j-0a1b2c3d of bob on head-2``."""
        owner = f" of {self.user}" if self.user else ""
        place = f" on {self.head}" if self.head else ""
        return f"{f'job {self.job}' if self.job else 'an unknown job'}{owner}{place}"


@dataclass(frozen=True)
class HostRefusal:
    """A host refused GPUs to this job, because somebody else claims them there.

    Attributes:
        host: as the job's inventory names it.
        until_s: passes treat the holder's GPUs as taken until then, seconds since the epoch.
        pause_s: how long this refusal counts; the next one of this host counts twice as long.
    """

    host: str
    holder: GpuHolder
    until_s: float
    pause_s: float


@dataclass(frozen=True)
class Restart:
    """A job's next start after a failed attempt.

    Attributes:
        at_s: not before then, seconds since the epoch.
        attempt: which start it is of those that ``max_restarts`` allows, the first one included.
        of: how many it allows; None = as many as hosts fail, because the gang is formed again.
    """

    at_s: float
    attempt: int
    of: int | None

    def is_due(self, now_s: float) -> bool:
        """Whether it may start; a clock that was set back makes nobody wait for hours."""
        return now_s >= self.at_s or self.at_s - now_s > RESTART_MOST_S

    def words(self, now_s: float) -> str:
        """For people: ``restarts in 12 s (attempt 3 of 5)``. When that time is over, it may still wait for GPUs."""
        which = f"(attempt {self.attempt})" if self.of is None else f"(attempt {self.attempt} of {self.of})"
        if self.is_due(now_s):
            return f"waits to be restarted {which}"
        return f"restarts in {max(1, round(self.at_s - now_s))} s {which}"


@dataclass(frozen=True)
class Setback:
    """How the last attempt that counted as a failure went, as `gpurun.supervisor.restarts` compares it.

    Attributes:
        said: the reason, where the kind alone says too little.
        step: the furthest step that a rank told of; None = none did.
        ran_s: seconds it was RUNNING.
        fruitless: how many attempts in a row, this one included, have achieved nothing.
    """

    attempt: int
    kind: str
    said: str
    rank: int | None
    exit_code: int | None
    step: int | None
    ran_s: float
    fruitless: int = 0


@dataclass(frozen=True)
class OutputsLeft:
    """What of a job's outputs is not on the head.

    Attributes:
        count: how many files, or hosts that did not say.
        first: the first of them, each with why.
        hosts: they keep their copies, because these have more than the head. None: nothing is lost, such as a pipe.
    """

    count: int
    first: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    def words(self, job: str) -> str:
        """For people."""
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        kept = f"; {', '.join(self.hosts)} keeps its copy, and `gpurun outputs {job}` brings it" if self.hosts else ""
        return f"not all outputs are on the head: {', '.join(self.first)}{more}{kept}"


class JobRecord(msgspec.Struct, frozen=True, gc=False):
    """Where a job stands. Times are seconds since the epoch, as the head's clock says.

    Not a dataclass, because a pass reads ten thousand of them.

    Attributes:
        owner_uid: the user who submitted; only that user's processes run it.
        inventory: absolute path of the inventory it was submitted against.
        granted_from: the inventories of its grants, with links followed: a link may lead elsewhere since.
        outcome: set in STOPPING: the state the job will end in once every host is fenced.
        ladder: set in STOPPING: ranks may be running and get notice before they are killed.
        reached: how far the attempt has touched its hosts: not at all, files and keys, or containers. Says what has
            to be proven gone. Written before the deed.
        attempt: 0 before the first grant, then 1, 2, …
        avoid: hosts that failed an earlier attempt, those that failed the last one last.
        exit_code: the job's own: the first failing rank's; None if it never came so far.
        code: what ``submit --follow`` and ``wait`` exit with once the job has ended.
        checkpoint_s: when the attempt's ranks last told that their work is safe; None = they have not.
        kept: GPUs that the last pass keeps for the queued job.
        restart: from the end of a failed attempt to the next grant: when it will be started again.
        setback: the last failed attempt, kept over the next ones to recognise one that fails the same way.
        refusals: hosts that refused GPUs, because somebody else claims them there (`gpurun.leases.refusals`).
        placements: how often pre-flight had the job placed elsewhere since it last ran.
        outputs_left: what of the outputs is not on the head, since an attempt ended; None = they are all here.
        rehearsal: "due": the next attempt, or this one, is one rank on one GPU; "passed": it was, and is being ended.
        uncut: hosts of an elastic gang whose ranks may still wait for those of a host that has left.
        generation: the GPU generation of the last grant; "" = an older gpurun granted it.
        gpu_s: GPU seconds that the attempt used before its gang last changed its size.
        gpu_s_until_s: when that was; None = it has not changed.

    Raises:
        ValueError: `inventory` is no path; what reads a file takes that for damage.
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
    exit_code: int | None = None
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

    def __post_init__(self) -> None:
        check_path(self.inventory)

    def but(self, **changes: Any) -> JobRecord:
        """The record with some attributes changed."""
        return msgspec.structs.replace(self, **changes)

    def avoiding(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """What it avoids once these hosts have failed it, too."""
        failed = sorted({*hosts})
        return (*(host for host in self.avoid if host not in failed), *failed)

    def last_words(self) -> str:
        """The reason that it ends with: also what was not brought home, if a host still has it."""
        left = self.outputs_left
        return "; ".join(filter(None, (self.reason, left.words(self.id) if left and left.hosts else "")))

    def gpu_s_at(self, now_s: float) -> float:
        """GPU seconds of the attempt until `now_s`: each GPU counts from the grant, or from when it came."""
        since_s = self.gpu_s_until_s or self.granted_s or now_s
        return self.gpu_s + sum(len(grant.gpus) for grant in self.granted) * max(0.0, now_s - since_s)

    def waits_for_restart(self, now_s: float) -> bool:
        """True while it is queued but shall not start yet."""
        return self.state is State.QUEUED and self.restart is not None and not self.restart.is_due(now_s)

    @property
    def has_saved(self) -> bool:
        """Whether this attempt has told of a checkpoint."""
        saved_s, started_s = self.checkpoint_s, self.started_s
        return saved_s is not None and started_s is not None and saved_s >= started_s

    def is_past(self, attempt: int) -> bool:
        """Whether an attempt is over: the job has ended, waits for the next one, or has begun it."""
        return self.state.ended or self.attempt > attempt or (self.attempt == attempt and self.state is State.QUEUED)

    def story(self, now_s: float) -> str:
        """Its reason, and when it is started again if it is."""
        if self.rehearsal == "due" and not self.reason and not self.state.ended:
            return "waits to rehearse on one GPU" if self.state is State.QUEUED else "rehearses on one GPU"
        if self.state is not State.QUEUED or self.restart is None:
            return self.reason
        return f"{self.restart.words(now_s)}: {self.reason}"


def unknown_spec(record: JobRecord) -> JobSpec:
    """For a job that holds GPUs and whose spec is damaged: what its record says. Enough to count and free its GPUs."""
    return JobSpec(name=record.name, image="", gpus=record.gpus, command=(), pool=record.pool)


@dataclass(frozen=True)
class CancelRequest:
    """Somebody's wish that a job end.

    Attributes:
        kind: ``cancel``: for good; ``preempt``: it gives its GPUs back and is queued again.
        drain: the hosts for whose drain a pass asks; a pass withdraws the request when they are not drained any more.
    """

    kind: RequestKind
    by: str
    asked_s: float
    reason: str = ""
    drain: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """The reason of the job that ends so, for people."""
        if self.kind == "preempt":
            return f"{'moved' if self.drain else 'preempted'}: {self.reason}"
        return f"drained: {self.reason}" if self.drain else f"cancelled by {self.by}"
