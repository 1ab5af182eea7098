"""The cost model's predictions for sizes around those that a campaign measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.drawing import Chart, Choices, Drawing, Numbers, clipped
from gpurun.markup import Markup
from gpurun.quantities import count
from gpurun.scaling.model import CannotPredict, PairFigure, Sample, Shape, fit
from gpurun.studies.campaign_plan import RunRecord, middle

# Points of a scaling curve: rate, efficiency and cost by size. Pure.


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


# Draw scaling curves as SVG: rate and efficiency by GPUs; measured, predicted, and linear. Pure.


WIDTH, HEIGHT = 940.0, 420.0
TOP, BOTTOM, LEFT, GAP, RIGHT = 60.0, 50.0, 70.0, 80.0, 20.0
PANEL = (WIDTH - LEFT - GAP - RIGHT) / 2
COLOURS = ("#2f6fb0", "#c05a2b", "#3f8f4f", "#8a5fb0", "#b0902f", "#5f6f7f")
GREY = "#888"


@dataclass(frozen=True)
class PredictedPoint:
    """The model's prediction for one launcher and size."""

    launcher: str
    gpus: int
    low: float
    rate: float
    high: float


def svg_of(title: str, unit: str, points: Sequence[CurvePoint], predicted: Sequence[PredictedPoint] = ()) -> Markup:
    """The picture as an SVG document.

    Args:
        unit: of the rate, such as ``images/s``.
    """
    drawing = Drawing(WIDTH, HEIGHT, clipped(title, 90))
    if not points:
        drawing.text(LEFT, TOP, "nothing was measured yet")
        return drawing.svg()
    sizes = sorted({each.gpus for each in points} | {each.gpus for each in predicted})
    base = {each.launcher: each.rate / each.gpus / each.efficiency for each in points}
    tops = [each.gpus * base[each.launcher] for each in points]
    tops += [each.high for each in points] + [each.high for each in predicted]
    most = max([1.0, *(each.efficiency for each in points)])
    across, high = Choices(sizes), HEIGHT - TOP - BOTTOM
    rates = Chart(drawing, (LEFT, TOP, PANEL, high), across, Numbers(0.0, max(tops)), ("GPUs", unit))
    right = LEFT + PANEL + GAP
    shares = Chart(drawing, (right, TOP, PANEL, high), across, Numbers(0.0, most), ("GPUs", "share of linear growth"))
    for number, launcher in enumerate(base):
        colour = COLOURS[number % len(COLOURS)]
        own = [each for each in points if each.launcher == launcher]
        told = [each for each in predicted if each.launcher == launcher and each.gpus in sizes]
        linear = {gpus: gpus * base[launcher] for gpus in sizes}
        rates.band([(each.gpus, each.low, each.high) for each in told], colour)
        shares.band([(each.gpus, each.low / linear[each.gpus], each.high / linear[each.gpus]) for each in told], colour)
        rates.curve(linear.items(), GREY, is_dashed=True)
        rates.curve([(each.gpus, each.rate) for each in told], colour, is_dashed=True)
        for chart, values in (
            (rates, {each.gpus: each.rate for each in own}), (shares, {each.gpus: each.efficiency for each in own})
        ):  # fmt: skip
            chart.curve(values.items(), colour)
            for gpus, value in values.items():
                chart.dot(gpus, value, colour, tip=f"{launcher}, {count(gpus, 'GPU')}: {value:.4g}")
        for each in own:
            rates.curve([(each.gpus, each.low), (each.gpus, each.high)], colour)
        drawing.box(LEFT + 10, TOP + 6 + number * 18, 10, 10, colour)
        drawing.text(LEFT + 26, TOP + 15 + number * 18, clipped(launcher, 24), is_over_lines=True)
    drawing.text(LEFT + 10, TOP + 15 + len(base) * 18, "dashed grey: linear", colour=GREY, is_over_lines=True)
    return drawing.svg()


DOUBLINGS = 2
"""A curve goes this far beyond the largest measured size."""


def predictions(
    samples: Sequence[Sample], figures: Sequence[PairFigure] = ()
) -> tuple[list[PredictedPoint], list[str]]:
    """Predict, for each launcher, the measured sizes, and twice and four times the largest size.

    The placement of a larger gang repeats the placement of the largest measured gang.

    Args:
        figures: latency and bandwidth of links, as `gpurun bench` measured them.

    Returns:
        The points; and for each launcher without some or all points, the reason.
    """
    points: list[PredictedPoint] = []
    unknown: list[str] = []
    for launcher in sorted({sample.launcher for sample in samples}):
        own = [sample for sample in samples if sample.launcher == launcher]
        try:
            model = fit(own, figures)
        except CannotPredict as error:
            unknown.append(f"{launcher}: no prediction: {error.message}")
            continue
        for ranks, shape in _shapes(own):
            try:
                images = model.predict(shape).images_per_s
            except CannotPredict as error:
                unknown.append(f"{launcher}: no prediction for {count(ranks, 'GPU')} and more: {error.message}")
                break
            points.append(PredictedPoint(launcher, ranks, images.low, images.median, images.high))
    return points, unknown


def _shapes(samples: Sequence[Sample]) -> list[tuple[int, Shape]]:
    """Return the sizes to predict, from the smallest, with their shapes."""
    largest = max(samples, key=lambda sample: sample.ranks)
    by_ranks = {sample.ranks: sample.shape for sample in samples}
    for doubling in range(1, DOUBLINGS + 1):
        by_ranks[largest.ranks << doubling] = repeated(largest.shape, 1 << doubling)
    return sorted(by_ranks.items(), key=lambda found: found[0])


def repeated(shape: Shape, times: int) -> Shape:
    """Return the shape of a gang that is `times` as large, in the same racks. Hosts of a rack are neighbours, as in a
    real placement.
    """
    servers = shape.servers_per_host or (0,) * len(shape.racks)
    hosts = list(zip(shape.ranks_per_host, shape.racks, servers, strict=True)) * times
    hosts.sort(key=lambda host: shape.racks.index(host[1]))
    ranks_per_host, racks, servers_per_host = zip(*hosts, strict=True)
    return Shape(ranks_per_host, racks, servers_per_host if shape.servers_per_host else (), shape.rates)
