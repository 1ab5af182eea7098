"""A gang that hangs: no rank has printed a line, told of progress or used its GPU for a while.

NCCL ranks whose peer died can spin at full GPU load for ever (Horovod issues 3611 and 777), so GPU use counts as
life only if the person says nothing better is to be had: a gang that reports progress by `gpurun.runtime` is judged by
that alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpurun.supervisor.job import SupervisedJob

BUSY_PERCENT = 5


class HangWatch:
    """Judges now and then whether a gang is still alive; asks its hosts only when the log has been silent."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._limit_s = job.spec.hang_timeout_s
        self._busy_s = time.monotonic()
        self._asked_s = time.monotonic()

    def hung(self, silent_s: float) -> str | None:
        """Why the gang counts as hung, or None.

        Args:
            silent_s: seconds since its last line.
        """
        limit = self._limit_s
        if limit is None or silent_s < limit or time.monotonic() - self._asked_s < min(limit / 4, 30.0):
            return None
        self._asked_s = time.monotonic()
        told = self._job.links.each(lambda agent: agent.call("gang.progress", job=self._job.lease.job).value).ok
        ages = [said["age_s"] for said in told.values() if said["age_s"] is not None]
        if ages and min(ages) < limit:
            return None
        if not ages and self._is_busy():
            self._busy_s = time.monotonic()
        if not ages and time.monotonic() - self._busy_s < limit:
            return None
        return f"no rank has printed, told of progress or used its GPU for {limit:g} s{_furthest_behind(told)}"

    def _is_busy(self) -> bool:
        """Whether any GPU of the gang is in use; False where NVML does not say."""
        gpus = {grant.host: set(grant.gpus) for grant in self._job.lease.grants}

        def sample(host: str) -> bool:
            for reply in self._job.links.agent(host).stream("probe.sample", interval_s=1.0):
                used = [
                    gpu.get("utilization_percent") or 0 for gpu in reply.value["gpus"] if gpu["index"] in gpus[host]
                ]
                return max(used, default=0) >= BUSY_PERCENT
            return False

        return any(self._job.links.each(lambda agent: sample(agent.host)).ok.values())


def furthest_step(job: SupervisedJob) -> int | None:
    """The furthest step that a rank has told of, on the hosts that answer; None if none has."""
    hosts = [host for host in job.hosts if job.links.is_open(host)]
    told = job.links.each(lambda agent: agent.call("gang.progress", job=job.lease.job, timeout_s=5.0).value, hosts)
    return max((step for step, _, _ in _steps(told.ok)), default=None)


def _furthest_behind(told: Mapping[str, Any]) -> str:
    """Which rank stopped first, if ranks told of their steps."""
    steps = _steps(told)
    if not steps:
        return ""
    step, rank, host = min(steps)
    return f"; rank {rank} on {host} is furthest behind, at step {step}"


def _steps(told: Mapping[str, Any]) -> set[tuple[int, int, str]]:
    """(step, rank, host) of every rank that told of its step. What ranks write is the user's, and may be anything."""
    found = set()
    for host, said in told.items():
        for rank, files in said["ranks"].items():
            progress = files.get("progress")
            step = progress.get("step") if isinstance(progress, dict) else None
            if isinstance(step, int) and not isinstance(step, bool):
                found.add((step, int(rank), host))
    return found
