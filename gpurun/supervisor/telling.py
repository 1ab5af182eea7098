"""Notify a job's targets, in threads that delay neither this gang nor the next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from gpurun.errors import StateError
from gpurun.history.row import outcome_of
from gpurun.jobs.spec import NotifyEvent, NotifyWish
from gpurun.notify import NotSent, payload, send
from gpurun.supervisor.job import SupervisedJob

MOST_S = 30.0
"""How long the supervisor of an attempt that has ended waits for its messages; it has freed the GPUs before."""


def tell(job: SupervisedJob, *events: NotifyEvent, reason: str | None = None) -> list[threading.Thread]:
    """Start to notify all targets that want one of the events. Each target gets each message once.

    Args:
        reason: the reason in the message; None = the job's own.
    """
    wanted = [wish for wish in job.spec.notify if set(events) & set(wish.on)]
    if not wanted:
        return []
    record = job.record if reason is None else job.record.but(reason=reason)
    document = payload(events, record, job.spec, job.lease.members, head=os.uname().nodename, now_s=job.clock())
    threads = [
        threading.Thread(target=_tell, args=(job, wish, document), daemon=True, name="notify") for wish in wanted
    ]
    for thread in threads:
        thread.start()
    return threads


def tell_end(job: SupervisedJob) -> None:
    """Notify about the end of an attempt, and wait a little for it."""
    events = events_of(job)
    threads = tell(job, *events) if events else []
    deadline = time.monotonic() + MOST_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def events_of(job: SupervisedJob) -> Sequence[NotifyEvent]:
    """Return the events that the end of an attempt means."""
    match outcome_of(job.record):
        case "SUCCEEDED" | "CANCELLED":
            return ("end",)
        case "FAILED" | "TIMED_OUT":
            return ("end", "failure")
        case "RETRIED":
            return ("failure",)
        case "PREEMPTED":
            return ("preemption",)
    return ()


def _tell(job: SupervisedJob, wish: NotifyWish, document: dict[str, object]) -> None:
    why = ""
    try:
        send(wish, document)
    except NotSent as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - a message is never worth a job
        why = f"gpurun could not send the message: {type(error).__name__}"
    with suppress(StateError, OSError):
        job.events.emit("notify", to=wish.kind, event=document["event"], sent=not why, reason=why)
