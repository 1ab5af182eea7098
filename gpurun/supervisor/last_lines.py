"""Copy the last output of ranks before a fence removes it from their host."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import JobRecord, unknown_spec
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.launch.docker import container_name
from gpurun.leases.lease import Lease
from gpurun.state import durable
from gpurun.supervisor.links import Links
from gpurun.supervisor.logcopy import LogCopy
from gpurun.supervisor.seating import Seating

if TYPE_CHECKING:
    from gpurun.supervisor.job import SupervisedJob

REST_S = 600.0
"""How long what ranks have printed may still be copied, while it comes; their GPUs are held meanwhile."""
ASKED_REST_S = 20.0
"""The same where a person or another gang waits for the GPUs."""
LOG_SILENT_S = 5.0
"""The containers were killed: how long its log may be silent before the fence removes what is left of it."""


def end_output(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Kill what still runs of the attempt on `hosts`, and copy the rest of its ranks' output."""
    job.follow_log(hosts)
    is_asked = job.record.outcome in (State.CANCELLED, State.QUEUED)
    _end(job.log_copy, job.links, job.lease, hosts, ASKED_REST_S if is_asked else REST_S)


def _end(log_copy: LogCopy, links: Links, lease: Lease, hosts: Collection[str], rest_s: float) -> None:
    path = f"/containers/{container_name(lease.job, lease.attempt)}/kill"
    links.each(lambda agent: agent.call("docker.request", method="POST", path=path), hosts)
    log_copy.take_rest(hosts, rest_s)


def end_late_output(folder: JobFolder, lease: Lease, links: Links, hosts: Collection[str]) -> None:
    """Do the same as `end_output`, for hosts that answer after the job's end.

    Only one process may write a log. So this does nothing if the job will run again, or has run again.

    Raises:
        StateError: the log cannot be written, or the disk failed.
    """
    try:
        record = folder.record()
    except StateUnavailable:  # it says nothing about the job, and the fence removes the lines
        raise
    except StateError:  # a person has removed the job
        return
    is_over = record.state.ended and record.attempt == lease.attempt and not lease.found
    there = sorted(host for host in hosts if links.is_open(host))
    if not there or not is_over or record.reached != "containers" or not record.granted:
        return
    job, first = lease.job, record.granted[0].host
    log_copy = LogCopy(
        links, first, job=job, attempt=lease.attempt, container=container_name(job, lease.attempt),
        path=folder.log, clock=time.time, seating=_seating(folder, record), limit=_limit(folder),
    )  # fmt: skip
    try:
        log_copy.start()
        log_copy.follow(there)
        _end(log_copy, links, lease, there, REST_S)
        if first in there:
            log_copy.wait_for_launcher(LOG_SILENT_S)
    finally:
        log_copy.close()
    durable.sync_file(folder.log)


def _limit(folder: JobFolder) -> int:
    try:
        return folder.spec().log_limit
    except StateError:
        return JobSpec.log_limit_mib << 20


def _seating(folder: JobFolder, record: JobRecord) -> Seating:
    try:
        return Seating.of(record.granted, folder.spec())
    except StateError:  # damaged: its ranks are where they began
        return Seating.of(record.granted, unknown_spec(record))
