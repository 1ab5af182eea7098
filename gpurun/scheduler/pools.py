"""Pools: how many GPUs each may use now.

As in Uber's Peloton (its documentation, "Resource pools" and "Hierarchical max-min fairness"): every pool has a
reservation, a limit and a share. It gets an entitlement from its parent's entitlement, in three phases:

1. its demand, up to its reservation; 2. of the rest, by share among the pools that want more, repeated until none does
or nothing is left; 3. what is still left, by share up to the limits.

Jobs directly in a pool with children, or in no pool, count as an unnamed child. Its reservation is what the other
children leave. So one rule covers the root, inner pools and clusters without pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpurun.errors import BadInput
from gpurun.inventory.model import Pool
from gpurun.inventory.pools import contradictions

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
