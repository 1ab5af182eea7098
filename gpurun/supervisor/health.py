"""Watch the hardware under a running gang: one stream per host reports causes.

`gpurun.supervisor.watch` handles hosts that cannot be reached. This module only waits until such a host is back, and
then asks for what it missed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gpurun.errors import OUTLIVED
from gpurun.remote.agent import BAD_ANSWER, RemoteOpFailed
from gpurun.supervisor.causes import Cause, cause_of, first_cause
from gpurun.supervisor.gpu_use import GpuUseMeter
from gpurun.supervisor.job import SupervisedJob

RETRY_S = 1.0
RECENT_TIMEOUT_S = 5.0
NEVER_RAN_S = 60.0
MOST_ALIKE = 5
"""An Xid can occur a thousand times a second; the first ones have all the information."""
FOR_GOOD = ("unknown-op", "bad-request", "internal", BAD_ANSWER)
"""Failures of the watch that a retry would not fix. A Docker that restarts is not among them."""


class HealthWatch:
    """Failures that the gang's hosts report. Separate threads write, the main loop reads."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._causes: list[Cause] = []
        self._told: set[tuple[str, str]] = set()
        self._alike: Counter[tuple[str, str, int | None]] = Counter()
        self._containers: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._use = GpuUseMeter(job)

    def threads(self, hosts: Iterable[str]) -> list[threading.Thread]:
        """Return a thread for each of these hosts, not started. It ends when the host leaves the gang."""
        return [
            threading.Thread(target=self._follow, args=(host,), name=f"health {host}", daemon=True) for host in hosts
        ]

    def fatal(self) -> Cause | None:
        """Return the first failure that the gang cannot survive, on one of its present hosts."""
        with self._lock:
            fatal = [cause for cause in self._causes if cause.fatal and cause.host in self._job.members]
            return min(fatal, key=lambda cause: cause.at_s, default=None)

    def forget(self, hosts: Collection[str]) -> None:
        """Forget failures of hosts that have left, because they do not count if the hosts come back."""
        with self._lock:
            self._causes = [cause for cause in self._causes if cause.host not in hosts]

    def first(self, lines: list[str]) -> Cause | None:
        """Return the cause of an attempt that has just failed, after one more look at every host that answers."""
        hosts = [host for host in self._job.members if self._job.links.is_open(host)]
        age_s = self._age_s()
        looked = self._job.links.each(
            lambda agent: (
                agent.call("health.recent", job=self._job.lease.job, age_s=age_s, timeout_s=RECENT_TIMEOUT_S).value
            ),
            hosts,
        )
        for host, found in looked.ok.items():
            self._take(host, found)
        with self._lock:
            return first_cause(tuple(self._causes), lines)

    def close(self) -> None:
        """Store how busy the GPUs were."""
        self._use.write()

    def _follow(self, host: str) -> None:
        gpus = next(list(grant.gpus) for grant in self._job.lease.grants if grant.host == host)
        while not self._stop.is_set() and host in self._job.members:
            try:
                agent = self._job.links.agent(host)
                self._ask_containers(host)
                with agent.stream("health.watch", job=self._job.lease.job, gpus=gpus, age_s=self._age_s()) as stream:
                    for reply in stream:
                        self._take(host, reply.value or [])
                        if self._stop.is_set():
                            return
            except RemoteOpFailed as error:
                if error.kind in FOR_GOOD:
                    self._job.note(f"gpurun cannot watch the hardware of {host}: {error.message}")
                    return
                self._stop.wait(RETRY_S)
            except OUTLIVED:  # the head's own failures, too: nothing else would begin the watch again
                self._stop.wait(RETRY_S)

    def _ask_containers(self, host: str) -> None:
        found = self._job.links.agent(host).call("gang.inspect", job=self._job.lease.job).value
        self._containers[host] = tuple(one["id"] for one in found)

    def _age_s(self) -> float:
        """Return how long the attempt has run."""
        ran_s = self._job.ran_s
        return NEVER_RAN_S if ran_s is None else max(1.0, ran_s)

    def _take(self, host: str, items: list[Mapping[str, Any]]) -> None:
        for item in items:
            if item["kind"] == "use":
                self._use.add(host, item)
                continue
            if item["kind"] == "nvml":
                self._job.note(f"{host}: {item['text']}")
                continue
            containers = self._containers.get(host, ())
            mine = self._of_own_rank(item, host)
            cause = cause_of(mine, host, self._job.lease.grants, containers, time.monotonic())
            if cause is None:
                continue
            with self._lock:
                alike = (host, cause.text, cause.gpu)
                if (host, cause.evidence) in self._told or self._alike[alike] >= MOST_ALIKE:
                    continue
                self._told.add((host, cause.evidence))
                self._alike[alike] += 1
                self._causes.append(cause)
            self._job.events.emit("host", host=host, state=cause.kind, reason=cause.reason, evidence=cause.evidence)

    def _of_own_rank(self, item: Mapping[str, Any], host: str) -> Mapping[str, Any]:
        rank = item.get("rank")
        return item if rank is None or self._job.seating.has(host, rank) else {**item, "rank": None}
