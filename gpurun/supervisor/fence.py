"""The fence: check on every host of a lease that nothing of its attempt is left. Only then its GPUs become free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpurun.doctor.findings import one_line
from gpurun.doctor.hooks import limit_s
from gpurun.errors import GpurunError, HostFailure
from gpurun.leases.lease import Lease
from gpurun.remote.agent import Agent
from gpurun.supervisor.hooks import epilog_of
from gpurun.supervisor.host_claims import claimant_of
from gpurun.supervisor.links import Links

FENCE_TIMEOUT_S = 60.0


def fence(
    links: Links, lease: Lease, hosts: Iterable[str], *, state: str, containers: bool = True, outputs: bool = False,
    said: Callable[[str, str], object] = lambda *_: None,
) -> Mapping[str, GpurunError]:  # fmt: skip
    """Fence `hosts` of a lease; return the hosts where the fence failed, with the reasons.

    Also removes what earlier attempts left. Keeps what belongs to a later attempt.

    Args:
        state: the id of the state directory: the hosts release the attempt's claims last.
        containers: there may be containers, so Docker must answer, and no process may use the lease's GPUs.
        outputs: remove the outputs of the attempt, too.
        said: called with each host whose epilog failed, and why. That keeps no GPU.
    """
    gpus = {grant.host: list(grant.gpus) for grant in lease.grants}
    claimant = claimant_of(lease, state)._asdict()

    def ask(agent: Agent) -> dict[str, Any]:
        program = links.epilogs.get(agent.host)
        more: dict[str, Any] = {"epilog": epilog_of(lease, agent.host, program)} if program else {}
        reply = agent.call(
            "gang.fence", job=lease.job, attempt=lease.attempt, containers=containers, outputs=outputs,
            gpus=gpus[agent.host] if containers else None, claimant=claimant,
            timeout_s=FENCE_TIMEOUT_S + (limit_s() if program else 0), **more,
        )  # fmt: skip
        return {**reply.value}

    results = links.each(ask, sorted(hosts))
    unproven: dict[str, GpurunError] = dict(results.failed)
    for host, rest in results.ok.items():
        if why := rest.pop("epilog", ""):
            said(host, one_line(why))
        if any(rest.values()):
            unproven[host] = HostFailure(what_is_left(rest), host=host)
    return unproven


def what_is_left(rest: Mapping[str, Any]) -> str:
    """Describe why a fence failed, from the answer of `gpurun.node.job.fence.fence`."""
    left = [
        f"GPU {one['gpu']} is held by pid {one['pid']} of {one['user'] or 'an unknown user'}"
        f"{', container ' + one['container'] if one['container'] else ''} ({one['command'][:120] or 'no command line'})"
        for one in rest["users"]
    ]
    if rest["gpu_problem"]:
        left.append(rest["gpu_problem"])
    left += [f"container {ident[:12]} still exists" for ident in rest["containers"]]
    left += [f"process {command[:120]!r} still runs" for command in rest["processes"]]
    if rest["folder"]:
        left.append("the job's folder still exists")
    left += [f"the claim {name}, which reserves a GPU on the host, still exists" for name in rest["claims"]]
    return "; ".join(left)
