"""Pools: how many GPUs each may use now.

As in Uber's Peloton (its documentation, "Resource pools" and "Hierarchical max-min fairness"): every pool has a
reservation, a limit and a share. It gets an entitlement from its parent's entitlement, in three phases:

1. its demand, up to its reservation; 2. of the rest, by share among the pools that want more, repeated until none does
or nothing is left; 3. what is still left, by share up to the limits.

Jobs directly in a pool with children, or in no pool, count as an unnamed child. Its reservation is what the other
children leave. So one rule covers the root, inner pools and clusters without pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from gpurun.errors import BadInput
from gpurun.inventory.model import Pool, contradictions
from gpurun.quantities import count
from gpurun.scheduler.model import Gang, Reason, Refusal, Running, Snapshot, Wait, by_rank

ROOT = ""
OWN = "\0own"
"""Suffix of the unnamed child; no pool of an inventory can be called so."""

ENOUGH = 1e-9
"""GPUs; less than this is rounding."""


@dataclass(frozen=True)
class Node:
    """A pool in the tree.

    Attributes:
        reservation: at least the children's sum.
        above: its ancestors, nearest first, the root last.
    """

    name: str
    reservation: float
    limit: float
    share: float
    children: tuple[str, ...] = ()
    above: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tree:
    """All pools. Gangs live in leaves: see `leaf_of`."""

    nodes: Mapping[str, Node] = field(default_factory=dict)

    def leaf_of(self, pool: str | None) -> str | None:
        """The leaf in which a gang of this pool is counted; None if there is no such pool."""
        name = ROOT if pool is None else pool
        node = self.nodes.get(name)
        if node is None:
            return None
        return name + OWN if node.children else name

    def entitlements(self, capacity: float, demand: Mapping[str, float]) -> dict[str, float]:
        """What every pool may use now.

        Args:
            capacity: GPUs there are.
            demand: leaf → GPUs in use and wanted.
        """
        wanted = self._demands(ROOT, demand, {})
        found = {ROOT: min(capacity, self.nodes[ROOT].limit)}
        self._divide(ROOT, found, wanted)
        return found

    def _demands(self, name: str, demand: Mapping[str, float], into: dict[str, float]) -> dict[str, float]:
        node = self.nodes[name]
        for child in node.children:
            self._demands(child, demand, into)
        own = sum(into[child] for child in node.children) if node.children else demand.get(name, 0.0)
        into[name] = min(own, node.limit)
        return into

    def _divide(self, name: str, found: dict[str, float], demand: Mapping[str, float]) -> None:
        children = [self.nodes[child] for child in self.nodes[name].children]
        for child, amount in divide(found[name], children, demand).items():
            found[child] = amount
            self._divide(child, found, demand)


def divide(amount: float, pools: Sequence[Node], demand: Mapping[str, float]) -> dict[str, float]:
    """The three phases among the children of one pool."""
    wanted = {pool.name: min(demand.get(pool.name, 0.0), pool.limit) for pool in pools}
    reserved = {pool.name: min(wanted[pool.name], pool.reservation) for pool in pools}
    weights = {pool.name: pool.share for pool in pools}
    if sum(reserved.values()) > amount:  # hosts are out: what is reserved shrinks in proportion
        return _pour(amount, {pool.name: pool.reservation for pool in pools}, dict.fromkeys(wanted, 0.0), reserved)
    found = _pour(amount - sum(reserved.values()), weights, reserved, wanted)
    return _pour(amount - sum(found.values()), weights, found, {pool.name: pool.limit for pool in pools})


def _pour(
    amount: float, weights: Mapping[str, float], have: Mapping[str, float], most: Mapping[str, float]
) -> dict[str, float]:
    """Add `amount` to `have` by weight; what one cannot take (`most`) goes to the others."""
    found = dict(have)
    open_ = [name for name in weights if weights[name] > 0 and most[name] - found[name] > ENOUGH]
    while open_ and amount > ENOUGH:
        total = sum(weights[name] for name in open_)
        full = [name for name in open_ if most[name] - found[name] <= amount * weights[name] / total + ENOUGH]
        if not full:
            for name in open_:
                found[name] += amount * weights[name] / total
            break
        for name in full:
            amount -= most[name] - found[name]
            found[name] = most[name]
        open_ = [name for name in open_ if name not in full]
    return found


def tree_of(pools: Sequence[Pool], capacity: int) -> Tree:
    """The tree of an inventory's pools.

    Args:
        capacity: GPUs of the whole inventory.

    Raises:
        BadInput: names the pool: a cycle, a parent that is not there, a reservation above the limit, children or
            pools that together reserve more than there is, a share or a number that cannot be.
    """
    for found in contradictions(pools, capacity):
        raise BadInput(found.message)
    named = {pool.name: pool for pool in pools}
    children: dict[str, list[str]] = {}
    for pool in pools:
        children.setdefault(pool.parent or ROOT, []).append(pool.name)
    nodes: dict[str, Node] = {}
    _grow(Pool(ROOT, reservation=capacity), named, children, (), nodes)
    return Tree(nodes)


def _grow(
    pool: Pool,
    named: Mapping[str, Pool],
    children: Mapping[str, Sequence[str]],
    above: tuple[str, ...],
    nodes: dict[str, Node],
) -> float:
    below = sum(_grow(named[name], named, children, (pool.name, *above), nodes) for name in children.get(pool.name, ()))
    reservation = max(float(pool.reservation), below)
    limit = float("inf") if pool.limit is None else float(pool.limit)
    names = tuple(children.get(pool.name, ()))
    if names:
        own = Node(pool.name + OWN, reservation - below, limit, 1.0, above=(pool.name, *above))
        nodes[own.name] = own
        names = (*names, own.name)
    nodes[pool.name] = Node(pool.name, reservation, limit, pool.share, names, above)
    return reservation


# The pools' account of one pass: GPUs in use, GPUs still allowed, and the order of gangs.


RESERVED, ENTITLED, BORROWING = 0, 1, 2
"""Within the pool's reservation; within its present entitlement; beyond it."""


@dataclass(frozen=True)
class Bound:
    """A number of GPUs that the gangs of a pool may not exceed together.

    Attributes:
        firm: it is the pool's reservation, for gangs that cannot be preempted; otherwise it is the pool's limit.
        used: GPUs that count against it now.
    """

    pool: str
    firm: bool
    most: float
    used: int

    @property
    def key(self) -> tuple[str, bool]:
        """Return a key that distinguishes it from the other bounds of a pass."""
        return self.pool, self.firm

    def never(self, gang: Gang) -> str:
        """Return why the gang can never start within it."""
        name, needs = shown(self.pool), f"the job needs {count(gang.least, 'GPU')}"
        if not self.firm:
            return f"{needs}; {name} is limited to {self.most:g}"
        reserves = f"{name} {'reserves' if name.startswith('pool') else 'has'} {self.most:g}"
        return f"{needs} and is not preemptible; {reserves}, and only preemptible jobs can borrow more"

    def full(self, kept: Sequence[Gang]) -> str:
        """Return why no gang can start within it now.

        Args:
            kept: the waiting gangs for which some of its GPUs are kept.
        """
        name, promised = shown(self.pool), sum(gang.gpus for gang in kept)
        used = self.used - promised
        more = f"; {promised} are kept for {', '.join(gang.id for gang in kept)}" if kept else ""
        if not self.firm:
            return f"{name} uses {used} of at most {self.most:g} GPUs{more}"
        those = f"that {name} reserves" if name.startswith("pool") else f"of {name}"
        return f"{used} of the {self.most:g} GPUs {those} are in use by jobs that are not preemptible{more}"


class Book:
    """Updated by `start`, `withdraw` and `stop` during the pass.

    Attributes:
        entitlements: pool → GPUs that it may use now.
        standing: gang → RESERVED, ENTITLED or BORROWING, counting the gangs of its pool that rank before it.
        order: the waiting gangs by standing, then by rank: the order of the pass.
    """

    def __init__(self, snapshot: Snapshot, capacity: int) -> None:
        self.tree: Tree = tree_of(snapshot.inventory.pools, snapshot.inventory.total_gpus)
        self._aside: dict[tuple[str, bool], dict[str, Gang]] = {}  # what a bound leaves is for the first of these
        self._kept: dict[str, Gang] = {}  # waiting gangs for which GPUs are kept
        self._owed: set[str] = set()  # those for which gangs were stopped
        self.held: dict[str, int] = {}  # leases, those of stopping gangs too: what limits are about
        self.firm: dict[str, int] = {}  # of it, gangs that cannot be preempted: what reservations are about
        for running in snapshot.running:
            self._add(running.gang)
        self._leaving = [running.gang for running in snapshot.running if running.stopping]
        active = [running.gang for running in snapshot.running if not running.stopping]
        self.active = self._demand(active)  # leaf → GPUs of gangs that are not being stopped
        self.entitlements = self.tree.entitlements(capacity, self._demand((*active, *snapshot.queue)))
        ranked = by_rank(snapshot.queue)
        self.standing = self._standing(snapshot.running, ranked)
        places: tuple[list[Gang], ...] = [], [], []
        for gang in ranked:
            places[self.standing.get(gang.id, BORROWING)].append(gang)
        self.order = [gang for place in places for gang in place]

    def start(self, gang: Gang) -> None:
        """Count a gang that has just been placed."""
        self._add(gang)
        for others in self._aside.values():
            others.pop(gang.id, None)

    def keep(self, gang: Gang, *, is_owed: bool) -> None:
        """Count a waiting gang for which GPUs are kept.

        Args:
            is_owed: gangs were stopped for it. What they gave back is left to no older gang, nor to themselves.
        """
        self.start(gang)
        self._kept[gang.id] = gang
        if is_owed:
            self._owed.add(gang.id)

    def withdraw(self, gang: Gang) -> None:
        """Stop counting a gang for which GPUs were kept."""
        self._add(gang, -1)
        self._kept.pop(gang.id, None)

    def stop(self, gang: Gang) -> None:
        """Count a gang that has just been preempted."""
        leaf = self.tree.leaf_of(gang.wants.pool)
        self._leaving.append(gang)
        if leaf is not None:
            self.active[leaf] -= gang.gpus

    def lends(self, gang: Gang) -> bool:
        """Return True if a running gang's pool is beyond its entitlement, or the gang is beyond it within its pool."""
        leaf = self.tree.leaf_of(gang.wants.pool)
        if leaf is None or not gang.wants.preemptible:
            return False
        return self.standing[gang.id] == BORROWING or self.active[leaf] > self.entitlements[leaf] + ENOUGH

    def may_take(self, gangs: Sequence[Gang]) -> bool:
        """Return True if none of these gangs would be within its pool's entitlement after it stopped.

        So gangs do not take the same GPUs from each other in turn.
        """
        by_leaf: dict[str | None, list[Gang]] = {}
        for gang in gangs:
            by_leaf.setdefault(self.tree.leaf_of(gang.wants.pool), []).append(gang)
        for leaf, members in by_leaf.items():
            if leaf is None or all(self.standing[gang.id] == BORROWING for gang in members):
                continue
            left = self.active[leaf] - sum(gang.gpus for gang in members)
            if left + min(gang.gpus for gang in members) <= self.entitlements[leaf] + ENOUGH:
                return False
        return True

    def gate(self, gang: Gang) -> Refusal | Wait | None:
        """Return what prevents a gang's start with its fewest GPUs even if they were free; None if nothing does."""
        leaf = self.tree.leaf_of(gang.wants.pool)
        if leaf is None:
            return Refusal(True, Reason.POOL, f"there is no pool {gang.wants.pool!r} in the inventory")
        bounds = self._bounds(gang, leaf)
        for bound in bounds:
            if gang.least > bound.most:
                return Refusal(True, Reason.POOL, bound.never(gang))
        for bound in bounds:
            if bound.used + gang.least > bound.most:
                return self._wait_for(bound, gang)
            if self._left(bound, gang) < gang.least:
                first = next(iter(self._aside[bound.key]))
                left = shown(bound.pool) if bound.pool == OWN else f"the rest of {shown(bound.pool)}"
                return Wait(Reason.POOL, f"gpurun keeps {left} for {first}, which has waited longest", behind=first)
        return None

    def _wait_for(self, bound: Bound, gang: Gang) -> Wait:
        """Return the wait for a bound that is reached: by gangs that run, or by those for which GPUs are kept."""
        kept = [other for other in self._kept.values() if self._counts(other, bound)]
        is_kept = bound.used - sum(other.gpus for other in kept) + gang.least <= bound.most
        behind = kept[0].id if is_kept else bound.pool.removesuffix(OWN) or None
        return Wait(Reason.POOL, bound.full(kept), behind=behind)

    def _counts(self, gang: Gang, bound: Bound) -> bool:
        leaf = self.tree.leaf_of(gang.wants.pool)
        if leaf is None or (bound.firm and gang.wants.preemptible):
            return False
        return bound.pool == leaf or (not bound.firm and bound.pool in self.tree.nodes[leaf].above)

    def allows(self, gang: Gang) -> int:
        """Return the most GPUs with which an elastic gang may start now."""
        leaf = self.tree.leaf_of(gang.wants.pool)
        bounds = [] if leaf is None else self._bounds(gang, leaf)
        return int(min([gang.gpus, *(self._left(bound, gang) for bound in bounds)]))

    def set_aside(self, overdue: Iterable[Gang]) -> None:
        """Leave what pools may still use to the oldest of these gangs that wait, because younger ones could overtake it
        for ever.

        Args:
            overdue: gangs whose patience is over, the oldest first.
        """
        found: dict[tuple[str | None, bool, int], list[tuple[str, bool]]] = {}
        for gang in overdue:
            kind = gang.wants.pool, gang.wants.preemptible, gang.least
            if kind not in found:
                leaf = self.tree.leaf_of(gang.wants.pool)
                bounds = [] if leaf is None or isinstance(self.gate(gang), Refusal) else self._bounds(gang, leaf)
                found[kind] = [bound.key for bound in bounds]
            for key in found[kind]:
                self._aside.setdefault(key, {})[gang.id] = gang

    def passes_without(self, gang: Gang, gone: Sequence[Gang], *, is_owed: bool = False) -> bool:
        """Return True if the pools would let the gang start once these gangs, and those that are stopping, have
        ended.

        Args:
            is_owed: gangs were stopped for it.
        """
        if is_owed:
            self._owed.add(gang.id)
        for other in (*gone, *self._leaving):
            self._add(other, -1)
        passes = self.gate(gang) is None
        for other in (*gone, *self._leaving):
            self._add(other)
        if not passes:
            self._owed.discard(gang.id)
        return passes

    def _bounds(self, gang: Gang, leaf: str) -> list[Bound]:
        bounds = []
        if not gang.wants.preemptible:
            bounds.append(Bound(leaf, True, self.tree.nodes[leaf].reservation, self.firm.get(leaf, 0)))
        for name in (leaf, *self.tree.nodes[leaf].above):
            limit = self.tree.nodes[name].limit
            if limit != float("inf"):
                bounds.append(Bound(name, False, limit, self.held.get(name, 0)))
        return bounds

    def _left(self, bound: Bound, gang: Gang) -> float:
        waiting = () if gang.id in self._owed else self._aside.get(bound.key, {}).values()
        other = next(iter(waiting), None)
        aside = other.least if other is not None and other.age < gang.age else 0
        return bound.most - bound.used - aside

    def _add(self, gang: Gang, times: int = 1) -> None:
        leaf = self.tree.leaf_of(gang.wants.pool)
        if leaf is None:
            return  # its pool is gone from the inventory: it may end in peace
        for name in (leaf, *self.tree.nodes[leaf].above):
            self.held[name] = self.held.get(name, 0) + gang.gpus * times
        if not gang.wants.preemptible:
            self.firm[leaf] = self.firm.get(leaf, 0) + gang.gpus * times

    def _demand(self, gangs: Iterable[Gang]) -> dict[str, float]:
        pools: dict[str | None, float] = {}
        for gang in gangs:
            pools[gang.wants.pool] = pools.get(gang.wants.pool, 0.0) + gang.gpus
        demand: dict[str, float] = {}
        for pool, gpus in pools.items():
            leaf = self.tree.leaf_of(pool)
            if leaf is not None:
                demand[leaf] = demand.get(leaf, 0.0) + gpus
        return demand

    def _standing(self, running: Sequence[Running], queue: Sequence[Gang]) -> dict[str, int]:
        """Compute the standing. Gangs that cannot be preempted count first, then by rank; running before waiting.

        A waiting gang counts with the fewest GPUs that it needs.

        Args:
            queue: sorted by rank.
        """
        members: dict[str, dict[tuple[bool, int, bool], list[Gang]]] = {leaf: {} for leaf in self.tree.nodes}
        leaf_of = cache(self.tree.leaf_of)
        for waits, gangs in ((False, by_rank(run.gang for run in running if not run.stopping)), (True, queue)):
            for gang in gangs:
                leaf = leaf_of(gang.wants.pool)
                if leaf is not None:
                    members[leaf].setdefault((gang.wants.preemptible, -gang.wants.priority, waits), []).append(gang)
        standing = {}
        for leaf, groups in members.items():
            reserved, entitled, used = self.tree.nodes[leaf].reservation + ENOUGH, self.entitlements[leaf] + ENOUGH, 0
            for group in sorted(groups):
                for gang in groups[group]:
                    used += gang.least if group[2] else gang.gpus
                    standing[gang.id] = RESERVED if used <= reserved else ENTITLED if used <= entitled else BORROWING
        return standing


def shown(name: str) -> str:
    """Return a pool's name for people."""
    if name in ("", OWN):
        return "the cluster" if not name else "the share that no pool reserves"
    return f"pool {name.removesuffix(OWN)}"
