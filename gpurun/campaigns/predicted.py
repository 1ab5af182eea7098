"""The cost model's predictions for sizes around those that a campaign measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurun.campaigns.picture import PredictedPoint
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
        The points; and for each launcher without points, the reason.
    """
    points: list[PredictedPoint] = []
    unknown: list[str] = []
    for launcher in sorted({sample.launcher for sample in samples}):
        own = [sample for sample in samples if sample.launcher == launcher]
        try:
            points += _curve(launcher, own, figures)
        except CannotPredict as error:
            unknown.append(f"{launcher}: no prediction: {error.message}")
    return points, unknown


def _curve(launcher: str, samples: Sequence[Sample], figures: Sequence[PairFigure]) -> Iterator[PredictedPoint]:
    model = fit(samples, figures)
    largest = max(samples, key=lambda sample: sample.ranks)
    by_ranks = {sample.ranks: sample.shape for sample in samples}
    for doubling in range(1, DOUBLINGS + 1):
        by_ranks[largest.ranks << doubling] = repeated(largest.shape, 1 << doubling)
    for ranks, shape in sorted(by_ranks.items()):
        images = model.predict(shape).images_per_s
        yield PredictedPoint(launcher, ranks, images.low, images.median, images.high)


def repeated(shape: Shape, times: int) -> Shape:
    """Return the shape of a gang that is `times` as large, in the same racks. Hosts of a rack are neighbours, as in a
    real placement.
    """
    servers = shape.servers_per_host or (0,) * len(shape.racks)
    hosts = list(zip(shape.ranks_per_host, shape.racks, servers, strict=True)) * times
    hosts.sort(key=lambda host: shape.racks.index(host[1]))
    ranks_per_host, racks, servers_per_host = zip(*hosts, strict=True)
    return Shape(ranks_per_host, racks, servers_per_host if shape.servers_per_host else (), shape.rates)
