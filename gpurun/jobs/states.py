"""The states of a job and the transitions between them."""

from __future__ import annotations

from enum import Enum

from gpurun.errors import StateError


class State(str, Enum):
    """The state of a job. Values are those that ``status --json`` prints."""

    QUEUED = "QUEUED"
    """Waits for GPUs; costs a row, not a process."""
    GRANTED = "GRANTED"
    """Has a lease; its supervisor is about to take over."""
    PREPARING = "PREPARING"
    """Image, code and data go to every host of the gang."""
    STARTING = "STARTING"
    """Containers, the job's own sshd, pre-flight."""
    RUNNING = "RUNNING"
    """horovodrun runs."""
    STOPPING = "STOPPING"
    """The gang is being ended and every host fenced; the outcome is already known."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def ended(self) -> bool:
        """Return True for final states."""
        return self in ENDED

    @property
    def holds_gpus(self) -> bool:
        """True while a lease exists for the job."""
        return self in HOLDS_GPUS


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.TIMED_OUT})
HOLDS_GPUS = frozenset({State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING})

WAYS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.GRANTED, State.CANCELLED, State.FAILED}),
    State.GRANTED: frozenset({State.PREPARING, State.STOPPING, State.QUEUED}),
    State.PREPARING: frozenset({State.STARTING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.STOPPING}),
    State.STOPPING: frozenset({*ENDED, State.QUEUED}),
    **{state: frozenset() for state in ENDED},
}
"""From each state, the states that may follow. STOPPING → QUEUED is a restart or a preemption."""


def check_way(job: str, before: State, after: State) -> None:
    """Raise StateError unless `after` may follow `before`. A job may stay in a state until its outcome is decided.

    So if two supervisors run the same job (because somebody removed its lease and put it back), the second cannot
    decide another outcome.
    """
    if after is before is State.STOPPING:
        raise StateError("gpurun has already decided the outcome of the job", job=job)
    if after is not before and after not in WAYS[before]:
        raise StateError(f"the job's state cannot change from {before.value} to {after.value}", job=job)
