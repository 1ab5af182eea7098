"""Jobs as the scheduler sees them: one place that turns what a job wants and its record into a gang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpurun.jobs.limits import FENCE_S, PREPARE_S
from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import Wants
from gpurun.scheduler.model import Gang


def new_gang(wants: Wants, *, job: str, submitted_s: float) -> Gang:
    """The gang of a job that has never been started."""
    return Gang(
        id=job,
        gpus=wants.gpus,
        submitted_s=submitted_s,
        min_gpus=wants.min_gpus,
        constraints=wants.constraints,
        pool=wants.pool,
        priority=wants.priority,
        preemptible=wants.preemptible,
        time_limit_s=wants.time_limit_s,
        start_allowance_s=PREPARE_S,
        stop_allowance_s=wants.grace_s + FENCE_S,
    )


def gang_of(record: JobRecord, wants: Wants) -> Gang:
    """The gang of a job, as its record stands."""
    return next(gangs_of([(record, wants)]))


def gangs_of(jobs: Iterable[tuple[JobRecord, Wants]]) -> Iterator[Gang]:
    """The gangs of many jobs, as their records stand.

    Most of ten thousand jobs want the same as others do. So each gang is a copy of the first one of its kind, which
    takes a fifth of the time of a call of ``Gang``.
    """
    kinds: dict[int, tuple[Wants, Gang]] = {}  # by identity: the wish in the value lives as long as its key
    for record, wants in jobs:
        if id(wants) not in kinds:
            kinds[id(wants)] = wants, new_gang(wants, job="", submitted_s=0.0)
        _, kind = kinds[id(wants)]
        gang = object.__new__(Gang)
        vars(gang).update(
            vars(kind), id=record.id, submitted_s=record.submitted_s, attempts=record.attempt,
            requeued=record.attempt > 0, avoid=record.avoid, kept=record.kept,
        )  # fmt: skip
        yield gang
