"""Convert the link measurements of `gpurun bench` for the model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from gpurun.doctor.bench_result import Link
from gpurun.scaling.model import PairFigure
from gpurun.scaling.shape import LinkClass


def pair_figures(links: Iterable[Link], racks: Mapping[str, str]) -> tuple[PairFigure, ...]:
    """Return the median of each class of links between hosts.

    Args:
        links: oldest first; the newest measurement of a link counts.
        racks: host → rack; links of other hosts are ignored.
    """
    newest = {(link.source, link.target): link for link in links}
    classes: dict[LinkClass, list[Link]] = {}
    for (source, target), link in newest.items():
        if source in racks and target in racks and source != target and link.gbit_per_s > 0 and link.latency_us > 0:
            near = racks[source] == racks[target]
            classes.setdefault(LinkClass.RACK if near else LinkClass.RACKS, []).append(link)
    return tuple(
        PairFigure(
            kind, 1e9 * median(link.gbit_per_s for link in alike), 1e-6 * median(link.latency_us for link in alike)
        )
        for kind, alike in classes.items()
    )
