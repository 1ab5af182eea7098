"""Taking back what was lent: which gangs to stop so that one that is entitled to GPUs gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from gpurun.scheduler.index import Index
from gpurun.scheduler.model import Gang, Placement, Running

Try = Callable[[Index, Gang], Placement | None]
Fair = Callable[[Sequence[Running]], bool]

MAX_TRIES = 128
"""Pairs of victims tried one by one before victims are added up by cost."""


def cost(running: Running, now_s: float) -> tuple[int, float, float, str]:
    """How bad it is to stop a gang: lowest priority first, then the newest, then the least work lost."""
    saved = running.started_s if running.checkpoint_s is None else max(running.checkpoint_s, running.started_s)
    return (running.gang.priority, -running.started_s, running.gang.gpus * (now_s - saved), running.gang.id)


def choose_victims(
    index: Index, gang: Gang, lenders: Iterable[Running], now_s: float, attempt: Try, fair: Fair
) -> tuple[tuple[Running, ...], Placement] | None:
    """The fewest and cheapest gangs without which this one fits, and where it then goes; None if nothing helps.

    Whole gangs only. Leaves the index as it was.

    Args:
        lenders: running gangs that may be stopped.
        fair: whether these may be stopped together.
    """
    ranked = sorted(lenders, key=lambda running: cost(running, now_s))
    if _without(index, gang, ranked, attempt) is None:
        return None
    singles = ((running,) for running in ranked)
    pairs = (pair for pair, _ in zip(combinations(ranked, 2), range(MAX_TRIES), strict=False))
    for few in (*singles, *pairs):
        placement = _without(index, gang, few, attempt) if fair(few) else None
        if placement is not None:
            return few, placement
    return _many(index, gang, ranked, attempt, fair) or _many(index, gang, _fairly(ranked, fair), attempt, fair)


def _many(
    index: Index, gang: Gang, ranked: Sequence[Running], attempt: Try, fair: Fair
) -> tuple[tuple[Running, ...], Placement] | None:
    """The cheapest that are enough; of them, those on whose GPUs the gang would run and that cannot be spared."""
    enough = _first_enough(index, gang, ranked, attempt)
    placement = _without(index, gang, enough, attempt)
    if placement is None:
        return None
    wanted = dict(index.masks(placement))
    hit = [run for run in enough if any(wanted.get(n, 0) & mask for n, mask in index.masks(run.placement))]
    chosen = tuple(_pruned(index, gang, hit, attempt))
    found = _without(index, gang, chosen, attempt)
    return (chosen, found) if found is not None and fair(chosen) else None


def _fairly(ranked: Sequence[Running], fair: Fair) -> list[Running]:
    taken: list[Running] = []
    for run in ranked:
        if fair([*taken, run]):
            taken.append(run)
    return taken


def _first_enough(index: Index, gang: Gang, ranked: Sequence[Running], attempt: Try) -> Sequence[Running]:
    low, high = 1, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if _without(index, gang, ranked[:middle], attempt) is not None:
            high = middle
        else:
            low = middle + 1
    return ranked[:low]


def _pruned(index: Index, gang: Gang, victims: Sequence[Running], attempt: Try) -> Sequence[Running]:
    """Spare whoever need not be stopped, the dearest first."""
    kept = list(victims)
    for running in reversed(victims):
        fewer = [other for other in kept if other is not running]
        if _without(index, gang, fewer, attempt) is not None:
            kept = fewer
    return kept


def _without(index: Index, gang: Gang, victims: Sequence[Running], attempt: Try) -> Placement | None:
    given = []
    for running in victims:
        masks = [(n, mask & ~index.free[n]) for n, mask in index.masks(running.placement)]
        index.give(masks)
        given.append(masks)
    placement = attempt(index, gang)
    for masks in given:
        index.take(masks)
    return placement
