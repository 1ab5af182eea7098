"""A row of the history: one attempt of a job. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpurun.history.goodput import Goodput, split
from gpurun.jobs.record import Activity, GpuUse, JobRecord, State
from gpurun.jobs.spec import JobSpec
from gpurun.quantities import count

OUTCOMES = (
    "SUCCEEDED", "FAILED", "CANCELLED", "TIMED_OUT",
    "PREEMPTED", "RETRIED", "REHEARSED", "REPLACED",
)  # fmt: skip
"""How an attempt can end. The job has ended with the first four; with the others it is queued again."""
FINAL = OUTCOMES[:4]
SPARKS = 24


@dataclass(frozen=True)
class HistoryRow:
    """One attempt. Times are seconds since the epoch.

    Attributes:
        gpus: how many GPUs it had; how many it wanted if it had none.
        hosts: names, separated by spaces.
        granted_s: None = it ended in the queue.
        waited_s: from when it was queued to the grant, or to its end.
        gpu_s: GPU seconds from the grant until the GPUs were released.
        outcome: one of `OUTCOMES`; a state for a running attempt.
        cause, cause_host, cause_rank: what failed first, as in `gpurun.jobs.record.FirstFailure`.
        use_percent: mean use of all its GPUs; None = unknown.
        memory_mib: the most memory in use on one of its GPUs.
        slow_rank, slow_host, slow_percent: the rank whose GPU was clearly less busy than the others.
        rank_uses: mean and highest use of each rank: ``31/98 12/60``.
        sparks: use over time, at most `SPARKS` numbers.
        steps_gpu_s: GPU seconds of steps that no earlier attempt had done. This and the next six add up to `gpu_s`
            (`gpurun.history.goodput`); all None = an older gpurun wrote the row.
        running_gpu_s: GPU seconds in RUNNING of an attempt that reported no step, so gpurun cannot split them.
        start_gpu_s: until the first step, or until RUNNING if no step was reported.
        checkpoint_gpu_s: while ranks saved.
        lost_gpu_s: while ranks repeated steps of an earlier attempt.
        idle_gpu_s: while no GPU was in use.
        stopping_gpu_s: from the decision to end the attempt until its GPUs were free.
        lost_cause: why that earlier attempt ended, as in `cause`, ``time-limit`` or ``preemption``; "" = no step was
            repeated.
    """

    job: str
    attempt: int
    user: str
    pool: str
    project: str
    name: str
    image: str
    gpus: int
    generation: str
    hosts: str
    submitted_s: float
    granted_s: float | None
    started_s: float | None
    ended_s: float
    waited_s: float
    gpu_s: float
    outcome: str
    reason: str = ""
    cause: str = ""
    cause_host: str = ""
    cause_rank: int | None = None
    exit_code: int | None = None
    code: int | None = None
    use_percent: float | None = None
    memory_mib: int | None = None
    slow_rank: int | None = None
    slow_host: str = ""
    slow_percent: float | None = None
    rank_uses: str = ""
    sparks: str = ""
    steps_gpu_s: float | None = None
    running_gpu_s: float | None = None
    start_gpu_s: float | None = None
    checkpoint_gpu_s: float | None = None
    lost_gpu_s: float | None = None
    idle_gpu_s: float | None = None
    stopping_gpu_s: float | None = None
    lost_cause: str | None = None

    @property
    def goodput_words(self) -> str:
        """Return the share of goodput: ``87%``; ``≤95%`` if it cannot be split; "" if it is unknown."""
        if self.steps_gpu_s is None or self.running_gpu_s is None or self.gpu_s <= 0:
            return ""
        percent = 100 * (self.steps_gpu_s + self.running_gpu_s) / self.gpu_s
        return f"{'≤' if self.running_gpu_s > 0 else ''}{percent:.0f}%"

    @property
    def use_words(self) -> str:
        """Describe how busy its GPUs were: ``8 GPUs, 31 % busy; rank 3 on h2 only 12 %``."""
        gpus = count(self.gpus, "GPU")
        if self.use_percent is None:
            return gpus
        busy = f"{gpus}, {self.use_percent:.0f} % busy"
        if self.slow_rank is None or self.slow_percent is None:
            return busy
        return f"{busy}; rank {self.slow_rank} on {self.slow_host} only {self.slow_percent:.0f} %"


COLUMNS = tuple(column.name for column in fields(HistoryRow))


def row_of(record: JobRecord, spec: JobSpec | None, use: GpuUse | None, *, now_s: float | None = None) -> HistoryRow:
    """Return the row of an ended attempt; or, with `now_s`, of a running one.

    Args:
        record: the job's record as the attempt ended.
        spec: None if it is damaged.
    """
    failure, slow = record.first_failure, use.slowest if use else None
    is_granted = record.granted_s is not None and record.granted_s >= record.queued_s and bool(record.granted)
    ended_s = now_s or record.ended_s or record.queued_s
    granted_s = record.granted_s if is_granted else None
    gpu_s = record.gpu_s_at(ended_s) if is_granted else 0.0
    did = use.activity if use else Activity()
    parts = split(record, did, ended_s=ended_s, gpu_s=gpu_s) if is_granted else Goodput()
    return HistoryRow(
        job=record.id, attempt=record.attempt, user=record.owner, pool=record.pool or "",
        project=(spec.project or "") if spec else "", name=record.name, image=spec.image if spec else "",
        gpus=sum(len(grant.gpus) for grant in record.granted) or record.gpus, generation=record.generation,
        hosts=" ".join(grant.host for grant in record.granted), submitted_s=record.submitted_s, granted_s=granted_s,
        started_s=record.started_s, ended_s=ended_s, waited_s=max(0.0, (granted_s or ended_s) - record.queued_s),
        gpu_s=gpu_s,
        outcome=record.state.value if now_s else outcome_of(record), reason=_reason(record),
        cause=(failure.kind or "start") if failure else "", cause_host=(failure.host or "") if failure else "",
        cause_rank=failure.rank if failure else None, exit_code=record.exit_code, code=record.code,
        use_percent=use.mean if use else None, memory_mib=use.memory_mib if use else None,
        slow_rank=slow.rank if slow else None, slow_host=slow.host if slow else "",
        slow_percent=slow.mean if slow else None, rank_uses=_rank_uses(use), sparks=_sparks(use),
        steps_gpu_s=parts.steps, running_gpu_s=parts.running, start_gpu_s=parts.start,
        checkpoint_gpu_s=parts.checkpoint, lost_gpu_s=parts.lost, idle_gpu_s=parts.idle,
        stopping_gpu_s=parts.stopping, lost_cause=did.before_end if parts.lost else "",
    )  # fmt: skip


def outcome_of(record: JobRecord) -> str:
    """Return how an attempt ended: one of `OUTCOMES`."""
    if record.state is not State.QUEUED:
        return str(record.state.value)
    if record.rehearsal == "passed":
        return "REHEARSED"
    has_failed = record.setback is not None and record.setback.attempt == record.attempt
    is_moved = record.reason.startswith(("preempted", "moved"))
    has_paused = bool(record.placements) or is_moved  # pre-flight made it pause, or it was idle
    if record.restart is not None and (has_failed or not has_paused):
        return "RETRIED"
    return "PREEMPTED" if is_moved else "REPLACED"


def _reason(record: JobRecord) -> str:
    """Return why an attempt ended, and which retry follows it."""
    then = record.restart.retry_words if record.restart is not None and record.state is State.QUEUED else ""
    return f"{record.reason}; then {then}" if then else record.reason


def _rank_uses(use: GpuUse | None) -> str:
    return " ".join(f"{rank.mean:.0f}/{rank.most:.0f}" for rank in use.ranks) if use else ""


def _sparks(use: GpuUse | None) -> str:
    """Return the series as at most `SPARKS` means."""
    if use is None or not use.series:
        return ""
    values = [value for _, value in use.series]
    count = min(SPARKS, len(values))
    parts = [values[len(values) * number // count : len(values) * (number + 1) // count] for number in range(count)]
    return " ".join(f"{sum(part) / len(part):.0f}" for part in parts)
