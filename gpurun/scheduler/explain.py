"""Explain why a gang waits, from the decisions of the pass.

This module rebuilds the state that the gang met from the snapshot and the earlier starts. It tries each suggestion, and
the expected start, with the same `schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.quantities.counts import count
from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.changes import Change, changes_that_start
from gpurun.scheduler.future import carried_out
from gpurun.scheduler.index import Index, serves
from gpurun.scheduler.model import ENDLESS, Decisions, Gang, HostGroup, Placement, Reason, Snapshot, Wait
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.racks import Need
from gpurun.scheduler.schedule import arrange, schedule
from gpurun.scheduler.state import Arranged

State = Literal["starts", "waits", "never", "runs", "unknown"]

FREE, IN_USE = "GPUs free", "all GPUs are in use or kept for other jobs"

OUT_OF_USE = "the start depends on hosts that are out of use"

MAX_EVENTS = 64
"""So many ends of time limits are looked ahead for the expected start."""

MAX_CONSIDERED = 50_000
"""So many gangs are considered for it, in all passes together: fewer ends where the queue is long."""


@dataclass(frozen=True)
class Occupant:
    """A running gang on hosts that the waiting one could use.

    Attributes:
        free_s: when the gang's GPUs are expected to be free if the gang uses its whole time limit; None = the gang has
            no time limit.
        preparing: the gang's time limit does not count yet, so `free_s` still moves.
    """

    gang: str
    gpus: int
    hosts: int
    free_s: float | None
    stopping: bool
    preparing: bool = False


@dataclass(frozen=True)
class PoolUse:
    """The gang's pool: the GPUs that the pool uses, and the GPUs that it may use now."""

    name: str
    used: int
    reservation: int
    limit: int | None
    entitlement: float | None


@dataclass(frozen=True)
class Explanation:
    """What a pass decided about one gang, and why.

    Attributes:
        position: 1 = first in the queue; None = the gang has no place in the queue.
        ahead: ids of the gangs in front of this gang, in the pass's order.
        message: the decision in one sentence.
        behind: the gang or pool in the way.
        groups: the hosts, grouped by why the gang can use them or cannot.
        holders: the gangs that hold GPUs that this gang could use; the gang that ends first comes first.
        expected_start_s: the gang's start if running gangs use their whole time limits, nothing fails, and no later
            submission overtakes the gang; None = unknown.
        unknown_because: why the expected start is unknown.
        changes: changes that would start the gang now, each tested by a placement; the smallest first.
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
    holders: tuple[Occupant, ...] = ()
    pool: PoolUse | None = None
    expected_start_s: float | None = None
    unknown_because: str = ""
    changes: tuple[Change, ...] = field(default_factory=tuple)


def explain(decisions: Decisions, snapshot: Snapshot, gang_id: str, policy: Policy = DEFAULT) -> Explanation:
    """Explain the meaning of `decisions`, made from `snapshot` under `policy`, for one gang."""
    for run in snapshot.running:
        if run.gang.id == gang_id:
            text = "is being stopped" if run.stopping else "runs"
            return Explanation(gang_id, "runs", run.gang.gpus, message=text, placement=run.placement)
    gang = next((gang for gang in snapshot.queue if gang.id == gang_id), None)
    if gang is None:
        return Explanation(gang_id, "unknown", message="the job is neither queued nor running")
    capacity = arrange(snapshot).capacity
    refusal = decisions.never.get(gang_id)
    if refusal is not None:
        groups = host_groups(Index(snapshot), gang, snapshot.unusable, capacity)
        return Explanation(gang_id, "never", gang.gpus, message=refusal.message, groups=groups)
    queue = places(decisions)
    ahead = tuple(queue)[: queue[gang_id] - 1]
    base = Explanation(gang_id, "waits", gang.gpus, queue[gang_id], ahead, pool=_pool_use(decisions, snapshot, gang))
    placement = next((placement for started, placement in decisions.starts if started.id == gang_id), None)
    if placement is not None:
        return replace(base, state="starts", message="starts now", placement=placement)
    wait = decisions.waits[gang_id]
    met = _met(decisions, snapshot, gang_id, wait.starts_before)
    expected_s, because = wait.expected_start_s, ""
    if expected_s is None:
        expected_s, because = _expected_start(decisions, snapshot, gang, policy)
    return replace(
        base,
        message=wait.message,
        behind=wait.behind,
        groups=host_groups(met, gang, snapshot.unusable, capacity),
        holders=_holders(decisions, snapshot, capacity.may_use(met, gang)),
        expected_start_s=expected_s,
        unknown_because=because,
        changes=changes_that_start(snapshot, gang, decisions, policy),
    )


def places(decisions: Decisions) -> dict[str, int]:
    """Return each gang's place in the queue, 1 = first. Gangs that can never start have no place."""
    waiting = (gang for gang in decisions.order if gang not in decisions.never)
    return {gang: place for place, gang in enumerate(waiting, 1)}


def host_groups(index: Index, gang: Gang, unusable: Mapping[str, str], capacity: Capacity) -> tuple[HostGroup, ...]:
    """Every host of the inventory, grouped by what it is for a gang."""
    groups: dict[tuple[int, str], list[int]] = {}
    need = capacity.need(index, gang)
    for number in range(len(index.hosts)):
        groups.setdefault(_why(index, gang, number, unusable, need), []).append(number)
    return tuple(_group(index, why, numbers) for (_, why), numbers in sorted(groups.items()))


def _why(index: Index, gang: Gang, number: int, unusable: Mapping[str, str], need: Need) -> tuple[int, str]:
    barred = _barred(index, gang, number, unusable, need)
    if barred is not None:
        return barred
    generation, free = index.hosts[number].generation, index.free[number].bit_count()
    least = gang.wants.constraints.gpus_per_host or 1
    if not free:
        return 1, f"{generation}: {IN_USE}"
    return (
        (0, f"{generation}: {FREE}")
        if free >= least
        else (1, f"{generation}: each host has fewer than {count(least, 'free GPU')}")
    )


def _barred(index: Index, gang: Gang, number: int, unusable: Mapping[str, str], need: Need) -> tuple[int, str] | None:
    host, asked = index.hosts[number], gang.wants.constraints
    if not serves(index.kind(number), asked):
        return (
            4,
            f"{host.generation}{f' {host.gpu_model}' if host.gpu_model else ''}: the job does not ask for such GPUs",
        )
    if (asked.hosts and host.name not in asked.hosts) or host.name in asked.avoid:
        return 3, "the job's constraints exclude the host"
    if host.name in unusable:
        return 2, unusable[host.name]
    return None if need.admits(number) else (2, "the job failed on the host before")


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
    """Return the free GPUs when the pass came to the gang, without earlier starts and GPUs kept for others."""
    index = Index(snapshot)
    for _, placement in decisions.starts[:starts_before]:
        index.take(index.masks(placement))
    kept = {owner: kept.placement for owner, kept in decisions.kept.items()}
    for owner, placement in (*kept.items(), *decisions.reserved.items()):
        if owner != gang_id:
            index.hold(index.masks(placement))
    return index


def _holders(decisions: Decisions, snapshot: Snapshot, may_use: Callable[[int], bool]) -> tuple[Occupant, ...]:
    number = {host.name: n for n, host in enumerate(snapshot.inventory.hosts)}
    usable = {name for name, n in number.items() if name not in snapshot.unusable and may_use(n)}
    after = carried_out(snapshot, decisions)
    holders = []
    for run in after.running:
        grants = [grant for grant in run.placement.grants if grant.host in usable]
        if grants:
            gpus, free_s = sum(len(grant.gpus) for grant in grants), run.free_s(snapshot.now_s)
            known_s = None if free_s == ENDLESS else free_s
            preparing = run.running_s is None and not run.stopping
            holders.append(Occupant(run.gang.id, gpus, len(grants), known_s, run.stopping, preparing))
    return tuple(sorted(holders, key=_soonest))


def _soonest(holder: Occupant) -> tuple[bool, float, int, str]:
    ends = ENDLESS if holder.free_s is None else holder.free_s
    return (not holder.stopping, ends, -holder.gpus, holder.gang)


def _pool_use(decisions: Decisions, snapshot: Snapshot, gang: Gang) -> PoolUse | None:
    pools = {pool.name: pool for pool in snapshot.inventory.pools}
    pool = pools.get(gang.wants.pool or "")
    if pool is None:
        return None
    inside = {pool.name}
    while more := {p.name for p in pools.values() if p.parent in inside} - inside:
        inside |= more
    used = sum(run.gang.gpus for run in snapshot.running if run.gang.wants.pool in inside)
    return PoolUse(pool.name, used, pool.reservation, pool.limit, decisions.entitlements.get(pool.name))


def _expected_start(decisions: Decisions, snapshot: Snapshot, gang: Gang, policy: Policy) -> tuple[float | None, str]:
    """Run pass after pass at the expected ends, as if nothing else happened; or return why the start is unknown."""
    now, capacity = snapshot, arrange(snapshot).capacity
    for _ in range(min(MAX_EVENTS, 1 + MAX_CONSIDERED // len(snapshot.queue))):
        now = carried_out(now, decisions)
        ends = [run.free_s(now.now_s) for run in now.running]
        times = [end for end in (*ends, decisions.wake_s) if end is not None and end != ENDLESS]
        if not times:
            return None, _unknown(now, decisions, gang)
        now_s = max(min(times), now.now_s)
        left = tuple(run for run, end in zip(now.running, ends, strict=True) if end > now_s)
        now = replace(now, running=left, now_s=now_s)
        decisions = schedule(now, policy, Arranged(Index(now), capacity))
        if any(started.id == gang.id for started, _ in decisions.starts):
            return now.now_s, ""
    return None, "gpurun does not predict a start after so many other jobs"


def _unknown(last: Snapshot, decisions: Decisions, gang: Gang) -> str:
    """Return what the start still depends on when no more gangs end by a time limit."""
    arranged = arrange(last)
    may_use = arranged.capacity.may_use(arranged.index, gang)
    number = arranged.index.number
    where = {name for name, n in number.items() if may_use(n)}
    wait = decisions.waits.get(gang.id)
    if wait is not None and wait.reason is Reason.POOL:
        return _unknown_in_pool(last, wait, gang)
    if wait is not None and wait.reason is Reason.HOSTS:
        return OUT_OF_USE
    if any(grant.host in where for run in last.running for grant in run.placement.grants):
        return "the start depends on jobs without a time limit"
    if where & set(last.unusable):
        return OUT_OF_USE
    if where & set(last.taken):
        return "the start depends on GPUs that are lost or that other programs hold; `gpurun status` shows these GPUs"
    first = wait.behind if wait is not None and wait.behind else _kept_for(last, decisions, where)
    return (
        f"the start depends on {first}, for which GPUs are kept"
        if first
        else "the start depends on the jobs before this job in the queue"
    )


def _kept_for(last: Snapshot, decisions: Decisions, where: Collection[str]) -> str | None:
    """The gang for which most of the GPUs on some hosts are kept."""
    kept = {gang.id: gang.kept.placement for gang in last.queue if gang.kept is not None}
    held = {**{name: kept.placement for name, kept in decisions.kept.items()}, **decisions.reserved, **kept}
    here = {name: sum(len(g.gpus) for g in placement.grants if g.host in where) for name, placement in held.items()}
    return max((name for name in here if here[name]), key=lambda name: (here[name], name), default=None)


def _unknown_in_pool(last: Snapshot, wait: Wait, gang: Gang) -> str:
    if any(other.id == wait.behind for other in last.queue):
        return f"the start depends on {wait.behind}"
    whose = "the job's pool" if wait.behind in (None, gang.wants.pool) else f"pool {wait.behind}"
    return f"the start depends on jobs of {whose} without a time limit"
