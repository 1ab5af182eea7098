"""What the ranks of a trial report of the sweep's metric, as the job's log has it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from gpurun.state.path import StatePath
from gpurun.supervisor.loglines import LogTail

MOST_OTHERS, MOST_NAME = 5, 64


class MetricTail:
    """Reads one job's reports as they come. Where several ranks report the metric, the lowest of them counts.

    Args:
        after: the last step that is known already; None = none.
    """

    def __init__(self, log: StatePath, metric: str, after: int | None) -> None:
        self._tail = LogTail(log)
        self._metric = metric
        self._step = after
        self._rank: int | None = None
        self.others: set[str] = set()
        """Names of other metrics that were reported, some of them."""

    def new(self) -> Iterator[tuple[int, float | None]]:
        """Steps, each higher than the one before, and their values; None for what is not a finite number.

        A restarted attempt repeats steps that are already known; these are skipped.
        """
        for report in self._tail.new_reports():
            value = report.metrics.get(self._metric)
            if value is None and len(self.others) < MOST_OTHERS:
                self.others.update(name[:MOST_NAME] for name in list(report.metrics)[:MOST_OTHERS])
            if value is None or (self._rank is not None and report.rank > self._rank):
                continue
            self._rank = report.rank
            if self._step is None or report.step > self._step:
                self._step = report.step
                yield report.step, value if isfinite(value) else None
