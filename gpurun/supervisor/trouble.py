"""Find out why a job's supervisor cannot write the job's record."""

from __future__ import annotations

import os

from gpurun.errors import StateError
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import JobRecord
from gpurun.jobs.states import State
from gpurun.leases.store import LeaseStore
from gpurun.state.people import has_account

TAIL_BYTES = 4096
CARRIED = (State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING)


def supervisor_trouble(folder: JobFolder, record: JobRecord, leases: LeaseStore) -> str | None:
    """Return why a job with GPUs makes no progress: its supervisor's last error, or that there is no supervisor.

    The error counts only if it is newer than the job's last event.
    """
    if record.state not in CARRIED:
        return None
    last = _last_words(folder)
    if last:
        what = "could not start" if record.state is State.GRANTED else "has trouble"
        return f"the job's supervisor {what}: {last}"
    if record.state is not State.STOPPING and not leases.is_alive(record.id):
        if not has_account(record.owner_uid):
            return (
                "the job has no supervisor, and its owner has no account; root can free the GPUs: `gpurun "
                f"cancel {record.id}`"
            )
        return f"the job has no supervisor; the next gpurun command of {record.owner} starts a supervisor"
    return None


def _last_words(folder: JobFolder) -> str:
    """Return the last line of the supervisor's log, if nothing has happened after it."""
    try:
        with folder.supervisor_log.reader() as stream:
            found = os.fstat(stream.fileno())
            stream.seek(max(0, found.st_size - TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except (OSError, StateError):
        return ""
    try:
        if folder.events.stat().st_mtime_ns > found.st_mtime_ns:
            return ""
    except FileNotFoundError:
        pass
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
