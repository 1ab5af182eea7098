"""Compute when a time limit ends a job, and when the job's GPUs are then free. Pure.

The supervisor, the scheduler and `gpurun why` all use this one definition.
"""

from __future__ import annotations

PREPARE_S = 60.0
"""Estimate: seconds from the grant to RUNNING. A job that ships a large image takes longer."""

FENCE_S = 15.0
"""Estimate: seconds from the end of the last rank to the end of the fence. A host out of reach takes longer."""


def limit_ends_s(running_s: float | None, limit_s: float | None) -> float | None:
    """Return when the time limit ends an attempt. The limit counts from RUNNING.

    Args:
        running_s: when the attempt entered RUNNING; None = it has not.
        limit_s: the job's time limit; None = it has none.
    """
    return None if running_s is None or limit_s is None else running_s + limit_s


def is_over_limit(ran_s: float | None, limit_s: float | None) -> bool:
    """Return True if the time limit ends the attempt now.

    Args:
        ran_s: seconds in RUNNING, which no step of the head's clock changes; None = it has not entered RUNNING.
        limit_s: the job's time limit; None = it has none.
    """
    return ran_s is not None and limit_s is not None and ran_s > limit_s
