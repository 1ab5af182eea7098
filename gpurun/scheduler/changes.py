"""The smallest change that would start a gang now. Each suggestion was tried with a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpurun.errors import BadInput
from gpurun.inventory.model import Inventory, Pool
from gpurun.jobs.spec import Constraints
from gpurun.quantities.counts import count
from gpurun.quantities.times import duration
from gpurun.scheduler.model import Decisions, Gang, Reason, Snapshot
from gpurun.scheduler.policy import Policy
from gpurun.scheduler.pools import tree_of
from gpurun.scheduler.schedule import schedule

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
