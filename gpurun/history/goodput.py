"""Split the GPU time of an attempt: goodput, which moved its training forward, and badput, which did not. Pure.

The terms are those of Google's ML Goodput. Goodput is also Meta's effective training time ratio (ETTR), without the
time in the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from gpurun.jobs.record import Activity, JobRecord, State


@dataclass(frozen=True)
class Goodput:
    """The parts of an attempt's GPU seconds. Together they are all of them: each second is in one part.

    Attributes:
        steps: steps that no earlier attempt had done.
        running: RUNNING of an attempt that reported no step: goodput at most.
        start: until the first step; until RUNNING without one.
        checkpoint: ranks saved.
        lost: ranks repeated steps of an earlier attempt.
        idle: no GPU was in use.
        stopping: from the decision to end the attempt until its GPUs were free.
    """

    steps: float = 0.0
    running: float = 0.0
    start: float = 0.0
    checkpoint: float = 0.0
    lost: float = 0.0
    idle: float = 0.0
    stopping: float = 0.0


PARTS = tuple(f"{part.name}_gpu_s" for part in fields(Goodput))
"""The columns of the history."""


def split(record: JobRecord, did: Activity, *, ended_s: float, gpu_s: float) -> Goodput:
    """Split the GPU seconds of a granted attempt.

    The parts are proportional to their time, also for a gang that changed its size.

    Args:
        record: the job's record at the end of the attempt, or now.
        did: what its ranks did; may hold any number.
        ended_s: its end, or now.
        gpu_s: all of its GPU seconds.
    """
    granted_s = record.granted_s if record.granted_s is not None else ended_s
    stopping_s = record.stopping_s
    if stopping_s is None or stopping_s < granted_s or record.state in _NOT_STOPPED:
        stopping_s = ended_s  # an older gpurun ended it, or an earlier attempt stopped then
    stopping_s = min(max(stopping_s, granted_s), max(ended_s, granted_s))
    ran_s = 0.0 if record.started_s is None else _within(stopping_s - record.started_s, stopping_s - granted_s)
    times = {
        "stopping": max(0.0, ended_s - stopping_s), "start": stopping_s - granted_s - ran_s,
        **({"start_of_run": ran_s} if record.rehearsal else _of_run(did, ran_s)),
    }  # fmt: skip
    times["start"] += times.pop("start_of_run", 0.0)
    total_s = sum(times.values())
    if not total_s > 0.0 or not math.isfinite(total_s):
        return Goodput(start=gpu_s)
    return Goodput(**{part: gpu_s * time_s / total_s for part, time_s in times.items()})


_NOT_STOPPED = frozenset({State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING})


def _of_run(did: Activity, ran_s: float) -> dict[str, float]:
    """Split the seconds of RUNNING."""
    if did.first_step_s is None:
        if did.before is not None:  # the job reports steps, and this attempt came to none
            return {"start_of_run": ran_s}
        idle_s = _within(did.idle_s, ran_s)
        return {"idle": idle_s, "running": ran_s - idle_s}
    start_s = _within(did.first_step_s, ran_s)
    left_s = ran_s - start_s
    lost_s = _within(did.repeated_s, left_s)
    left_s -= lost_s
    saved_s = _within(did.saved_s, left_s)
    left_s -= saved_s
    idle_s = _within(did.idle_s, left_s)
    return {
        "start_of_run": start_s, "lost": lost_s, "checkpoint": saved_s, "idle": idle_s, "steps": left_s - idle_s,
    }  # fmt: skip


def _within(value: float, most: float) -> float:
    """Return a time between 0 and `most`; 0 for a number that is none."""
    return min(max(value, 0.0), most) if value == value else 0.0  # noqa: PLR0124 - not a number is not itself
