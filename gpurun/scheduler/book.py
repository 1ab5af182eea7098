"""The pools' book of one pass: what is used, what may still be, and in which order gangs are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpurun.scheduler.model import Gang, Reason, Refusal, Running, Snapshot, Wait
from gpurun.scheduler.pools import ENOUGH, OWN, Tree, tree_of

RESERVED, ENTITLED, BORROWING = 0, 1, 2
"""Inside the pool's reservation; inside what it is entitled to now; beyond."""


class Book:
    """Kept current by `start` and `promise` as the pass goes on.

    Attributes:
        entitlements: pool → GPUs it may use now.
        standing: gang → RESERVED, ENTITLED or BORROWING, counting the gangs of its pool that rank before it.
    """

    def __init__(self, snapshot: Snapshot, capacity: int) -> None:
        self.tree: Tree = tree_of(snapshot.inventory.pools, snapshot.inventory.total_gpus)
        self.held: dict[str, int] = {}  # leases, those of stopping gangs too: what limits are about
        self.firm: dict[str, int] = {}  # of it, gangs that cannot be preempted: what reservations are about
        for running in snapshot.running:
            self._add(running.gang)
        self._leaving = [running.gang for running in snapshot.running if running.stopping]
        active = [running.gang for running in snapshot.running if not running.stopping]
        self.active = self._demand(active)  # leaf → GPUs of gangs that are not being stopped
        self.entitlements = self.tree.entitlements(capacity, self._demand((*active, *snapshot.queue)))
        self.standing = self._standing(snapshot.running, snapshot.queue)

    def start(self, gang: Gang) -> None:
        """Count a gang that has just been placed."""
        self._add(gang)

    def stop(self, gang: Gang) -> None:
        """Count a gang that has just been told to stop."""
        leaf = self.tree.leaf_of(gang.pool)
        self._leaving.append(gang)
        if leaf is not None:
            self.active[leaf] -= gang.gpus

    def lends(self, gang: Gang) -> bool:
        """True if a running gang's pool is beyond its entitlement, or the gang is so within its pool."""
        leaf = self.tree.leaf_of(gang.pool)
        if leaf is None or not gang.preemptible:
            return False
        return self.standing[gang.id] == BORROWING or self.active[leaf] > self.entitlements[leaf] + ENOUGH

    def may_take(self, gangs: Sequence[Gang]) -> bool:
        """True if no pool is left with so little that one of these would be entitled to come back.

        That is what keeps gangs from taking the same GPUs from each other in turn.
        """
        by_leaf: dict[str | None, list[Gang]] = {}
        for gang in gangs:
            by_leaf.setdefault(self.tree.leaf_of(gang.pool), []).append(gang)
        for leaf, members in by_leaf.items():
            if leaf is None or all(self.standing[gang.id] == BORROWING for gang in members):
                continue
            left = self.active[leaf] - sum(gang.gpus for gang in members)
            if left + min(gang.gpus for gang in members) <= self.entitlements[leaf] + ENOUGH:
                return False
        return True

    def gate(self, gang: Gang) -> Refusal | Wait | None:
        """What keeps a gang from starting even if there were room; None if nothing does."""
        leaf = self.tree.leaf_of(gang.pool)
        if leaf is None:
            return Refusal(True, Reason.POOL, f"there is no pool {gang.pool!r} in the inventory")
        node = self.tree.nodes[leaf]
        name = shown(leaf)
        if not gang.preemptible:
            if gang.gpus > node.reservation:
                return Refusal(True, Reason.POOL, _too_firm(gang, name, node.reservation))
            if self.firm.get(leaf, 0) + gang.gpus > node.reservation:
                used = f"{self.firm.get(leaf, 0)} of the {node.reservation:g} GPUs that {name} reserves"
                return Wait(Reason.POOL, f"{used} are in use by gangs that are not preemptible", behind=gang.pool)
        for above in (leaf, *node.above):
            limit = self.tree.nodes[above].limit
            if gang.gpus > limit:
                return Refusal(True, Reason.POOL, f"{gang.gpus} GPUs wanted; {shown(above)} is limited to {limit:g}")
            if self._used(above) + gang.gpus > limit:
                return Wait(
                    Reason.POOL, f"{shown(above)} uses {self._used(above)} of at most {limit:g} GPUs", behind=gang.pool
                )
        return None

    def passes_without(self, gang: Gang, gone: Sequence[Gang]) -> bool:
        """True if nothing would keep the gang from starting once these, and those being stopped, have ended."""
        for other in (*gone, *self._leaving):
            self._add(other, -1)
        passes = self.gate(gang) is None
        for other in (*gone, *self._leaving):
            self._add(other)
        return passes

    def _used(self, name: str) -> int:
        return self.held.get(name, 0)

    def _add(self, gang: Gang, times: int = 1) -> None:
        leaf = self.tree.leaf_of(gang.pool)
        if leaf is None:
            return  # its pool is gone from the inventory: it may end in peace
        for name in (leaf, *self.tree.nodes[leaf].above):
            self.held[name] = self.held.get(name, 0) + gang.gpus * times
        if not gang.preemptible:
            self.firm[leaf] = self.firm.get(leaf, 0) + gang.gpus * times

    def _demand(self, gangs: Iterable[Gang]) -> dict[str, float]:
        demand: dict[str, float] = {}
        for gang in gangs:
            leaf = self.tree.leaf_of(gang.pool)
            if leaf is not None:
                demand[leaf] = demand.get(leaf, 0.0) + gang.gpus
        return demand

    def _standing(self, running: Sequence[Running], queue: Sequence[Gang]) -> dict[str, int]:
        """Gangs that cannot be preempted are counted first, then by rank; running before waiting."""
        by_leaf: dict[str, list[tuple[bool, int, bool, Gang]]] = {}
        waiting = [(True, gang) for gang in queue]
        for waits, gang in [*((False, r.gang) for r in running if not r.stopping), *waiting]:
            leaf = self.tree.leaf_of(gang.pool)
            if leaf is not None:
                by_leaf.setdefault(leaf, []).append((gang.preemptible, -gang.priority, waits, gang))
        standing = {}
        for leaf, members in by_leaf.items():
            reserved, entitled, used = self.tree.nodes[leaf].reservation, self.entitlements[leaf], 0
            for *_, gang in sorted(members, key=lambda item: (*item[:3], item[3].rank)):
                used += gang.gpus
                inside = ENTITLED if used <= entitled + ENOUGH else BORROWING
                standing[gang.id] = RESERVED if used <= reserved + ENOUGH else inside
        return standing


def shown(name: str) -> str:
    """A pool's name for people."""
    if name in ("", OWN):
        return "the cluster" if not name else "what no pool reserves"
    return f"pool {name.removesuffix(OWN)}"


def _too_firm(gang: Gang, pool: str, reservation: float) -> str:
    return (
        f"{gang.gpus} GPUs wanted by a gang that is not preemptible; {pool} "
        f"{'reserves' if pool.startswith('pool') else 'has'} {reservation:g}: only preemptible gangs borrow"
    )
