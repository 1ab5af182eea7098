"""Find out whether a stopped Docker engine, or a host that went away, ended a gang.

Without live-restore, an engine that stops ends its containers, and the launcher then ends ranks that it started by
`docker exec`. Both look like ranks that failed by themselves, or that somebody killed. Evidence is the engine's own
process (`gpurun.node.docker.engine`): it started when the gang ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.errors import GpurunError, HostUnreachable
from gpurun.supervisor.causes import Cause
from gpurun.supervisor.job import SupervisedJob

ASK_TIMEOUT_S = 25.0
REACH_TIMEOUT_S = 5.0
BEFORE_S = 60.0
"""How long the new engine may have taken to start after the gang's end, if no supervisor watched it."""
AFTER_LAUNCHER_S = 10.0
"""How long the launcher's container may outlive the new engine's start: it ends what an engine that died has left."""
AFTER_RANK_S = 60.0
"""How long the launcher on another host may take to notice that ranks were broken off, and to explain itself."""


def stopped_engines(job: SupervisedJob, ended_s: float | None, out_s: Mapping[str, float]) -> list[Cause]:
    """Return causes for hosts that are gone or whose engine stopped under a failed gang, in rank order.

    Args:
        ended_s: when the launcher ended, on the monotonic clock; None = it has not, or that is not known.
        out_s: when a host's engine last failed to answer, on the monotonic clock.
    """
    answers, gone = _ask(job, job.members)
    now = time.monotonic()
    ended_ago_s = 0.0 if ended_s is None else now - ended_s
    causes = []
    for host in job.members:
        if host in gone:
            causes.append(Cause(now, host, "host-lost", "the host cannot be reached", gone[host].message, "host"))
            continue
        seen_out = host in out_s and now - out_s[host] <= BEFORE_S
        why = stopped(answers.get(host, {}), ended_ago_s, is_first=host == job.hosts[0], seen_out=seen_out)
        if why:
            causes.append(Cause(now, host, "engine", why, answers[host]["why"], "host"))
    return causes


def _ask(job: SupervisedJob, hosts: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], dict[str, GpurunError]]:
    """Ask hosts about their engines; also return the errors of hosts that cannot be reached."""
    gone: dict[str, GpurunError] = dict(job.links.open(hosts, timeout_s=REACH_TIMEOUT_S))
    asked = job.links.each(
        lambda agent: agent.call("gang.engine", job=job.lease.job, timeout_s=ASK_TIMEOUT_S).value,
        [host for host in hosts if host not in gone],
    )
    lost = {host: error for host, error in asked.failed.items() if isinstance(error, HostUnreachable)}
    return dict(asked.ok), gone | lost


def stopped(answer: Mapping[str, Any], ended_ago_s: float, *, is_first: bool, seen_out: bool) -> str | None:
    """Return a message about an engine that ended a gang; None if it did not. Pure.

    With live-restore, containers outlive their engine, so the engine does not explain what happens to them later.

    Args:
        answer: the answer of `gpurun.node.docker.engine.compare`.
        ended_ago_s: how long ago the launcher ended.
        is_first: it is the launcher's host.
        seen_out: it did not answer in the last minute.
    """
    if answer.get("state") == "gone":
        return "the host's Docker engine has stopped"
    if answer.get("state") != "restarted":
        return None
    outlived_s = float(answer["up_s"]) - ended_ago_s
    if outlived_s > (AFTER_LAUNCHER_S if is_first else AFTER_RANK_S) or (outlived_s < -BEFORE_S and not seen_out):
        return None
    return "the host's Docker engine stopped and started again"
