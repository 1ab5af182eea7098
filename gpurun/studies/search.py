"""Choose the next point, and decide which trials to stop early.

A grid without early stops needs no library. Everything else uses Optuna (`gpurun.studies.study`), an extra: ``pip
install 'gpurun[sweep]'``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol

from gpurun.errors import BadInput
from gpurun.studies import sweep_plan
from gpurun.studies.sweep_plan import JournalEntry, SweepPlan, Value


class Searcher(Protocol):
    """Returns points, and processes trials in the order of the journal."""

    def next_point(self, number: int) -> Mapping[str, Value]:
        """The parameters of trial `number`, the next one."""
        ...

    def take(self, entry: JournalEntry) -> bool:
        """Process one entry, also of an earlier conductor; return whether a report requires the trial's early stop."""
        ...


def searcher_for(plan: SweepPlan) -> Searcher:
    """What a plan needs.

    Raises:
        BadInput: it needs Optuna, which is not installed.
    """
    if plan.search == "grid" and plan.stop is None:
        return Grid(plan)
    try:
        from gpurun.studies.study import Study  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BadInput(
            f"the sweep needs Optuna, which is not installed: {error}", hint="run: pip install 'gpurun[sweep]'"
        ) from error
    return Study(plan, Grid(plan).next_point if plan.search == "grid" else None)


class Grid:
    """All points in order; nothing is stopped early."""

    def __init__(self, plan: SweepPlan) -> None:
        self._space = plan.space
        self._points: Iterator[dict[str, Value]] | None = None

    def next_point(self, number: int) -> Mapping[str, Value]:
        """Point `number`. Points are drawn in order; the first call may pass some over."""
        if self._points is None:
            self._points = itertools.islice(sweep_plan.grid(self._space), number, None)
        return next(self._points)

    def take(self, entry: JournalEntry) -> bool:  # noqa: ARG002 - a grid learns nothing
        """Nothing is stopped early."""
        return False
