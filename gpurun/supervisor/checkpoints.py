"""Record when a gang last saved its work, as its ranks report (`gpurun.runtime.checkpointed`).

A pass that can preempt one of several gangs prefers the gang that saved last.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from gpurun.errors import OUTLIVED
from gpurun.supervisor.job import SupervisedJob

EVERY_S = 20.0
ASK_TIMEOUT_S = 10.0
TOLD_S = 2.0
"""An age travels and is rounded: a checkpoint that seems newer by less is the one already known."""


class CheckpointWatch:
    """Asks the gang's hosts in a separate thread; only the main loop writes the job's record."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._saved_s: float | None = None

    def thread(self) -> threading.Thread:
        """Return the thread, not started."""
        return threading.Thread(target=self._follow, name="checkpoints", daemon=True)

    def keep(self) -> None:
        """Write a checkpoint into the job's record if it is newer."""
        saved_s, known_s = self._saved_s, self._job.record.checkpoint_s
        if saved_s is not None and (known_s is None or saved_s > known_s + TOLD_S):
            self._job.amend(checkpoint_s=saved_s)

    def look(self) -> None:
        """Ask every host that answers. The report of one rank is enough."""
        hosts = [host for host in self._job.hosts if self._job.links.is_open(host)]
        told = self._job.links.each(
            lambda agent: agent.call("gang.progress", job=self._job.lease.job, timeout_s=ASK_TIMEOUT_S).value, hosts
        )
        ages = [said["checkpoint_age_s"] for said in told.ok.values() if said["checkpoint_age_s"] is not None]
        if ages:
            self._saved_s = self._job.clock() - max(0.0, min(ages))

    def _follow(self) -> None:
        while not self._stop.wait(EVERY_S):
            with suppress(*OUTLIVED):  # the head has no thread for a moment
                self.look()
