"""Decide whether a failed attempt is followed by another, and when. Pure.

gpurun restarts a job only after a host's fault, at most ``max_restarts`` times. Preemptions, and hosts that pre-flight
refuses before anything has run, do not count. A gang that is formed again restarts as often as hosts fail, unless they
fail repeatedly without progress: then the gang may cause the failures. If a job fails twice in the same way without
progress in between, the host is not at fault, and a third start would end in the same way.
"""

from __future__ import annotations

import hashlib

from gpurun.jobs.record import FirstFailure, JobRecord, Restart, Setback
from gpurun.jobs.states import State
from gpurun.supervisor.ends import End

FIRST_S = 3.0
LONGEST_S = 300.0
JITTER = 0.25
LONG_ENOUGH_S = 600.0
"""If a job's ranks do not report progress, the job counts as having made progress after this time."""

MOST_FRUITLESS = 5
"""So many attempts in a row that achieve nothing end a gang that is formed again."""

NEVER_THE_JOBS = frozenset({"host-lost", "gpu-lost", "ecc", "xid", "engine"})
"""Causes that a job does not bring about: two of them are bad luck."""


def backoff_s(job: str, restart: int) -> float:
    """Return the wait before a job's `restart`-th restart (1, 2, …): 3 s, doubled each time, at most 300 s, ± 25 %.

    The jitter depends on the job's id: always the same for a job, but different for jobs that one switch has failed.
    """
    share = int.from_bytes(hashlib.sha256(f"{job} {restart}".encode()).digest()[:4], "big") / 2**32
    plain_s = min(FIRST_S * 2.0 ** min(restart - 1, 30), LONGEST_S)
    return plain_s * (1 - JITTER + 2 * JITTER * share)


def is_worth_another(record: JobRecord, end: End, *, max_restarts: int | None) -> bool:
    """Return whether an attempt failed by a host's fault and the job may restart; `max_restarts` None = no limit."""
    is_left = max_restarts is None or record.restarts < max_restarts
    return end.outcome is State.FAILED and bool(end.suspects) and is_left


def restart_of(record: JobRecord, *, max_restarts: int | None, now_s: float) -> Restart:
    """Return the next start of a job whose attempt has failed."""
    number = record.restarts + 1
    return Restart(
        at_s=now_s + backoff_s(record.id, number),
        attempt=number + 1,
        of=None if max_restarts is None else max_restarts + 1,
    )


def setback_of(failure: FirstFailure | None, *, attempt: int, step: int | None, ran_s: float) -> Setback:
    """Return a description of a failed attempt, to compare with later ones.

    Args:
        step: the furthest step that a rank reported; None = none did.
        ran_s: how long it was RUNNING.
    """
    failure = failure or FirstFailure("")
    said = failure.reason if failure.kind in ("", "launcher") else ""
    return Setback(attempt, failure.kind, said, failure.rank, failure.exit_code, step, ran_s)


def achieved(before: Setback | None, now: Setback, *, has_saved: bool) -> bool:
    """Return whether an attempt made progress: it saved, ran for long, or came further than the one before."""
    further = now.step is not None and (before is None or before.step is None or now.step > before.step)
    return has_saved or further or now.ran_s >= LONG_ENOUGH_S


def repeats(before: Setback | None, now: Setback) -> bool:
    """Return whether an attempt failed like the one before, without progress in between."""
    if before is None or now.kind in NEVER_THE_JOBS or _way(before) != _way(now):
        return False
    if None not in (before.exit_code, now.exit_code) and before.exit_code != now.exit_code:
        return False  # the code of a container that was gone before it could be asked is not known
    if now.step is not None:
        return before.step is not None and now.step <= before.step
    return now.ran_s < LONG_ENOUGH_S


def _way(setback: Setback) -> tuple[object, ...]:
    return (setback.kind, setback.said, setback.rank)
