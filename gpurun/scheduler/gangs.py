"""Jobs as the scheduler sees them: one place that turns what a job wants and its record into a gang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from gpurun.jobs.limits import FENCE_S, PREPARE_S
from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import JobSpec, Wants
from gpurun.scheduler.model import Gang


def new_gang(spec: JobSpec, *, job: str, submitted_s: float) -> Gang:
    """The gang of a job that has never been started."""
    return Gang(job, spec.gpus, submitted_s, spec.wants, PREPARE_S, spec.grace_s + FENCE_S)


Holders = Mapping[str, frozenset[str]]
"""Digest of a data set → the hosts that have it, as far as is known."""
NOBODY: Holders = MappingProxyType({})
NOWHERE: frozenset[str] = frozenset()


def gang_of(record: JobRecord, wants: Wants, holders: Holders = NOBODY) -> Gang:
    """The gang of a job, as its record stands."""
    return next(gangs_of([(record, wants)], holders))


def gangs_of(jobs: Iterable[tuple[JobRecord, Wants]], holders: Holders = NOBODY) -> Iterator[Gang]:
    """The gangs of many jobs, as their records stand."""
    for record, whole in jobs:
        gpus, wants = (1, whole.for_one) if record.rehearsal else (record.gpus, whole)
        # By position, in the order of `Gang`: a pass makes ten thousand of them.
        yield Gang(
            record.id, gpus, record.submitted_s, wants, PREPARE_S, wants.grace_s + FENCE_S, record.attempt,
            record.attempt > 0, record.avoid, record.kept, _near(wants, holders) if wants.data else NOWHERE,
        )  # fmt: skip


def _near(wants: Wants, holders: Holders) -> frozenset[str]:
    """The hosts that have all data sets of a job."""
    found = [holders.get(digest, NOWHERE) for digest in wants.data_digests]
    return frozenset.intersection(*found) if found else NOWHERE
