"""Compute the rate of a run from its ranks' reports. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isfinite
from typing import Protocol

from gpurun.errors import BadInput

SUFFIX = "_per_s"
WARM_UP = 0.2
"""The share of a rank's reports that is not counted, from the first on: programs start slowly."""
LEAST_RATE, MOST_RATE = 1e-100, 1e100
"""No program has another rate; sums and quotients of these stay finite."""
ADVICE = "report a rate with gpurun_runtime.report(step, images_per_s=…), or name another metric with --rate"


class SaidByRank(Protocol):
    """A report of one rank (`gpurun.supervisor.loglines.RankReport`)."""

    @property
    def attempt(self) -> int:
        """The attempt of the job."""

    @property
    def rank(self) -> int:
        """The rank's number."""

    @property
    def metrics(self) -> dict[str, float]:
        """Values by name."""


@dataclass(frozen=True)
class MeasuredRate:
    """The rate of a gang.

    Attributes:
        name: the metric's name.
        value: the sum of all ranks' medians.
        windows: the sum of all ranks' reports, report by report, without the warm-up.
        low, high: the 10th and the 90th percentile of `windows`.
    """

    name: str
    value: float
    windows: tuple[float, ...]
    low: float
    high: float


def rate_of(reports: Iterable[SaidByRank], wanted: str | None) -> MeasuredRate:
    """Return the gang's rate. Either each rank reports its own rate, or one rank reports the total.

    Uses only the last attempt.

    Raises:
        BadInput: no rank reported a rate, or several metrics could be the rate.
    """
    last = _last_attempt(reports)
    name = wanted or _only_rate(last)
    series: dict[int, list[float]] = {}
    for report in last:
        value = report.metrics.get(name)
        if value is not None and LEAST_RATE <= value <= MOST_RATE:
            series.setdefault(report.rank, []).append(value)
    if not series:
        raise BadInput(f"no rank reported {name} as a number above 0; {_reported(last)}", hint=ADVICE)
    kept = [values[int(len(values) * WARM_UP) :] for _, values in sorted(series.items())]
    windows = _summed(kept)
    low, high = spread(windows)
    return MeasuredRate(name, sum(map(statistics.median, kept)), windows, low, high)


def last_values(reports: Iterable[SaidByRank]) -> dict[str, dict[int, float]]:
    """The last finite value of each metric in the last attempt, by rank."""
    found: dict[str, dict[int, float]] = {}
    for report in _last_attempt(reports):
        for name, value in report.metrics.items():
            if isfinite(value):
                found.setdefault(name, {})[report.rank] = value
    return found


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def _last_attempt(reports: Iterable[SaidByRank]) -> list[SaidByRank]:
    known = list(reports)
    last = max((report.attempt for report in known), default=0)
    return [report for report in known if report.attempt == last]


def _only_rate(reports: Sequence[SaidByRank]) -> str:
    names = sorted({name for report in reports for name in report.metrics if name.endswith(SUFFIX)})
    if len(names) > 1:
        raise BadInput(
            f"the ranks reported several rates: {', '.join(names[:8])}", hint="choose one rate with --rate NAME"
        )
    if not names:
        raise BadInput(
            f"no rank reported a rate (a metric whose name ends in {SUFFIX}); {_reported(reports)}", hint=ADVICE
        )
    return names[0]


def _reported(reports: Sequence[SaidByRank]) -> str:
    names = sorted({name for report in reports for name in report.metrics})
    return f"the ranks reported: {', '.join(names[:8])}" if names else "the ranks reported nothing"


def _summed(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Sum the series window by window, up to the end of the shortest."""
    windows = zip_longest(*series)
    return tuple(sum(values) for values in windows if None not in values)


def middle(values: Mapping[int, float] | None) -> float | None:
    """Return the median over ranks; None without values, or if it is too large for a number."""
    found = statistics.median(values.values()) if values else None
    return found if found is not None and isfinite(found) else None
