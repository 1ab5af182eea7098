"""Copy a running gang's outputs to the head repeatedly, so that a dying host loses only the latest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpurun.errors import OUTLIVED, GpurunError, words_of
from gpurun.node.job.layer_rules import BESIDE, is_beside
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.outputs import copy_outputs
from gpurun.supervisor.outputs_listed import Unbrought

LOOKS = 12
"""After a copy, so many looks at most wait for a moment at which nothing changes."""
MOST_TOLD = 5
"""So many files are named that a restart will lack."""
REST = 4
"""After a copy that took long, this many times as long nothing is copied: training needs the network, too."""


class OutputsWatch:
    """Copies in a separate thread, which must have ended before anything else touches the outputs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job without outputs."""
        if not self._job.spec.keeps_outputs:
            return []
        return [threading.Thread(target=self._follow, name="outputs", daemon=True)]

    def _follow(self) -> None:
        every_s, keeper = self._job.spec.outputs_every_s, self._job.outputs.keeper
        told, unfit_told = "", _UnfitTold(self._job.note)
        copy_s, looks, wait_s = time.monotonic() + every_s, 0, every_s
        while not self._stop.wait(wait_s):
            began = time.monotonic()
            is_due = began >= copy_s
            try:
                unfit = copy_outputs(self._job, cancelled=self._stop.is_set, at_rest=not is_due)
                told = ""
                unfit_told.tell(unfit)
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


class _UnfitTold:
    """Says while the gang runs what stays on its host."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._told: set[str] = set()

    def tell(self, unfit: Sequence[Unbrought]) -> None:
        """Say once that some outputs stay, and of the first files beside the code, that a restart lacks them."""
        for each in unfit:
            is_ours = is_beside(each.path)
            key = each.path if is_ours else ""
            if key in self._told or len(self._told) > MOST_TOLD:
                continue
            self._told.add(key)
            if is_ours:
                name = replace(each, path=each.path[len(BESIDE) + 1 :] or BESIDE).words
                self._note(
                    f"a restarted job does not get a file that ranks wrote beside the code on {each.host}: {name}"
                )
            else:
                self._note(f"gpurun does not copy some outputs to the head while the job runs: {each.words}")
