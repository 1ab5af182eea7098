"""Limit the cores of jobs that share this host, and only while they do.

Each container of gpurun has a label with the cores of its share. The watch of each job (`gpurun.node.job.health`)
looks every few seconds which containers run here. While there are several, each has its share as a quota; a container
that is alone has none, so that idle cores are used. A quota depends only on what runs now: after a crash, the next look
of any job corrects what another one left.
"""

import json
import urllib.parse
from typing import Any, Dict, FrozenSet, List, Optional

from gpurun.node import docker
from gpurun.node.agent.call import Call, OpError
from gpurun.node.docker import job_containers
from gpurun.node.gpu.claim_rules import CPUS_LABEL, EVENLY

PERIOD_US = 100_000
"""The kernel's own default (``cpu.cfs_period_us``)."""
MOST_LOOKS = 5
"""How often `settle` starts anew because containers have come or gone meanwhile."""
CHECK_EVERY = 15
"""At every look of so many, the quotas are read again: the agent of another job may have written one late."""
MOST_REFUSALS = 3
"""After so many failures in a row, only those looks ask the engine: perhaps it can set no quota at all."""


class Neighbours:
    """Remembers which containers ran at the last look."""

    def __init__(self) -> None:
        self._before: Optional[FrozenSet[str]] = None
        self._looks = self._refusals = 0

    def look(self, call: Call) -> None:
        """Give each container its quota, if containers have come or gone since the last look, or a check is due.

        An engine that does not answer, or that can set no quota, is not this job's failure: the weights remain.
        """
        self._looks += 1
        if self._looks % CHECK_EVERY == 0:
            self._before = None
        elif self._refusals >= MOST_REFUSALS:
            return
        try:
            connection = docker.connect(call, timeout_s=20.0)
            try:
                self._before = settle(connection, self._before)
            finally:
                connection.close()
            self._refusals = 0
        except (OpError, OSError, ValueError):
            self._before = None
            self._refusals += 1


def settle(connection: docker.Connection, before: Optional[FrozenSet[str]] = None) -> FrozenSet[str]:
    """Give each running container of gpurun its quota: its share if there are several, none if it is alone.

    Looks again afterwards: if two agents do this while containers come and go, the last of them sees the truth.

    Args:
        before: the containers of an earlier look: if they still are the ones that run, nothing is done.

    Returns:
        The containers that run.

    Raises:
        OpError: Docker does not say, or refused a quota; all others are set.
    """
    for _ in range(MOST_LOOKS):
        found = _running(connection)
        now = frozenset(str(each["Id"]) for each in found)
        if now == before:
            break
        refused: Optional[OpError] = None
        for each in found:
            wanted = _quota_us(each.get("Labels"), len(found))
            if wanted is not None:
                try:
                    _set_quota(connection, str(each["Id"]), wanted if len(found) > 1 else None)
                except OpError as error:
                    refused = error
        if refused is not None:
            raise refused
        before = now
    return now


def _running(connection: docker.Connection) -> List[Dict[str, Any]]:
    filters = urllib.parse.quote(json.dumps({"label": ["gpurun.job"]}))
    status, answer = docker.exchange(connection, "GET", "/containers/json?filters=" + filters)
    found = docker.parse(answer)
    if status != 200 or not isinstance(found, list):
        raise docker.failure(status, answer, "listing the containers of jobs")
    return job_containers.of_jobs(found, lambda path: docker.exchange(connection, "GET", path))


def _quota_us(labels: Any, running: int) -> Optional[int]:
    """Return the quota in a container's labels, which may contain anything; None if there is none.

    What is divided evenly by those that run is one core at least: less would slow a job down more than it protects
    another.
    """
    text = str(labels.get(CPUS_LABEL) if isinstance(labels, dict) else None)[:12]
    is_even = text.endswith(EVENLY)
    try:
        cpus = float(text[: -len(EVENLY)] if is_even else text)
    except ValueError:
        return None
    if not 0.01 <= cpus <= 100_000:
        return None
    return int((max(1.0, cpus / running) if is_even else cpus) * PERIOD_US)


def _set_quota(connection: docker.Connection, container: str, quota_us: Optional[int]) -> None:
    """Set the quota, or none, if it is another one now. A container that has ended needs none.

    Raises:
        OpError: Docker refused it.
    """
    status, answer = docker.exchange(connection, "GET", "/containers/%s/json" % docker.checked_name(container))
    found = docker.parse(answer) if status == 200 else None
    if not isinstance(found, dict):
        return
    has = found.get("HostConfig", {}).get("CpuQuota") or -1
    wanted = -1 if quota_us is None else quota_us
    if has != wanted:
        body = {"CpuPeriod": PERIOD_US, "CpuQuota": wanted}
        path = "/containers/%s/update" % docker.checked_name(container)
        status, answer = docker.exchange(connection, "POST", path, body)
        if status >= 300 and status != 404:
            raise docker.failure(status, answer, "setting a quota of cores")
