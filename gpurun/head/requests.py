"""Request a job's cancel or requeue, and end queued jobs, which need no supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpurun.errors import NotYours
from gpurun.head.spawn import run_pass_and_start
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import CancelRequest
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore, end_queued_job
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.store import LeaseStore
from gpurun.state import audit, clock
from gpurun.state.people import user_name


def refuse_others(folder: JobFolder, command: str = "cancel", what: str = "end it") -> None:
    """Refuse users other than the job's owner and root: only they may stop or enter a job.

    Args:
        command: the command of gpurun that the owner could run.
        what: what it does to the job.

    Raises:
        NotYours: the job belongs to another user.
    """
    owner = folder.record().owner_uid
    if os.getuid() not in (owner, 0):
        raise NotYours(
            f"the job belongs to {user_name(owner)}; only the owner and root may {what}", job=folder.id,
            hint=f"ask the owner to run: gpurun {command} {folder.id}" if command != "exec"
            else "users who may use Docker on the job's hosts can run commands with `docker exec` there",
        )  # fmt: skip


def cancel(folder: JobFolder, *, by: str, reason: str, environ: Mapping[str, str]) -> None:
    """Request a job's cancel, and end the job immediately if it is queued. The caller checks permission."""
    home = folder.path.home
    folder.ask_to_cancel(CancelRequest("cancel", by=by, asked_s=clock.now_s(), reason=reason))
    audit.note(home, "cancel", job=folder.id, owner=folder.record().owner)
    end_queued(home, folder, now_s=clock.now_s(), environ=environ)


def requeue(folder: JobFolder, *, by: str) -> None:
    """Request that a job's supervisor ends the attempt and queues the job again. The caller checks permission.

    Raises:
        StateError: the request cannot be written.
    """
    reason = f"{by} put the job back into the queue"
    folder.ask_to_cancel(CancelRequest("preempt", by=by, asked_s=clock.now_s(), reason=reason))
    audit.note(folder.path.home, "requeue", job=folder.id, owner=folder.record().owner)


def end_queued(home: Path, folder: JobFolder, *, now_s: float, environ: Mapping[str, str]) -> bool:
    """End a job with a cancel request if it is queued and holds nothing. Returns True if it has ended now.

    A job with a lease has a supervisor that ends it. Runs a pass afterwards, because other jobs may have waited behind
    this one.
    """
    if folder.record().state is not State.QUEUED:
        return folder.record().state.ended
    with allocator_lock(home):
        record = folder.record()
        request = folder.cancel_request()
        leased = LeaseStore(home).path(folder.id).exists()
        if record.state is not State.QUEUED or leased or request is None:
            return record.state.ended
        end_queued_job(JobStore(home), record, request, now_s=now_s)
    EventLog(folder.events, clock=lambda: now_s).emit("state", state=State.CANCELLED.value, reason="while queued")
    run_pass_and_start(home, now_s=now_s, environ=environ)
    return True
