"""Copy a running gang's outputs to the head repeatedly, so that a dying host loses only the latest."""

from __future__ import annotations

import threading
import time

from gpurun.errors import OUTLIVED, GpurunError, words_of
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.outputs import copy_outputs

LOOKS = 12
"""After a copy, so many looks at most wait for a moment at which nothing changes."""
REST = 4
"""After a copy that took long, this many times as long nothing is copied: training needs the network, too."""


class OutputsWatch:
    """Copies in a separate thread, which must have ended before anything else touches the outputs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job without outputs."""
        if self._job.spec.outputs is None:
            return []
        return [threading.Thread(target=self._follow, name="outputs", daemon=True)]

    def _follow(self) -> None:
        every_s, keeper = self._job.spec.outputs_every_s, self._job.outputs.keeper
        told, has_told_of_room = "", False
        copy_s, looks, wait_s = time.monotonic() + every_s, 0, every_s
        while not self._stop.wait(wait_s):
            began = time.monotonic()
            is_due = began >= copy_s
            try:
                unfit = copy_outputs(self._job, cancelled=self._stop.is_set, at_rest=not is_due)
                told = ""
                if unfit and not has_told_of_room:
                    self._job.note(f"some outputs stay on their hosts while the gang runs: {unfit[0].words}")
                    has_told_of_room = True
            except OUTLIVED as error:
                why = error.message if isinstance(error, GpurunError) else words_of(error)
                if why != told and not self._stop.is_set():
                    self._job.note(f"the head's copy of the outputs is not up to date: {why}")
                told = why
            for text in keeper.notes():
                self._job.note(text)
            now = time.monotonic()
            rest_s = REST * (now - began)
            if is_due:
                copy_s, looks = now + max(every_s, rest_s), 0
            wait_s = copy_s - now
            if (look_s := keeper.next_look_s) is not None and looks < LOOKS:
                looks += 1
                wait_s = min(wait_s, max(look_s, rest_s) if look_s else 0.0)
            wait_s = max(0.0, wait_s)
