"""The consistency rules of pools, for the inventory's validation and for the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpurun.documents.problems import shown
from gpurun.inventory.model import Pool
from gpurun.quantities.counts import count


@dataclass(frozen=True)
class Contradiction:
    """A broken rule.

    Attributes:
        pool: the pool that breaks it; None = all pools together.
        allowed: valid values.
    """

    pool: str | None
    message: str
    allowed: tuple[str, ...] = ()


def contradictions(pools: Sequence[Pool], total_gpus: int) -> list[Contradiction]:
    """Return all errors in the pools. Checks the sums only if each single pool is valid.

    Args:
        total_gpus: GPUs of the whole inventory.
    """
    named = {pool.name: pool for pool in pools}
    return [found for pool in pools for found in _alone(pool, named)] or list(_sums(pools, total_gpus))


def _alone(pool: Pool, named: Mapping[str, Pool]) -> Iterator[Contradiction]:
    name = f"pool {pool.name}"
    if pool.parent is not None and pool.parent not in named:
        yield Contradiction(pool.name, f"{name}: there is no pool {shown(pool.parent)}", tuple(named))
    line, parent = [pool.name], pool.parent
    while parent is not None and parent in named and parent not in line:
        line.append(parent)
        parent = named[parent].parent
    if parent == pool.name:
        yield Contradiction(pool.name, f"{name} is its own parent: {' → '.join([*line, parent])}")
    if pool.reservation < 0 or (pool.limit is not None and pool.limit < 0) or not 0 <= pool.share < float("inf"):
        yield Contradiction(pool.name, f"{name}: reservation, limit and share must not be negative")
    elif pool.limit is not None and pool.reservation > pool.limit:
        yield Contradiction(pool.name, f"{name}: reservation {pool.reservation} is above its limit {pool.limit}")


def _sums(pools: Sequence[Pool], total_gpus: int) -> Iterator[Contradiction]:
    children: dict[str | None, list[Pool]] = {}
    for pool in pools:
        children.setdefault(pool.parent, []).append(pool)

    def reserved(pool: Pool) -> int:
        return max(pool.reservation, sum(map(reserved, children.get(pool.name, ()))))

    for pool in pools:
        below = sum(map(reserved, children.get(pool.name, ())))
        if pool.reservation and below > pool.reservation:
            said = f"its children reserve {count(below, 'GPU')}, but its own reservation is {pool.reservation}"
            yield Contradiction(pool.name, f"pool {pool.name}: {said}")
        elif pool.limit is not None and below > pool.limit:
            said = f"its children reserve {count(below, 'GPU')}, but its limit is {pool.limit}"
            yield Contradiction(pool.name, f"pool {pool.name}: {said}")
    together = sum(map(reserved, children.get(None, ())))
    if together > total_gpus:
        yield Contradiction(
            None, f"the pools reserve {count(together, 'GPU')} together, but the inventory has {total_gpus}"
        )
