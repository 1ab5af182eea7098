"""Why a gang waits: read off the decisions of a pass, never guessed a second time.

What the gang met is rebuilt from the snapshot and the starts that came before it; every change that is offered was
tried with the same `schedule`, and so was the expected start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.scheduler.changes import Change, changes_that_start
from gpurun.scheduler.future import carried_out
from gpurun.scheduler.index import Index, mask_of, serves
from gpurun.scheduler.model import ENDLESS, Decisions, Gang, HostGroup, Placement, Running, Snapshot
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.schedule import schedule

State = Literal["starts", "waits", "never", "runs", "unknown"]

FREE, IN_USE, TOO_FEW = "GPUs free", "every GPU in use or kept for others", "free GPUs, but fewer per host than"

MAX_EVENTS = 64
"""So many ends of time limits are looked ahead for the expected start."""


@dataclass(frozen=True)
class Holder:
    """A running gang on hosts that the waiting one could use. `ends_s` None: it has no time limit."""

    gang: str
    gpus: int
    hosts: int
    ends_s: float | None
    stopping: bool


@dataclass(frozen=True)
class PoolUse:
    """The gang's pool: GPUs used, and what it may use now."""

    name: str
    used: int
    reservation: int
    limit: int | None
    entitlement: float | None


@dataclass(frozen=True)
class Explanation:
    """What a pass decided about one gang, and why.

    Attributes:
        position: 1 = first in the queue.
        ahead: ids of the gangs in front of it, in the pass's order.
        message: the decision in one sentence.
        behind: the gang or pool in the way.
        groups: the hosts, grouped by what they are for this gang.
        holders: who has the GPUs it could use, the soonest to end first.
        expected_start_s: if everybody uses the whole of their time limits; None = nobody can know.
        changes: what would start it now, each tried; the smallest first.
    """

    gang: str
    state: State
    gpus: int = 0
    position: int | None = None
    ahead: tuple[str, ...] = ()
    message: str = ""
    behind: str | None = None
    placement: Placement | None = None
    groups: tuple[HostGroup, ...] = ()
    holders: tuple[Holder, ...] = ()
    pool: PoolUse | None = None
    expected_start_s: float | None = None
    changes: tuple[Change, ...] = field(default_factory=tuple)


def explain(decisions: Decisions, snapshot: Snapshot, gang_id: str, policy: Policy = DEFAULT) -> Explanation:
    """Explain what `decisions`, made from `snapshot` under `policy`, mean for one gang."""
    for run in snapshot.running:
        if run.gang.id == gang_id:
            text = "is being stopped" if run.stopping else "runs"
            return Explanation(gang_id, "runs", run.gang.gpus, message=text, placement=run.placement)
    gang = next((gang for gang in snapshot.queue if gang.id == gang_id), None)
    if gang is None:
        return Explanation(gang_id, "unknown", message="is neither queued nor running")
    ahead = decisions.order[: decisions.order.index(gang_id)]
    base = Explanation(gang_id, "waits", gang.gpus, len(ahead) + 1, ahead, pool=_pool_use(decisions, snapshot, gang))
    placement = next((placement for started, placement in decisions.starts if started.id == gang_id), None)
    if placement is not None:
        return replace(base, state="starts", message="starts now", placement=placement)
    refusal = decisions.never.get(gang_id)
    if refusal is not None:
        groups = host_groups(Index(Snapshot(snapshot.inventory)), gang, {})
        return replace(base, state="never", message=refusal.message, groups=groups)
    wait = decisions.waits[gang_id]
    met = _met(decisions, snapshot, gang_id, wait.starts_before)
    return replace(
        base,
        message=wait.message,
        behind=wait.behind,
        groups=host_groups(met, gang, snapshot.unusable),
        holders=_holders(decisions, snapshot, gang, met),
        expected_start_s=wait.expected_start_s or _expected_start(decisions, snapshot, gang_id, policy),
        changes=changes_that_start(snapshot, gang, decisions, policy),
    )


def host_groups(index: Index, gang: Gang, unusable: Mapping[str, str]) -> tuple[HostGroup, ...]:
    """Every host of the inventory, grouped by what it is for a gang."""
    groups: dict[tuple[int, str], list[int]] = {}
    for number in range(len(index.hosts)):
        groups.setdefault(_why(index, gang, number, unusable), []).append(number)
    return tuple(_group(index, why, numbers) for (_, why), numbers in sorted(groups.items()))


def _why(index: Index, gang: Gang, number: int, unusable: Mapping[str, str]) -> tuple[int, str]:
    barred = _barred(index, gang, number, unusable)
    if barred is not None:
        return barred
    generation, free = index.hosts[number].generation, index.free[number].bit_count()
    least = gang.constraints.gpus_per_host or 1
    if not free:
        return 1, f"{generation}: {IN_USE}"
    return (0, f"{generation}: {FREE}") if free >= least else (1, f"{generation}: {TOO_FEW} {least}")


def _barred(index: Index, gang: Gang, number: int, unusable: Mapping[str, str]) -> tuple[int, str] | None:
    host, wants = index.hosts[number], gang.constraints
    if not serves((host.generation, host.gpu_model, host.gpu_memory_mib), wants):
        return 4, f"{host.generation}{f' {host.gpu_model}' if host.gpu_model else ''}: not what it asks for"
    if (wants.hosts and host.name not in wants.hosts) or host.name in wants.avoid:
        return 3, "left out by its constraints"
    if host.name in unusable:
        return 2, unusable[host.name]
    return (2, "it failed there before") if host.name in gang.avoid else None


def _group(index: Index, why: str, numbers: list[int]) -> HostGroup:
    free = {number: index.free[number].bit_count() for number in numbers}
    racks: dict[int, int] = {}
    for number in numbers:
        racks[index.rack_of[number]] = racks.get(index.rack_of[number], 0) + free[number]
    return HostGroup(
        why=why,
        hosts=tuple(index.hosts[number].name for number in numbers),
        gpus=sum(index.hosts[number].gpus for number in numbers),
        free=sum(free.values()),
        largest_host=max(free.values(), default=0),
        largest_rack=max(racks.values(), default=0),
    )


def _met(decisions: Decisions, snapshot: Snapshot, gang_id: str, starts_before: int) -> Index:
    """What was free when the pass came to the gang: earlier starts and what is kept for others are not."""
    index = Index(snapshot)
    for _, placement in decisions.starts[:starts_before]:
        index.take(index.masks(placement))
    kept = {owner: kept.placement for owner, kept in decisions.kept.items()}
    for owner, placement in (*kept.items(), *decisions.reserved.items()):
        if owner != gang_id:
            index.hold(index.masks(placement))
    return index


def _holders(decisions: Decisions, snapshot: Snapshot, gang: Gang, index: Index) -> tuple[Holder, ...]:
    number = index.number
    stopped = {preemption.victim for preemption in decisions.preempts}
    started = [Running(gang, placement, snapshot.now_s) for gang, placement in decisions.starts]
    holders = []
    for run in (*snapshot.running, *started):
        grants = [
            grant
            for grant in run.placement.grants
            if grant.host in number and _barred(index, gang, number[grant.host], snapshot.unusable) is None
        ]
        if grants:
            gpus = sum(mask_of(grant.gpus).bit_count() for grant in grants)
            stopping = run.stopping or run.gang.id in stopped
            free_s = run.free_s(snapshot.now_s)
            known_s = None if free_s == ENDLESS else free_s
            holders.append(Holder(run.gang.id, gpus, len(grants), known_s, stopping))
    return tuple(sorted(holders, key=_soonest))


def _soonest(holder: Holder) -> tuple[bool, float, int, str]:
    ends = float("inf") if holder.ends_s is None else holder.ends_s
    return (not holder.stopping, ends, -holder.gpus, holder.gang)


def _pool_use(decisions: Decisions, snapshot: Snapshot, gang: Gang) -> PoolUse | None:
    pools = {pool.name: pool for pool in snapshot.inventory.pools}
    pool = pools.get(gang.pool or "")
    if pool is None:
        return None
    inside = {pool.name}
    while more := {p.name for p in pools.values() if p.parent in inside} - inside:
        inside |= more
    used = sum(run.gang.gpus for run in snapshot.running if run.gang.pool in inside)
    return PoolUse(pool.name, used, pool.reservation, pool.limit, decisions.entitlements.get(pool.name))


def _expected_start(decisions: Decisions, snapshot: Snapshot, gang_id: str, policy: Policy) -> float | None:
    """Pass after pass at the ends of time limits, as if nothing else happened."""
    now = snapshot
    for _ in range(MAX_EVENTS):
        now = carried_out(now, decisions)
        ends = [_end_s(run, now.now_s) for run in now.running]
        times = [end for end in (*ends, decisions.wake_s) if end is not None]
        if not times:
            return None
        now_s = max(min(times), now.now_s)
        left = tuple(run for run, end in zip(now.running, ends, strict=True) if end is None or end > now_s)
        now = replace(now, running=left, now_s=now_s)
        decisions = schedule(now, policy)
        if any(gang.id == gang_id for gang, _ in decisions.starts):
            return now.now_s
    return None


def _end_s(run: Running, now_s: float) -> float | None:
    free_s = run.free_s(now_s)
    return None if free_s == ENDLESS else free_s
