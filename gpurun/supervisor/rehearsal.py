"""A rehearsal: one rank runs the command on one GPU before the gang starts, for a while or until it reports a step.

On Philly, Microsoft's cluster for deep learning, about 30 % of jobs were killed or failed, most often by errors in
programs (Jeon et al. 2019, "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads"). In a
rehearsal a typo costs one GPU for a minute.
"""

from __future__ import annotations

import time
from dataclasses import replace

from gpurun.jobs.limits import is_over_limit
from gpurun.jobs.states import State
from gpurun.quantities.times import duration
from gpurun.supervisor.ends import End
from gpurun.supervisor.hang import furthest_step
from gpurun.supervisor.job import SupervisedJob

ASK_EVERY_S = 1.0


class RehearsalWatch:
    """Decides whether a rehearsal has been long enough. Does nothing for other attempts."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._asked_s = time.monotonic()

    def passed(self) -> str:
        """Return why it has been long enough; "" if it has not."""
        job = self._job
        if not job.record.rehearsal:
            return ""
        if is_over_limit(job.ran_s, job.spec.rehearse_s):
            return f"one rank ran for {duration(job.spec.rehearse_s or 0)}"
        if time.monotonic() - self._asked_s < ASK_EVERY_S:
            return ""
        self._asked_s = time.monotonic()
        return "" if (step := furthest_step(job)) is None else f"one rank reached step {step}"


def judged(end: End, gpus: int) -> End:
    """Return what the end of a rehearsal means for the job: after a success, the whole gang of `gpus` is queued."""
    if end.outcome is State.SUCCEEDED:
        reason = f"the rehearsal passed: {end.reason or 'one rank returned 0'}; the job waits for {gpus} GPUs"
        return replace(end, outcome=State.QUEUED, reason=reason, exit_code=None)
    return replace(end, reason=f"in the rehearsal on one GPU: {end.reason}") if end.outcome is State.FAILED else end
