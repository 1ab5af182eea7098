"""What the gang's hosts are asked before anything large is sent: connections, claims on GPUs, and facts about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpurun import facts
from gpurun.errors import GpurunError, HostFailure, HostNotReady
from gpurun.jobs.record import GpuHolder, State
from gpurun.jobs.spec import MOST_GPUS
from gpurun.launch.container import HostAccount, contradictions
from gpurun.launch.plan import cards, owner_on
from gpurun.quantities import plural
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.verdict.ends import End, GangEnd, failed


def connect_hosts(job: SupervisedJob) -> None:
    """Start an agent on every host of the gang.

    Raises:
        GangEnd: a host cannot be reached, or is another machine than before.
    """
    raise_first(job.links.open(), kind="connection")


# Claims on GPUs. If a host refuses a claim, the gang waits, and no host is blamed.


TIMEOUT_S = 60.0


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


# What hosts say about themselves.


CACHES_TIMEOUT_S = 60.0
"""Longer than a host lets a job wait while the user's caches become smaller."""


def ask_accounts(job: SupervisedJob, hosts: Iterable[str] | None = None) -> None:
    """Let hosts (all if None) create the job's folder and keys and report facts about themselves. Idempotent.

    Raises:
        GangEnd: a host failed, or its report is impossible.
    """
    first = job.hosts[0]

    def ask(host: str) -> Mapping[str, Any]:
        interface = job.inventory.fabric_of(job.inventory.by_name[host]).interface
        reply = job.links.agent(host).call(
            "gang.prepare", job=job.lease.job, attempt=job.lease.attempt, first=host == first,
            interface=interface if job.spans_hosts else "", outputs=job.spec.keeps_outputs,
            beside=job.spec.keeps_beside, **_caches(job, host),
        )  # fmt: skip
        return reply.value  # type: ignore[no-any-return]

    results = job.links.each(lambda agent: ask(agent.host), hosts)
    raise_first(results.failed)
    for host, said in results.ok.items():
        job.public_keys[host] = said["public_key"]
        job.accounts[host] = _account(job, host, said)
    raise_first(_untrue(job))


def _caches(job: SupervisedJob, name: str) -> Mapping[str, Any]:
    """Return the argument for a host on which the ranks get their user's caches."""
    host = job.inventory.by_name[name]
    owner = owner_on(host, job.spec, job.claimant)
    if owner is None:
        return {}
    return {
        "caches": {"owner": owner, "most_bytes": (host.cache_quota_mib or 0) << 20}, "timeout_s": CACHES_TIMEOUT_S,
    }  # fmt: skip


def _untrue(job: SupervisedJob) -> Mapping[str, GpurunError]:
    """Return the hosts whose reports about themselves would send ranks to the wrong place."""
    mine = {host: account for host, account in job.accounts.items() if host in job.hosts}
    found = contradictions(mine) if job.spans_hosts else {}
    hint = "give each host a hostname and a fabric address of its own; `hostnamectl set-hostname` sets the name"
    return {
        host: HostFailure(why, kind="contradiction", host=host, job=job.lease.job, hint=hint)
        for host, why in found.items()
    }


def _account(job: SupervisedJob, host: str, said: Mapping[str, Any]) -> HostAccount:
    described = job.inventory.by_name[host]
    address = described.fabric_address or said["address"]
    if not address and job.spans_hosts:
        fabric = job.inventory.fabric_of(described)
        raise failed(
            HostFailure(
                f"the host's interface {fabric.interface!r} has no IPv4 address", kind="address", host=host,
                job=job.lease.job,
                hint=f"correct the interface of fabric {fabric.name!r}, or give the host a fabric_address",
            )
        )  # fmt: skip
    return HostAccount(
        uid=said["uid"], gid=said["gid"], user=said["user"], folder=said["folder"], hostname=said["hostname"],
        address=address or "127.0.0.1", sshd=said["sshd"], docker_host=said["docker_host"],
        groups=tuple((gid, name) for gid, name in said["groups"]),
        names=tuple((name, at) for name, at in said["names"]),
    )  # fmt: skip


def raise_first(failures: Mapping[str, GpurunError], *, kind: str = "") -> None:
    """End the attempt if there is a failure: the first by host name, with the number of others. A failure of the job
    comes before failures of hosts.

    A refused claim is not a failure. The gang then goes back to the queue, even if other hosts failed: the next attempt
    will find such hosts.

    Args:
        kind: for failures of hosts that have no kind.

    Raises:
        GangEnd: names the host.
    """
    if not failures:
        return
    if refused := refusals_in(failures):
        raise GangEnd(refused_end(refused))
    by_host = {host: error for host, error in failures.items() if isinstance(error, HostFailure)}
    for host_error in by_host.values():
        host_error.kind = host_error.kind or kind
    host = min(failures.keys() - by_host.keys() or failures)
    error = failures[host]
    error.host = error.host or host
    others = ", ".join(sorted(failures.keys() - {host})[:3])
    more = f" ({len(failures) - 1} more failed: {others})" if others else ""
    end = failed(error, more=more).end
    raise GangEnd(replace(end, suspects=tuple(sorted(failures)), by_host=by_host) if host in by_host else end)
