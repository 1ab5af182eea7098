"""A gang's claims on its hosts. If a host refuses a claim, the gang waits, and no host is blamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpurun.errors import GpurunError, HostNotReady
from gpurun.facts import claims as facts
from gpurun.jobs.record import GpuHolder
from gpurun.jobs.spec import MOST_GPUS
from gpurun.jobs.states import State
from gpurun.launch.plan import cards
from gpurun.leases.lease import Lease
from gpurun.node.gpu.claim_rules import Claimant
from gpurun.quantities.counts import plural
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.ends import End

if TYPE_CHECKING:
    from gpurun.supervisor.job import SupervisedJob

TIMEOUT_S = 60.0


def claimant_of(lease: Lease, state: str) -> Claimant:
    """Return the claimant of a lease's GPUs.

    Args:
        state: the id of the lease's state directory.
    """
    return Claimant(lease.job, lease.attempt, state, lease.owner, lease.owner_uid, os.uname().nodename)


def claim_of(job: SupervisedJob, host: str) -> dict[str, Any]:
    """Return the arguments for `gpurun.node.job.claims.take_here` on a host."""
    (grant,) = (grant for grant in job.lease.grants if grant.host == host)
    return {"claimant": job.claimant._asdict(), "cards": cards(grant, job.hardware.get(host))}


def claim(job: SupervisedJob, hosts: Iterable[str]) -> Mapping[str, GpurunError]:
    """Claim the gang's GPUs on probed hosts, before gpurun sends anything large there. Idempotent.

    Returns:
        The hosts that failed or refused.
    """
    results = job.links.each(
        lambda agent: agent.call("claims.take", timeout_s=TIMEOUT_S, **claim_of(job, agent.host)), hosts
    )
    report_refusals(job, refusals_in(results.failed))
    return results.failed


def report_refusals(job: SupervisedJob, refused: Mapping[str, tuple[GpuHolder, ...]]) -> None:
    """Write an event for each holder of GPUs that a host refused."""
    for host, holders in refused.items():
        for holder in holders:
            job.events.emit("host", host=host, state="refused", reason=_held(holder))


def refusals_in(failures: Mapping[str, GpurunError]) -> Mapping[str, tuple[GpuHolder, ...]]:
    """Return host → who holds the GPUs there, for failures that are refused claims."""
    found = {host: _holders(host, error) for host, error in failures.items() if _is_refusal(error)}
    return {host: holders for host, holders in found.items() if holders}


def refused_end(refused: Mapping[str, tuple[GpuHolder, ...]]) -> End:
    """Return the end after a refusal: back to the queue immediately, no restart counted, no host at fault."""
    places = [f"{host}: {_held(holder)}" for host, holders in sorted(refused.items()) for holder in holders]
    return End(State.QUEUED, "; ".join(places), 1, refused=refused)


def _held(holder: GpuHolder) -> str:
    gpus = f"{plural(len(holder.gpus), 'GPU')} {', '.join(map(str, holder.gpus))}"
    return f"{holder.words} holds {gpus}: {holder.why}"


def _is_refusal(error: GpurunError) -> bool:
    return isinstance(error, RemoteOpFailed) and error.kind == "claimed"


def _holders(host: str, error: GpurunError) -> tuple[GpuHolder, ...]:
    """Return the holders that a host names; () if its answer is invalid, which counts as the host's failure."""
    assert isinstance(error, RemoteOpFailed)
    try:
        return tuple(holder_of(each) for each in facts.refused(host, error.detail.get("refused")))
    except HostNotReady:
        return ()


def holder_of(found: facts.HeldGpus) -> GpuHolder:
    """Convert a host's report about one holder for a job's record. Leaves out impossible GPU numbers."""
    who = found.claimant
    gpus = tuple(gpu for gpu in found.gpus if gpu < MOST_GPUS)
    return GpuHolder(gpus, who.job, who.attempt, who.user, who.uid, who.head, who.state, found.why)
