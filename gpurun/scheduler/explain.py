"""Explain why a gang waits, and what would start it, from the decisions of the pass; and plan a drain.

This module rebuilds the state that the gang met from the snapshot and the earlier starts. It tries each suggestion, and
the expected start, with the same `schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from gpurun.errors import BadInput
from gpurun.inventory.model import Inventory, Pool
from gpurun.jobs.spec import Constraints, Grant, Placement
from gpurun.quantities import count, duration
from gpurun.scheduler.model import DEFAULT, ENDLESS, Decisions, Gang, HostGroup, Policy, Reason, Snapshot, Wait
from gpurun.scheduler.passes import arrange, schedule
from gpurun.scheduler.placement import Capacity, Index, Need, serves
from gpurun.scheduler.pools import tree_of
from gpurun.scheduler.state import Arranged, carried_out

# The smallest change that would start a gang now. Each suggestion was tried with a pass.


HOSTS_BACK = ("uncordon", "repair")

MAX_UNCORDON = 16
"""So many hosts are tried one by one before all of them at once."""


@dataclass(frozen=True)
class Change:
    """One change that starts the gang.

    Attributes:
        what: ``gpus``, ``generation``, ``locality``, ``gpus_per_host``, ``hosts``, ``time_limit``, ``preemptible``,
            ``priority``, ``pool``, ``uncordon``, or ``repair`` of a host that is out.
        value: the new value, as a person would write it.
        text: the change in words.
    """

    what: str
    value: str
    text: str


def changes_that_start(snapshot: Snapshot, gang: Gang, decisions: Decisions, policy: Policy) -> tuple[Change, ...]:
    """Return every kind of change that would start a waiting gang in a pass now, the smallest first."""
    found: list[Change] = []
    for change, changed in _candidates(snapshot, gang, decisions):
        if "," in change.value and change.what in HOSTS_BACK and any(c.what in HOSTS_BACK for c in found):
            continue  # one host is enough
        if _possible(changed) and _starts(changed, gang.id, policy):
            found.append(change)
    fewer = _fewer_gpus(snapshot, gang, policy)
    return tuple(found if fewer is None else [fewer, *found])


def _starts(snapshot: Snapshot, gang: str, policy: Policy) -> bool:
    return any(started.id == gang for started, _ in schedule(snapshot, policy, until=gang).starts)


def _possible(snapshot: Snapshot) -> bool:
    """False if the changed pools contradict each other: no change to offer."""
    try:
        tree_of(snapshot.inventory.pools, snapshot.inventory.total_gpus)
    except BadInput:
        return False
    return True


def _with(snapshot: Snapshot, gang: Gang) -> Snapshot:
    queue = tuple(gang if other.id == gang.id else other for other in snapshot.queue)
    return replace(snapshot, queue=queue)


def _fewer_gpus(snapshot: Snapshot, gang: Gang, policy: Policy) -> Change | None:
    """Return the largest smaller number of GPUs with which it starts; larger gangs are no easier to place."""
    step = gang.wants.constraints.gpus_per_host or 1
    low, high = 0, max(0, gang.least // step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if _starts(_with(snapshot, gang.but(gpus=middle * step).wanting(min_gpus=None)), gang.id, policy):
            low = middle
        else:
            high = middle - 1
    if not low:
        return None
    gpus = low * step
    return Change("gpus", str(gpus), f"{count(gpus, 'GPU')} in place of {gang.least}")


def _candidates(snapshot: Snapshot, gang: Gang, decisions: Decisions) -> Iterator[tuple[Change, Snapshot]]:
    for change, constraints in _other_constraints(snapshot.inventory, gang.wants.constraints):
        yield change, _with(snapshot, gang.wanting(constraints=constraints))
    limit = _time_that_is_left(snapshot, gang, decisions)
    if limit is not None:
        change = Change("time_limit", f"{limit:.0f}s", f"a time limit of {duration(limit)}: the job would end in time")
        yield change, _with(snapshot, gang.wanting(time_limit_s=limit))
    if not gang.wants.preemptible and snapshot.inventory.pools:
        change = Change("preemptible", "true", "preemptible: the job may then borrow GPUs that other pools do not use")
        yield change, _with(snapshot, gang.wanting(preemptible=True))
    others = [other.wants.priority for other in snapshot.queue if other.id != gang.id]
    top = max(others, default=gang.wants.priority) + 1
    if top > gang.wants.priority:
        yield Change("priority", str(top), f"priority {top}"), _with(snapshot, gang.wanting(priority=top))
    yield from _other_pools(snapshot, gang, decisions)
    yield from _hosts_back(snapshot)


def _other_constraints(inventory: Inventory, wants: Constraints) -> Iterator[tuple[Change, Constraints]]:
    if wants.locality_wait_s and wants.prefer != "any":
        yield Change("locality", "any", f"no wait for one {wants.prefer}"), replace(wants, locality_wait_s=0.0)
    wider = {"host": ("rack", "any"), "rack": ("any",), "any": ()}[wants.locality]
    for locality in wider:
        yield Change("locality", locality, f"locality {locality}"), replace(wants, locality=locality)  # type: ignore[arg-type]
    for generation in inventory.generations if wants.generations or wants.gpu_model or wants.min_gpu_memory_mib else ():
        if generation not in wants.generations:
            other = replace(wants, generations=(generation,), gpu_model=None, min_gpu_memory_mib=None)
            yield Change("generation", generation, f"generation {generation}"), other
    if wants.gpus_per_host:
        yield Change("gpus_per_host", "any", "any number of GPUs per host"), replace(wants, gpus_per_host=None)
    if wants.nvlink:
        yield Change("nvlink", "false", "GPUs of several NVLink islands"), replace(wants, nvlink=False)
    if wants.hosts or wants.avoid:
        yield Change("hosts", "any", "any hosts"), replace(wants, hosts=(), avoid=())


def _time_that_is_left(snapshot: Snapshot, gang: Gang, decisions: Decisions) -> float | None:
    """Return how long a gang may run without a delay for the first gang that waits for room."""
    wait = decisions.waits[gang.id]
    if wait.reason is not Reason.RESERVED or wait.behind is None:
        return None
    first = decisions.waits.get(wait.behind)
    if first is None or first.expected_start_s is None or first.expected_start_s <= snapshot.now_s:
        return None
    limit_s = first.expected_start_s - snapshot.now_s - gang.start_allowance_s - gang.stop_allowance_s
    return limit_s if limit_s >= 1 else None


def _other_pools(snapshot: Snapshot, gang: Gang, decisions: Decisions) -> Iterator[tuple[Change, Snapshot]]:
    if decisions.waits[gang.id].reason is not Reason.POOL:
        return
    pools = {pool.name: pool for pool in snapshot.inventory.pools}
    pool = pools.get(gang.wants.pool or "")
    while pool is not None:
        used = sum(run.gang.gpus for run in snapshot.running if run.gang.wants.pool == pool.name) + gang.least
        if not gang.wants.preemptible:
            yield _pool_change(snapshot, pool, replace(pool, reservation=max(used, pool.reservation)), "reservation")
        if pool.limit is not None:
            yield _pool_change(snapshot, pool, replace(pool, limit=max(used, pool.limit)), "limit")
        pool = pools.get(pool.parent or "")


def _pool_change(snapshot: Snapshot, old: Pool, new: Pool, key: str) -> tuple[Change, Snapshot]:
    if new.limit is not None and new.reservation > new.limit:
        new = replace(new, limit=new.reservation)
    pools = tuple(new if pool is old else pool for pool in snapshot.inventory.pools)
    value = getattr(new, key)
    change = Change("pool", f"{old.name}.{key}={value}", f"pool {old.name} with a {key} of {value}")
    return change, replace(snapshot, inventory=replace(snapshot.inventory, pools=pools))


def _hosts_back(snapshot: Snapshot) -> Iterator[tuple[Change, Snapshot]]:
    names = sorted(snapshot.unusable)
    for name in names[:MAX_UNCORDON]:
        rest = {host: why for host, why in snapshot.unusable.items() if host != name}
        what = _way_back(snapshot, [name])
        text = f"`gpurun inventory uncordon {name}`" if what == "uncordon" else f"{name} repaired, and back in use"
        yield Change(what, name, text), replace(snapshot, unusable=rest)
    if len(names) > 1:
        what = _way_back(snapshot, names)
        yield Change(what, ",".join(names), f"all {len(names)} hosts back in use"), replace(snapshot, unusable={})


def _way_back(snapshot: Snapshot, names: Iterable[str]) -> str:
    """What brings hosts back: `gpurun inventory uncordon` does not help a host that is out."""
    return "repair" if any(snapshot.unusable[name].startswith("out: ") for name in names) else "uncordon"


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


# An explanation in words: the lines of `gpurun why`, one screen of them.


MOST = 6
"""Lines of one kind; the rest is counted."""

Entry = TypeVar("Entry")

Fold = Callable[[Iterable[str]], str]
"""Host names to one short word, such as ``gpu-r1-[01-16]``."""


def lines(explanation: Explanation, *, now_s: float, fold: Fold, named: Callable[[str], str] = str) -> list[str]:
    """The explanation as lines of text without colours.

    Args:
        now_s: the time of the snapshot; expected starts are given as seconds from it.
        fold: how host names are shortened.
        named: a gang's id to what people call it.
    """
    text = [f"{explanation.gang} {_state(explanation)}"]
    if explanation.placement is not None:
        text.append(f"  on {fold(explanation.placement.hosts)} ({', '.join(explanation.placement.racks)})")
    if explanation.state not in ("waits", "never"):
        return text
    if explanation.position is not None:
        text.append(f"  place in the queue: {explanation.position}{_ahead(explanation.ahead, named)}")
    text += _pool(explanation)
    text += _section("hosts", explanation.groups, lambda group: _group_of_wording(group, fold))
    text += _section(
        "GPUs that the job could use are held by", explanation.holders,
        lambda holder: f"{named(holder.gang)}: {_holder(holder, now_s)}",
    )  # fmt: skip
    if explanation.state == "waits":
        text.append(f"  expected start: {_expected(explanation, now_s)}")
        changes = _section("the job would start now with", explanation.changes, lambda change: change.text)
        text += changes or ["  no single change would start the job now"]
    return text


def _state(explanation: Explanation) -> str:
    if explanation.state in ("runs", "starts"):  # the message is a verb, too
        return explanation.message or explanation.state
    state = {"never": "can never start", "unknown": "is unknown"}.get(explanation.state, explanation.state)
    return f"{state}: {explanation.message}" if explanation.message else state


def _section(title: str, entries: Sequence[Entry], in_words: Callable[[Entry], str]) -> list[str]:
    if not entries:
        return []
    more = [f"    … and {len(entries) - MOST} more"] if len(entries) > MOST else []
    return [f"  {title}:", *(f"    {in_words(entry)}" for entry in entries[:MOST]), *more]


def _ahead(ahead: Sequence[str], named: Callable[[str], str]) -> str:
    if not ahead:
        return ""
    more = f" and {len(ahead) - MOST} more" if len(ahead) > MOST else ""
    return f", behind {', '.join(map(named, ahead[:MOST]))}{more}"


def _pool(explanation: Explanation) -> list[str]:
    pool = explanation.pool
    if pool is None:
        return []
    limit = "none" if pool.limit is None else f"{pool.limit}"
    entitled = "" if pool.entitlement is None else f", entitled to {pool.entitlement:.0f} now"
    used = f"uses {count(pool.used, 'GPU')}{entitled}"
    return [f"  pool {pool.name}: {used}, reservation {pool.reservation}, limit {limit}"]


def _group_of_wording(group: HostGroup, fold: Fold) -> str:
    room = ""
    if group.free:
        room = f"; {group.free} of {group.gpus} free, at most {group.largest_host} on a host"
        room += f" and {group.largest_rack} in a rack"
    return f"{fold(group.hosts)}: {group.why}{room}"


def _holder(holder: Occupant, now_s: float) -> str:
    where = f"{count(holder.gpus, 'GPU')} on {count(holder.hosts, 'host')}"
    if holder.stopping:
        return f"{where}, is stopping"
    if holder.free_s is None:
        return f"{where}, has no time limit"
    if holder.preparing:
        return f"{where}, prepares; its time limit does not count yet"
    if holder.free_s <= now_s:
        return f"{where}, should have ended by its time limit"
    return f"{where}, free {in_time(holder.free_s, now_s)} if the job uses its whole time limit"


def _expected(explanation: Explanation, now_s: float) -> str:
    at_s = explanation.expected_start_s
    if at_s is None:
        return f"unknown: {explanation.unknown_because}"
    if at_s <= now_s:
        return "soon: the jobs in the way should have ended by now"
    before = [holder for holder in explanation.holders if holder.free_s is not None and holder.free_s <= at_s]
    if not before:  # time alone brings the start: it waits no longer for one rack, or gangs may be preempted for it
        return in_time(at_s, now_s)
    only_stop = all(holder.stopping for holder in before)
    ends = "when the stopping jobs have ended" if only_stop else "if running jobs use their whole time limits"
    return f"{in_time(at_s, now_s)} {ends}"


def expected_in(at_s: float, now_s: float) -> str:
    """When a job is expected to start, for people: ``in 12s``; ``soon`` if it should have started already."""
    return "soon" if at_s <= now_s else in_time(at_s, now_s)


def in_time(at_s: float, now_s: float) -> str:
    """A time to come, for people: ``in 12s`` or ``in 1h05m``."""
    return f"in {duration(max(1, round(at_s - now_s)))}"


# Decide about gangs on hosts that are being drained. Pure.


Fate = Literal["stops", "shrinks", "moves", "waits", "ends"]


@dataclass(frozen=True)
class Tenant:
    """A gang that holds GPUs of a draining host.

    Attributes:
        gang: with the GPUs that it wants.
        members: where its ranks run, in rank order.
        hosts: the draining hosts on which it holds GPUs.
        begun: its containers may exist; before that it has no work to lose.
        stopping: it is already stopping.
    """

    gang: Gang
    members: tuple[Grant, ...]
    hosts: tuple[str, ...]
    begun: bool = True
    stopping: bool = False

    @property
    def may_shrink(self) -> bool:
        """Return True if it can release the draining hosts. One that reforms stops, and starts at another size."""
        wants = self.gang.wants
        return not wants.reforms and may_lose(self.members, self.hosts, wants.min_gpus)

    @property
    def may_stop(self) -> bool:
        """Return True if it may be stopped, because it starts again."""
        wants = self.gang.wants
        return wants.preemptible or wants.reforms or wants.max_restarts > 0


@dataclass(frozen=True)
class Departure:
    """The decision about one gang.

    Attributes:
        fate: ``stops``: it is already stopping; ``shrinks``: it releases the hosts and continues on its others;
            ``moves``: it stops and is queued again; ``waits``: the drain waits for its end; ``ends``: the deadline
            is over, so gpurun stops it for good.
        why: one phrase. For ``waits`` and ``ends``: why it does not move.
        until_s: for ``waits``: when gpurun stops it; None = never.
    """

    gang: str
    hosts: tuple[str, ...]
    fate: Fate
    why: str = ""
    until_s: float | None = None


def departures(
    inventory: Inventory,
    unusable: Collection[str],
    draining: Mapping[str, float | None],
    tenants: Iterable[Tenant],
    now_s: float,
) -> tuple[Departure, ...]:
    """Decide about each gang.

    Args:
        unusable: all hosts that get no new gangs, including draining ones. A gang moves only if the other hosts could
            hold it, so that gpurun stops no gang that could not start again.
        draining: host → when gangs that cannot move are stopped; None = the drain waits for them.
    """
    empty = Snapshot(inventory, unusable=dict.fromkeys(unusable, "out of use"), now_s=now_s)
    found = []
    for tenant in tenants:
        fate, why = _fate(tenant, empty)
        ends = [end for host in tenant.hosts if (end := draining[host]) is not None]
        until_s = min(ends) if ends and fate == "waits" else None
        if until_s is not None and now_s >= until_s:
            fate = "ends"
        found.append(Departure(tenant.gang.id, tenant.hosts, fate, why, until_s))
    return tuple(found)


def may_lose(members: Iterable[Grant], hosts: Collection[str], least: int | None) -> bool:
    """Return True if an elastic gang can continue without these hosts.

    Args:
        members: where its ranks run, in rank order. Its launcher is on the first host.
        least: the fewest GPUs that it may have; None = it is not elastic.
    """
    grants = tuple(members)
    if least is None or not grants or grants[0].host in hosts:
        return False
    return sum(len(grant.gpus) for grant in grants if grant.host not in hosts) >= least


def host_state(host: str, found: Iterable[Departure], *, is_empty: bool) -> str:
    """The state of a host that is being drained, for people: ``draining: 2 gangs leave, 1 must end first``."""
    if is_empty:
        return "drained"
    here = [departure.fate for departure in found if host in departure.hosts]
    waited, leave = here.count("waits"), len(here) - here.count("waits")
    leaving = count(leave, "gang leaves", "gangs leave") if leave else ""
    parts = [part for part in (leaving, f"{waited} must end first" if waited else "") if part]
    return f"draining: {', '.join(parts)}" if parts else "draining"


def in_words(departure: Departure, now_s: float) -> str:
    """Describe the decision for people; the sentence's subject is the gang."""
    match departure.fate:
        case "stops":
            return "is ending"
        case "shrinks":
            return f"releases {', '.join(departure.hosts)} and continues on its other hosts"
        case "moves":
            return "stops, is queued again and continues on other hosts"
        case "ends":
            return f"is stopped, because the drain's deadline is over; {departure.why}"
    end = ""
    if departure.until_s is not None:
        end = f", and is stopped {in_time(departure.until_s, now_s)} if it still runs"
    return f"must end before the drain is complete{end}: {departure.why}"


def _fate(tenant: Tenant, empty: Snapshot) -> tuple[Fate, str]:
    if tenant.stopping:
        return "stops", "the job is ending"
    if tenant.begun and tenant.may_shrink:
        return "shrinks", "the job is elastic and has enough GPUs on other hosts"
    if tenant.begun and not tenant.may_stop:
        return "waits", "the job is not preemptible, and max_restarts is 0"
    if (refused := _refused(tenant.gang, empty)) is not None:
        return "waits", f"no other hosts could run the job: {refused}"
    return "moves", "gpurun may restart the job" if tenant.begun else "the job's ranks have not started"


def _refused(gang: Gang, empty: Snapshot) -> str | None:
    """Return why the scheduler would not start the gang even if nothing else ran or waited; None if it would."""
    try:
        decisions = schedule(replace(empty, queue=(gang.but(kept=None),)))
    except BadInput as error:
        return error.message
    wait, never = decisions.waits.get(gang.id), decisions.never.get(gang.id)
    if never is not None:
        return never.message
    return None if wait is None or wait.reason is Reason.LOCALITY else wait.message
