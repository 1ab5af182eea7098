"""What the ranks of a trial report of the sweep's metric, as the job's log has it."""

from __future__ import annotations

from math import isfinite

from gpurun.state.path import StatePath
from gpurun.supervisor.loglines import LogTail, RankReport, Speaker
from gpurun.sweeps.curves import add_report

MOST_OTHERS, MOST_NAME = 5, 64
Known = tuple[int, float | None]


class MetricTail:
    """Reads one job's reports as they come.

    The log alone decides which reports count: those of a `Speaker`, of which a later one may replace earlier ones
    (`add_report`). So each conductor comes to the same result.

    Args:
        known: the newest report that the journal has, its step and its value; None = the journal has none.
    """

    def __init__(self, log: StatePath, metric: str, known: Known | None) -> None:
        self._tail = LogTail(log)
        self._metric = metric
        self._speaker = Speaker()
        self._known = known
        self.others: set[str] = set()
        """Names of other metrics that were reported, some of them."""

    def new(self) -> list[Known]:
        """Return the steps and values that came since, without those that were replaced meanwhile.

        The value is None for what is not a finite number. A step may be lower than an earlier one: then it replaces
        the earlier reports from this step on.
        """
        news: list[RankReport] = []
        for report in self._tail.new_reports():
            if self._metric not in report.metrics:
                if len(self.others) < MOST_OTHERS:
                    self.others.update(name[:MOST_NAME] for name in list(report.metrics)[:MOST_OTHERS])
            elif self._speaker.counts(report):
                add_report(news, report)
                if self._known == self._shown(report):
                    news.clear()
        self._known = None
        return list(map(self._shown, news))

    def _shown(self, report: RankReport) -> Known:
        value = report.metrics[self._metric]
        return report.step, value if isfinite(value) else None
