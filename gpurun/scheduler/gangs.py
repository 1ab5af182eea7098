"""Jobs as the scheduler sees them: one place that turns a spec and a record into a gang."""

from __future__ import annotations

from dataclasses import replace

from gpurun.jobs.limits import FENCE_S, PREPARE_S
from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import JobSpec
from gpurun.scheduler.model import Gang


def new_gang(spec: JobSpec, *, job: str, submitted_s: float) -> Gang:
    """The gang of a job that has never been started."""
    return Gang(
        id=job,
        gpus=spec.gpus,
        submitted_s=submitted_s,
        min_gpus=spec.min_gpus,
        constraints=spec.constraints,
        pool=spec.pool,
        priority=spec.priority,
        preemptible=spec.preemptible,
        time_limit_s=spec.time_limit_s,
        start_allowance_s=PREPARE_S,
        stop_allowance_s=spec.grace_s + FENCE_S,
    )


def gang_of(record: JobRecord, spec: JobSpec) -> Gang:
    """The gang of a job, as its record stands."""
    return replace(
        new_gang(spec, job=record.id, submitted_s=record.submitted_s),
        attempts=record.attempt,
        requeued=record.attempt > 0,
        avoid=record.avoid,
        kept=record.kept,
    )
