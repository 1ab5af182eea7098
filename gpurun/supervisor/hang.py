"""Detect a hanging gang: no rank has printed a line, reported progress or used its GPU for a while.

Only what the head can hear counts. While a host does not answer, its ranks may print and compute, so the time starts
when all hosts answer again.

NCCL ranks whose peer died can spin at full GPU load for ever (Horovod issues 3611 and 777). So GPU use counts as a sign
of life only if there is nothing better: for a gang that reports progress by `gpurun.runtime`, only progress counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpurun.quantities.times import duration
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.seating import Seating

BUSY_PERCENT = 5


class HangWatch:
    """Checks repeatedly whether a gang hangs. Asks its hosts only if the log has been silent."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._limit_s = job.spec.hang_timeout_s
        self._heard_s = self._busy_s = self._asked_s = time.monotonic()

    def hung(self, silent_s: float, *, is_heard: bool = True) -> str | None:
        """Return why the gang counts as hung; None if it does not.

        Args:
            silent_s: seconds since its last line.
            is_heard: all its hosts can be reached.
        """
        limit = self._limit_s
        if not is_heard:
            self._not_heard()
        silent_s = min(silent_s, time.monotonic() - self._heard_s)
        if limit is None or silent_s < limit or time.monotonic() - self._asked_s < min(limit / 4, 30.0):
            return None
        self._asked_s = time.monotonic()
        said = self._job.links.each(lambda agent: agent.call("gang.progress", job=self._job.lease.job).value)
        if not _all_answered(said):
            self._not_heard()
            return None
        ages = [one["age_s"] for one in said.ok.values() if one["age_s"] is not None]
        if min(ages) < limit if ages else not self._is_idle(limit):
            return None
        behind = _furthest_behind(said.ok, self._job.seating)
        return f"no rank has printed, reported progress or used its GPU for {duration(limit)}{behind}"

    def _not_heard(self) -> None:
        self._heard_s = self._busy_s = time.monotonic()

    def _is_idle(self, limit_s: float) -> bool:
        """Return whether no GPU was in use for this long, and every host can be asked."""
        is_busy = self._is_busy()
        if is_busy is None:
            self._not_heard()
        elif is_busy:
            self._busy_s = time.monotonic()
        return is_busy is False and time.monotonic() - self._busy_s >= limit_s

    def _is_busy(self) -> bool | None:
        """Return whether any GPU of the gang is in use; False if NVML does not say, None if a host does not answer."""
        gpus = {grant.host: set(grant.gpus) for grant in self._job.lease.grants}

        def sample(host: str) -> bool:
            for reply in self._job.links.agent(host).stream("probe.sample", interval_s=1.0):
                used = [
                    gpu.get("utilization_percent") or 0 for gpu in reply.value["gpus"] if gpu["index"] in gpus[host]
                ]
                return max(used, default=0) >= BUSY_PERCENT
            return False

        said = self._job.links.each(lambda agent: sample(agent.host))
        return any(said.ok.values()) or (False if _all_answered(said) else None)


def _all_answered(said: Results[Any]) -> bool:
    """Return whether every host answered, even if it does not know."""
    return all(isinstance(error, RemoteOpFailed) for error in said.failed.values())


def furthest_step(job: SupervisedJob) -> int | None:
    """Return the furthest step that a rank has reported, on the hosts that answer; None if none has."""
    hosts = [host for host in job.hosts if job.links.is_open(host)]
    told = job.links.each(lambda agent: agent.call("gang.progress", job=job.lease.job, timeout_s=5.0).value, hosts)
    return max((step for step, _, _ in _steps(told.ok, job.seating)), default=None)


def _furthest_behind(told: Mapping[str, Any], seating: Seating) -> str:
    """Return which rank stopped first, if ranks reported their steps."""
    steps = _steps(told, seating)
    if not steps:
        return ""
    step, rank, host = min(steps)
    return f"; rank {rank} on {host} is furthest behind, at step {step}"


def _steps(told: Mapping[str, Any], seating: Seating) -> set[tuple[int, int, str]]:
    """Return (step, rank, host) of every rank that reported its step. The user's program writes it, so it may be
    anything.
    """
    found = set()
    for host, said in told.items():
        for rank, files in seating.own(host, said["ranks"]):
            progress = files.get("progress")
            step = progress.get("step") if isinstance(progress, dict) else None
            if isinstance(step, int) and not isinstance(step, bool):
                found.add((step, rank, host))
    return found
