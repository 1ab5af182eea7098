"""Preemption: decide which gangs to stop so that a gang gets the GPUs to which it is entitled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from gpurun.scheduler.capacity import Try
from gpurun.scheduler.index import Index, Masks
from gpurun.scheduler.model import Gang, Placement, Running

Rule = Callable[[Sequence[Running]], bool]

MAX_TRIES = 128
"""Pairs of victims tried one by one before victims are added up by cost."""


def cost(running: Running, now_s: float) -> tuple[int, float, float, str]:
    """Return how bad it is to stop a gang: lowest priority first, then the newest, then the least work lost."""
    saved = running.granted_s if running.checkpoint_s is None else max(running.checkpoint_s, running.granted_s)
    return (running.gang.wants.priority, -running.granted_s, running.gang.gpus * (now_s - saved), running.gang.id)


class Hunt:
    """The search for the gangs to stop for one gang. Leaves the index as it was.

    Args:
        lenders: running gangs that may be stopped, each with the GPUs that the gang may have of them.
        attempt: places the gang.
        fair: returns whether these may be stopped together.
        enough: returns whether the gang's pools would let it start without these.
    """

    def __init__(
        self,
        index: Index,
        gang: Gang,
        lenders: Sequence[tuple[Running, Masks]],
        now_s: float,
        attempt: Try,
        fair: Rule,
        enough: Rule,
    ) -> None:
        self.index, self.gang, self.attempt, self.fair, self.enough = index, gang, attempt, fair, enough
        self.ranked = sorted((running for running, _ in lenders), key=lambda running: cost(running, now_s))
        self._masks = {running.gang.id: masks for running, masks in lenders}

    def victims(self) -> tuple[tuple[Running, ...], Placement] | None:
        """Return the fewest and cheapest gangs to stop, and the gang's placement then; None if nothing helps."""
        if self._without(self.ranked) is None:
            return None
        singles = ((running,) for running in self.ranked)
        pairs = (pair for pair, _ in zip(combinations(self.ranked, 2), range(MAX_TRIES), strict=False))
        for few in (*singles, *pairs):
            placement = self._without(few) if self.fair(few) else None
            if placement is not None:
                return few, placement
        return self._many(self.ranked) or self._many(self._fairly())

    def _many(self, ranked: Sequence[Running]) -> tuple[tuple[Running, ...], Placement] | None:
        """The cheapest that are enough; of them, those on whose GPUs the gang would run and that are needed."""
        enough = self._first_enough(ranked)
        placement = self._without(enough)
        if placement is None:
            return None
        wanted = dict(self.index.masks(placement))
        hit = [run for run in enough if any(wanted.get(n, 0) & mask for n, mask in self._masks[run.gang.id])]
        chosen = tuple(self._pruned(hit if self.enough(hit) else enough))
        found = self._without(chosen)
        return (chosen, found) if found is not None and self.fair(chosen) else None

    def _fairly(self) -> list[Running]:
        taken: list[Running] = []
        for run in self.ranked:
            if self.fair([*taken, run]):
                taken.append(run)
        return taken

    def _first_enough(self, ranked: Sequence[Running]) -> Sequence[Running]:
        low, high = 1, len(ranked)
        while low < high:
            middle = (low + high) // 2
            if self._without(ranked[:middle]) is not None:
                high = middle
            else:
                low = middle + 1
        return ranked[:low]

    def _pruned(self, victims: Sequence[Running]) -> Sequence[Running]:
        """Spare victims that need not be stopped, the most expensive first."""
        kept = list(victims)
        for running in reversed(victims):
            fewer = [other for other in kept if other is not running]
            if self._without(fewer) is not None:
                kept = fewer
        return kept

    def _without(self, victims: Sequence[Running]) -> Placement | None:
        if not self.enough(victims):
            return None
        given = []
        for running in victims:
            masks = [(n, mask & ~self.index.free[n]) for n, mask in self._masks[running.gang.id]]
            self.index.give(masks)
            given.append(masks)
        placement = self.attempt(self.index, self.gang)
        for masks in given:
            self.index.take(masks)
        return placement
