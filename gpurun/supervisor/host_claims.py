"""A gang's claims on its hosts, and what follows when a host refuses one: the gang waits, and nobody is blamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gpurun.errors import GpurunError
from gpurun.jobs.record import GpuHolder
from gpurun.jobs.states import State
from gpurun.launch.plan import cards
from gpurun.leases.lease import Lease
from gpurun.node.claim_rules import Claimant, Refused, read_claimant
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.ends import End

if TYPE_CHECKING:
    from gpurun.supervisor.job import SupervisedJob

TIMEOUT_S = 60.0
_MOST_WHY = 200


def claimant_of(lease: Lease, state: str) -> Claimant:
    """Who claims the GPUs of a lease.

    Args:
        state: the id of the state directory that the lease lies in.
    """
    return Claimant(lease.job, lease.attempt, state, lease.owner, lease.owner_uid, os.uname().nodename)


def claim_of(job: SupervisedJob, host: str) -> dict[str, Any]:
    """What a host is asked to claim: the arguments of `gpurun.node.claims.take_here`."""
    (grant,) = (grant for grant in job.lease.grants if grant.host == host)
    return {"claimant": job.claimant._asdict(), "cards": cards(grant, job.hardware.get(host))}


def claim(job: SupervisedJob, hosts: Iterable[str]) -> Mapping[str, GpurunError]:
    """Claim the gang's GPUs on hosts that were probed, before anything large is sent there. Idempotent.

    Returns:
        The hosts that could not, or would not.
    """
    results = job.links.each(
        lambda agent: agent.call("claims.take", timeout_s=TIMEOUT_S, **claim_of(job, agent.host)), hosts
    )
    for host, holders in refusals_in(results.failed).items():
        for holder in holders:
            job.events.emit("host", host=host, state="refused", reason=_held(holder))
    return results.failed


def refusals_in(failures: Mapping[str, GpurunError]) -> Mapping[str, tuple[GpuHolder, ...]]:
    """Host → who holds the GPUs there, for the failures that are refused claims."""
    found = {host: _holders(error) for host, error in failures.items() if _is_refusal(error)}
    return {host: holders for host, holders in found.items() if holders}


def refused_end(refused: Mapping[str, tuple[GpuHolder, ...]]) -> End:
    """Back to the queue at once: no restart is counted, and no host is at fault."""
    places = [f"{host}: {_held(holder)}" for host, holders in sorted(refused.items()) for holder in holders]
    return End(State.QUEUED, "; ".join(places), 1, refused=refused)


def _held(holder: GpuHolder) -> str:
    gpus = f"GPU{'s' if len(holder.gpus) != 1 else ''} {', '.join(map(str, holder.gpus))}"
    return f"{holder.words} holds {gpus}: {holder.why}"


def _is_refusal(error: GpurunError) -> bool:
    return isinstance(error, RemoteOpFailed) and error.kind == "claimed"


def _holders(error: GpurunError) -> tuple[GpuHolder, ...]:
    """Who a host names, each once. A host may say anything: what it says is read as from labels of its containers."""
    assert isinstance(error, RemoteOpFailed)
    try:
        said = msgspec.convert(error.detail.get("refused"), list[Refused])
    except msgspec.ValidationError:
        return ()
    found: dict[tuple[str, str, int], GpuHolder] = {}
    for each in said:
        who = read_claimant(each.holder.labels())
        gpus = tuple(sorted({index for index, _ in (each.card, *each.cards) if index >= 0}))
        why = "".join(letter if letter.isprintable() else "?" for letter in each.why[:_MOST_WHY])
        found.setdefault(
            who.key,
            GpuHolder(gpus, who.job, who.attempt, who.user, who.uid, who.head, who.state, why),
        )
    return tuple(found.values())
