"""Let an elastic gang grow that cannot add hosts while it runs: stop it and start it again with more GPUs.

gpurun stops it as for a preemption: its ranks get SIGTERM and the grace period to save, and it is queued in front of
its peers. That costs the work since the last checkpoint, and a start. So gpurun does it only for a program that has
reported a checkpoint, and not soon after a start.
"""

from __future__ import annotations

import os
import threading
import time

from gpurun.errors import OUTLIVED, words_of
from gpurun.head.looks import look_while_growing
from gpurun.jobs.record import CancelRequest
from gpurun.leases.members import larger
from gpurun.quantities.counts import count
from gpurun.supervisor.job import SupervisedJob

LOOK_S = 5.0


class GrowsAnew:
    """Looks for more GPUs for a gang that has fewer than it wants. Does nothing for other gangs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._begun_s = time.monotonic()

    def threads(self) -> list[threading.Thread]:
        """Return the looking thread, not started; none for a gang that has all its GPUs, or can add hosts while it
        runs.
        """
        job = self._job
        if not job.spec.reforms or job.spec.gpus >= job.record.gpus or job.record.rehearsal:
            return []
        job.note(f"the job has {job.spec.gpus} of {job.record.gpus} GPUs, on {', '.join(job.members)}")
        return [threading.Thread(target=self._look, name="growth", daemon=True)]

    def _look(self) -> None:
        told = ""
        while not self._stop.wait(LOOK_S):
            try:
                if self._is_time() and self._ask():
                    return
                told = ""
            except OUTLIVED as error:  # for example a damaged lease: tried again, reported once
                if (why := words_of(error)) != told:
                    self._job.note(f"the job cannot get more GPUs yet: {why}")
                told = why

    def _is_time(self) -> bool:
        """Return whether the gang has run for a while, and would lose little work."""
        record = self._job.record
        return record.has_saved and time.monotonic() - self._begun_s >= patience_s(record.restarts)

    def _ask(self) -> bool:
        job = self._job
        if job.folder.cancel_request() is not None:
            return False
        job.load_inventory_again()
        found = larger(job.home, job.lease, job.inventory, now_s=job.clock())
        if found is None:
            look_while_growing(job.home, os.environ, job.inventory)
            return False
        job.amend(avoid=tuple(host for host in job.record.avoid if host not in found.hosts))
        reason = f"gpurun starts the job again with {count(found.gpus, 'GPU')}, on {', '.join(found.hosts)}"
        job.folder.ask_to_cancel(CancelRequest("preempt", by="its growth", asked_s=job.clock(), reason=reason))
        return True


def patience_s(restarts: int) -> float:
    """Return how long a gang runs before it stops to grow: a minute, doubled with each host's fault, at most an hour.

    So a host that comes back and fails again costs the gang less each time.
    """
    return min(60.0 * 2.0 ** min(max(restarts - 1, 0), 30), 3600.0)
