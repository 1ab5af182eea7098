"""Check claims on GPUs that do not match a lease of this state directory: other users', stale or forgotten claims."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from gpurun.doctor.findings import Finding, Severity
from gpurun.facts.claims import HeldGpus, held
from gpurun.quantities.counts import plural
from gpurun.remote.agent import Agent
from gpurun.remote.fleet import Fleet, Results

ALWAYS_SHOWN = frozenset({"gpu-claimed", "claim-stale"})
"""No faults, but people ask why a GPU is not theirs."""

Carried = Collection[tuple[str, int]]
"""The attempts, as job and number, that this state directory has a lease for."""


def ask(fleet: Fleet, hosts: Iterable[str]) -> Results[tuple[HeldGpus, ...]]:
    """Ask each host who holds its GPUs."""

    def one(agent: Agent) -> tuple[HeldGpus, ...]:
        return held(agent.host, agent.call("claims.list").value)

    return fleet.map(one, hosts)


def check(
    found: Mapping[str, tuple[HeldGpus, ...]], *, state: str | None, uid: int, carried: Carried
) -> Iterator[Finding]:
    """Report problems with the hosts' claims. Pure.

    Args:
        found: host → who holds its GPUs.
        state: the id of this state directory; None if it has none yet.
        uid: the current user.
        carried: read before and after the hosts were asked, because an attempt may begin or end in between.
    """
    for host, holders in found.items():
        for one in holders:
            if state is None or one.claimant.state != state:
                yield _stale(host, one) if not one.why else _foreign(host, one)
            elif (one.claimant.job, one.claimant.attempt) not in carried:
                yield _forgotten(host, one, mine=one.claimant.uid == uid)


def _foreign(host: str, one: HeldGpus) -> Finding:
    who = one.claimant
    remedy = (
        f"jobs of this head wait for the GPUs; `gpurun status` on {who.head or 'the other head node'} "
        f"shows the job. If the head node is gone for good, free the GPUs by hand: {_by_hand(host, one)}"
    )
    return _finding("gpu-claimed", Severity.NOTE, host, one, f"{_whose(one)} holds {_gpus(one)}: {one.why}", remedy)


def _stale(host: str, one: HeldGpus) -> Finding:
    evidence = f"{_claimed(one)}, but the job has no process on the host and no connection to the host"
    return _finding(
        "claim-stale", Severity.NOTE, host, one, evidence, "no action is needed: the next job can use the GPUs"
    )


def _forgotten(host: str, one: HeldGpus, *, mine: bool) -> Finding:
    evidence = f"{_claimed(one)}, but this head has no lease for the job: {one.why or 'no process of the job runs'}"
    owner = one.claimant.user or f"uid {one.claimant.uid}"
    remedy = "gpurun recover --claims" if mine else f"let {owner} or root run: gpurun recover --claims"
    return _finding("claim-forgotten", Severity.WARNING, host, one, evidence, remedy)


def _finding(check: str, severity: Severity, host: str, one: HeldGpus, evidence: str, remedy: str) -> Finding:
    return Finding(check, severity, (host,), evidence, remedy, {host: one.gpus})


def _whose(one: HeldGpus) -> str:
    who = one.claimant
    owner = f" of {who.user}" if who.user else ""
    return f"{f'job {who.job}' if who.job else 'an unknown job'}{owner}{f' on {who.head}' if who.head else ''}"


def _claimed(one: HeldGpus) -> str:
    return f"{_gpus(one)} {plural(len(one.gpus), 'is', 'are')} reserved (claimed) for {_whose(one)}"


def _gpus(one: HeldGpus) -> str:
    return f"{plural(len(one.gpus), 'GPU')} {', '.join(map(str, one.gpus)) or '?'}"


def _by_hand(host: str, one: HeldGpus) -> str:
    containers = f"docker rm -f {' '.join(each[:12] for each in one.containers)}; " if one.containers else ""
    return f"ssh {host} '{containers}docker volume rm {' '.join(one.volumes)}'".replace("; docker volume rm '", "'")
