"""Choose the next point, and decide which trials to stop early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpurun.errors import BadInput
from gpurun.studies.sweep_plan import SweepPlan, grid_point
from gpurun.studies.trials import JournalEntry, Point

if TYPE_CHECKING:
    from gpurun.studies.study import Study


class Searcher:
    """Returns points, and processes trials in the order of the journal.

    A grid without early stops needs no library. Everything else uses Optuna (`gpurun.studies.study`), an extra: ``pip
    install 'gpurun[sweep]'``.

    Raises:
        BadInput: the plan needs Optuna, which is not installed.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._study: Study | None = None
        if plan.search == "grid" and plan.stop is None:
            return
        try:
            from gpurun.studies.study import Study  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise BadInput(
                f"the sweep needs Optuna, which is not installed: {error}", hint="run: pip install 'gpurun[sweep]'"
            ) from error
        self._study = Study(plan)

    def next_point(self, number: int) -> Point:
        """Return the parameters of trial `number`, the next one."""
        if self._study is None or self._plan.search == "grid":
            return grid_point(self._plan.space, number)
        return self._study.draw_point(number)

    def take(self, entry: JournalEntry) -> bool:
        """Process one entry, also of an earlier conductor; return whether a report requires the trial's early stop."""
        return self._study is not None and self._study.take(entry)
