"""The cost model's predictions for sizes around those that a campaign measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpurun.campaigns.picture import PredictedPoint
from gpurun.quantities.counts import count
from gpurun.scaling.model import CannotPredict, PairFigure, fit
from gpurun.scaling.samples import Sample
from gpurun.scaling.shape import Shape

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
