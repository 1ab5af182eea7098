"""Points of a scaling curve: rate, efficiency and cost by size. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.campaigns.rates import middle
from gpurun.campaigns.runs import RunRecord


@dataclass(frozen=True)
class CurvePoint:
    """All measured runs of one launcher and size.

    Attributes:
        rate: the median over runs; `low` and `high` are the least and the most.
        efficiency: the rate, divided by the smallest measured size's rate scaled up linearly.
        host_efficiency: the rate of one GPU, divided by its rate in the largest size that ran on one host; None if none
            did.
        gpu_hours: the median cost of a run.
    """

    launcher: str
    gpus: int
    hosts: int
    racks: int
    runs: int
    rate: float
    low: float
    high: float
    efficiency: float
    host_efficiency: float | None
    gpu_hours: float
    step_s: float | None
    compute_s: float | None
    exchange_s: float | None
    fabric_bytes: float | None


def curve_of(records: Sequence[RunRecord], racks: dict[str, str] | None = None) -> list[CurvePoint]:
    """Return one point for each measured launcher and size, in order."""
    measured: dict[tuple[str, int], list[RunRecord]] = {}
    for record in records:
        if record.outcome == "measured" and record.rate is not None:
            measured.setdefault((record.launcher, record.gpus), []).append(record)
    points = []
    for (launcher, gpus), found in sorted(measured.items()):
        each = {key: _median_rate(runs) / key[1] for key, runs in measured.items() if key[0] == launcher}
        smallest = each[min(each)]
        on_one = [key for key in each if all(run.hosts == 1 for run in measured[key])]
        rate = _median_rate(found)
        rates = [run.rate.value for run in found if run.rate is not None]
        points.append(CurvePoint(
            launcher, gpus, max(run.hosts for run in found), _racks(found, racks or {}), len(found), rate, min(rates),
            max(rates), rate / gpus / smallest, rate / gpus / each[max(on_one)] if on_one else None,
            statistics.median(run.gpu_hours for run in found), *_parts(found),
        ))  # fmt: skip
    return points


def _parts(found: Sequence[RunRecord]) -> list[float | None]:
    names = ("step_s", "compute_s", "exchange_s", "fabric_bytes")
    return [middle({at: run.metrics[name] for at, run in enumerate(found) if name in run.metrics}) for name in names]


def _median_rate(runs: Sequence[RunRecord]) -> float:
    return statistics.median(run.rate.value for run in runs if run.rate is not None)


def _racks(found: Sequence[RunRecord], racks: dict[str, str]) -> int:
    return max(len({racks.get(grant.host, "") for grant in run.grants}) for run in found)
