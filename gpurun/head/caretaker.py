"""While a command waits for jobs: replace their supervisors if they die."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gpurun.errors import GpurunError
from gpurun.head.loading import whole
from gpurun.jobs.record import State

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class Caretaker:
    """Replaces dead supervisors while a command waits; other commands do this once, when they start.

    Looks only at the jobs that the command waits for, at most every two seconds. If a new supervisor dies immediately,
    waits longer before each further try.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._due_s = time.monotonic() + FIRST_PAUSE_S

    def look(self, folders: Iterable[JobFolder]) -> None:
        """Replace the supervisors of these jobs if necessary. Quick unless it is time to look."""
        if time.monotonic() < self._due_s:
            return
        waiter = whole("gpurun.head.waiter")  # a command that waits for so long may see gpurun's files replaced
        neglected = next(filter(_is_neglected, folders), None)
        if neglected is not None:
            with suppress(GpurunError, OSError):  # damage is status's and recover's to report
                waiter.Waiter(neglected.path.home).resume()
        self._pause_s = FIRST_PAUSE_S if neglected is None else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._due_s = time.monotonic() + self._pause_s


def is_carried(folder: JobFolder) -> bool:
    """Return whether a job that holds GPUs has a live supervisor."""
    from gpurun.leases.store import LeaseStore  # noqa: PLC0415  commands that never wait load this file, too

    leases = LeaseStore(folder.path.home)
    return leases.is_alive(folder.id) or leases.is_carried(folder.id)


def _is_neglected(folder: JobFolder) -> bool:
    """Return whether this user's job needs a new supervisor to continue."""
    from gpurun.leases.look import WaiterLocks  # noqa: PLC0415  commands that never wait load this file, too

    record = folder.record()
    if record.owner_uid != os.getuid() or record.state.ended:
        return False
    if record.state is State.QUEUED:
        return not WaiterLocks(folder.path.home).lives(record.owner_uid)
    return not is_carried(folder)
