"""More GPUs for an elastic gang that has fewer than it wants: in addition, or after a restart. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gpurun.scheduler.future import carried_out
from gpurun.scheduler.model import Decisions, Gang, Placement, Reason, Snapshot
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.pools import Tree, tree_of
from gpurun.scheduler.schedule import arrange, schedule


def growth(snapshot: Snapshot, gang: Gang, now: Placement, policy: Policy = DEFAULT) -> Placement | None:
    """Return what an elastic gang may take in addition, on hosts that it does not use yet; None if nothing.

    Waiting gangs come first: it gets no host on which a waiting gang may run, and nothing of a pool for which a gang
    waits. Its own racks come before others; its pool's limits apply.

    Args:
        snapshot: the gang is among its running ones.
        gang: with the `gpus` that it wants.
        now: all it holds, including what it is about to release.
    """
    asked, step = gang.wants.constraints, gang.step
    missing = (gang.gpus - now.gpus) // step * step
    if missing <= 0 or asked.locality == "host":
        return None
    decisions = schedule(snapshot, policy)
    if _pool_is_waited_for(snapshot, gang, decisions):
        return None
    after = carried_out(snapshot, decisions)
    others = _nobody_waits_for(after, _alike(snapshot, gang, now), decisions)
    near = tuple(name for name in others if snapshot.inventory.by_name[name].rack in now.racks)
    for hosts in dict.fromkeys((near, others if asked.locality == "any" else near)):
        more = replace(asked, hosts=hosts, generations=(now.generation,), prefer="any", locality_wait_s=0.0)
        rest = gang.but(id=f"{gang.id}+", gpus=missing, kept=None).wanting(min_gpus=step, constraints=more)
        starts = schedule(replace(after, queue=(rest,)), policy).starts if hosts else ()
        if starts:
            return starts[0][1]
    return None


def regrown(snapshot: Snapshot, gang: Gang, now: Placement, policy: Policy = DEFAULT) -> Placement | None:
    """Return the placement that an elastic gang would get if it stopped and was queued now; None unless it is larger.

    Waiting gangs come first here, too.

    Args:
        snapshot: the gang is among its running ones.
        gang: with the `gpus` that it wants.
        now: what it holds.
    """
    decisions = schedule(snapshot, policy)
    if now.gpus >= gang.gpus or _pool_is_waited_for(snapshot, gang, decisions):
        return None
    after = carried_out(snapshot, decisions)
    others = tuple(run for run in after.running if run.gang.id != gang.id)
    queue = (*after.queue, gang.but(requeued=True, kept=None))
    starts = schedule(replace(after, running=others, queue=queue), policy).starts
    found = next((placement for started, placement in starts if started.id == gang.id), None)
    if found is None or found.gpus <= now.gpus:
        return None
    mine = set(now.grants)
    more = tuple(grant.host for grant in found.grants if grant not in mine)
    return found if _nobody_waits_for(after, more, decisions) == more else None


def _waiting(snapshot: Snapshot, decisions: Decisions) -> Iterator[tuple[Gang, Reason]]:
    """The gangs that could run on the hosts that are in use now, and what they wait for."""
    for gang in snapshot.queue:
        wait = decisions.waits.get(gang.id)
        if wait is not None and wait.reason is not Reason.HOSTS:
            yield gang, wait.reason


def _pool_is_waited_for(snapshot: Snapshot, gang: Gang, decisions: Decisions) -> bool:
    """Returns True if a gang waits for the use of a pool in which the elastic gang counts, too."""
    tree = tree_of(snapshot.inventory.pools, snapshot.inventory.total_gpus)
    mine = _limited(tree, gang)
    return any(
        reason is Reason.POOL and not mine.isdisjoint(_limited(tree, other))
        for other, reason in _waiting(snapshot, decisions)
    )


def _limited(tree: Tree, gang: Gang) -> set[str]:
    leaf = tree.leaf_of(gang.wants.pool)
    return set() if leaf is None else {leaf, *(tree.nodes[leaf].above[:-1])}


def _nobody_waits_for(snapshot: Snapshot, hosts: tuple[str, ...], decisions: Decisions) -> tuple[str, ...]:
    """Of some hosts, those on which no gang that waits for GPUs may run."""
    arranged = arrange(snapshot)
    index, capacity = arranged.index, arranged.capacity
    may_use: dict[int, Callable[[int], bool]] = {}
    for gang, reason in _waiting(snapshot, decisions):
        shape = capacity.shape(gang)
        if reason is not Reason.POOL and shape not in may_use:
            may_use[shape] = capacity.may_use(index, gang)
    return tuple(host for host in hosts if not any(may(index.number[host]) for may in may_use.values()))


def _alike(snapshot: Snapshot, gang: Gang, now: Placement) -> tuple[str, ...]:
    """Hosts that ranks of the gang could be on as well: horovodrun takes one network interface for all."""
    inventory, wanted = snapshot.inventory, gang.wants.constraints.hosts
    interface = inventory.fabric_of(inventory.by_name[now.hosts[0]]).interface
    return tuple(
        host.name
        for host in inventory.hosts
        if host.generation == now.generation and host.name not in now.hosts and (not wanted or host.name in wanted)
        and inventory.fabric_of(host).interface == interface
    )  # fmt: skip
