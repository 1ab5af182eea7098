"""Jobs as the scheduler sees them: one place that turns what a job wants and its record into a gang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

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
        servers=_servers(wants)[0],
        server_hosts=_servers(wants)[1],
    )


Holders = Mapping[str, frozenset[str]]
"""Digest of a data set → the hosts that have it, as far as is known."""
NOBODY: Holders = MappingProxyType({})


def gang_of(record: JobRecord, wants: Wants, holders: Holders = NOBODY) -> Gang:
    """The gang of a job, as its record stands."""
    return next(gangs_of([(record, wants)], holders))


def gangs_of(jobs: Iterable[tuple[JobRecord, Wants]], holders: Holders = NOBODY) -> Iterator[Gang]:
    """The gangs of many jobs, as their records stand."""
    for record, whole in jobs:
        wants = whole.rehearsal if record.rehearsal else whole
        # By position, in the order of `Gang`: a pass makes ten thousand of them.
        yield Gang(
            record.id, wants.gpus, record.submitted_s, wants.min_gpus, wants.constraints, wants.pool, wants.priority,
            wants.preemptible, wants.time_limit_s, PREPARE_S, wants.grace_s + FENCE_S, record.attempt,
            record.attempt > 0, record.avoid, record.kept, *_servers(wants),
            _near(wants.data_digests, holders),
        )  # fmt: skip


def _servers(wants: Wants) -> tuple[int, tuple[str, ...]]:
    """How many ranks run on hosts without GPUs, and which hosts those may be."""
    roles = wants.roles
    return (roles.ps, roles.ps_hosts) if roles is not None and roles.ps_hosts else (0, ())


def _near(digests: tuple[str, ...], holders: Holders) -> frozenset[str]:
    """The hosts that have all of some data sets."""
    if not digests:
        return frozenset()
    return frozenset.intersection(*(holders.get(digest, frozenset()) for digest in digests))
