"""The waiting jobs, in the order in which they would start, with the present reasons."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpurun.jobs.record import JobRecord
from gpurun.leases import allocate
from gpurun.leases.allocate import Pass
from gpurun.scheduler.explain import places
from gpurun.scheduler.model import Decisions
from gpurun.state import clock
from gpurun.views.picture import WaitingJob


def look_ahead(home: Path, knower: int | None = None) -> Pass:
    """Return the decisions that a pass would make now, without changes.

    Args:
        knower: the uid of the user whose knowledge of machines counts, such as the owner of a job; None = this user.
    """
    return allocate.Allocator(home).look_ahead(now_s=clock.now_s(), knower=knower)


def why_it_waits(home: Path, job: str) -> str:
    """Why one job waits; "" if it has started or waits to be restarted.

    Raises:
        StateError: a lease is damaged, so gpurun cannot know which GPUs are free.
    """
    looked = look_ahead(home)
    found = (decided(each, job) for each in looked.decisions.values() if job in each.order)
    return next(found, looked.left_out.get(job, ""))


def waiting_jobs(looked: Pass, records: Iterable[JobRecord], inventory: str | None = None) -> list[WaitingJob]:
    """Return the waiting jobs, in the order of the pass.

    Args:
        records: records of the jobs that have not ended.
        inventory: only jobs of this inventory, with links resolved; None = of all inventories.
    """
    by_id = {record.id: record for record in records}
    now_s = clock.now_s()
    rows: list[WaitingJob] = []
    for path, decisions in looked.decisions.items():
        if inventory not in (None, path):
            continue
        position = places(decisions)
        for job in decisions.order:
            if (record := by_id.get(job)) is not None:  # otherwise it has just ended
                wait = decisions.waits.get(job)
                start_s = wait.expected_start_s if wait else None
                rows.append(_row(record, path, position.get(job), decided(decisions, job), start_s, now_s))
    for record in by_id.values():
        if inventory not in (None, os.path.realpath(record.inventory)):
            continue
        if (why := looked.left_out.get(record.id)) is not None:
            rows.append(_row(record, record.inventory, None, why, None, now_s))
        elif record.waits_for_restart(now_s):  # no pass includes it yet, because it has just failed
            at_s = record.restart.at_s if record.restart else None
            rows.append(_row(record, record.inventory, None, record.story(now_s), at_s, now_s))
    return rows


def decided(decisions: Decisions, job: str) -> str:
    """Return why a job waits, in one sentence."""
    said = decisions.waits.get(job) or decisions.never.get(job)
    return said.message if said else "starts now"


def reasons_of(rows: Iterable[WaitingJob]) -> Mapping[str, str]:
    """Return job → why it waits."""
    return {row.job: row.message for row in rows}


def _row(
    record: JobRecord, inventory: str, position: int | None, message: str, start_s: float | None, now_s: float
) -> WaitingJob:
    return WaitingJob(
        record.id, record.name, record.owner, record.gpus, position, record.pool, record.priority, inventory,
        round(now_s - record.queued_s, 1), message, start_s,
    )  # fmt: skip
