"""Brings a running gang's outputs to the head now and then: a first host that dies takes only the latest with it."""

from __future__ import annotations

import threading
import time

from gpurun.errors import GpurunError
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.outputs import copy_outputs, output_folders

REST = 4
"""After a copy that took long, this many times as long nothing is copied: training needs the network, too."""


class OutputsWatch:
    """Copies in a thread of its own, which must have ended before anybody else touches the outputs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop

    def threads(self) -> list[threading.Thread]:
        """Not started; none for a job without outputs."""
        if self._job.spec.outputs is None:
            return []
        return [threading.Thread(target=self._follow, name="outputs", daemon=True)]

    def _follow(self) -> None:
        wait_s, told = self._job.spec.outputs_every_s, ""
        while not self._stop.wait(wait_s):
            began = time.monotonic()
            try:
                self.look()
                told = ""
            except (GpurunError, OSError) as error:
                why = error.message if isinstance(error, GpurunError) else f"{error.strerror}: {error.filename}"
                if why != told and not self._stop.is_set():
                    self._job.note(f"the head's copy of the outputs is not up to date: {why}")
                told = why
            wait_s = max(self._job.spec.outputs_every_s, REST * (time.monotonic() - began))

    def look(self) -> None:
        """Copy what has changed, if anything has.

        Raises:
            HostFailure, OSError: there is no newer copy.
        """
        job = self._job
        folders = output_folders(job)
        now = {host: job.links.agent(host).call("files.list", path=path).value for host, path in folders}
        if now and now != job.outputs_copied:
            copy_outputs(job, folders, cancelled=self._stop.is_set)
