"""Convert the link measurements of `gpurun bench` for the model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from gpurun.doctor.bench_result import Link
from gpurun.scaling.model import PairFigure
from gpurun.scaling.shape import LEAST_BIT_PER_S, MOST_BIT_PER_S, LinkClass

MOST_LATENCY_US = 1e9


def pair_figures(links: Iterable[Link], racks: Mapping[str, str]) -> tuple[PairFigure, ...]:
    """Return the median of each class of links between hosts.

    Args:
        links: oldest first; the newest measurement of a link counts.
        racks: host → rack; links of other hosts are ignored.
    """
    newest = {(link.source, link.target): link for link in links}
    classes: dict[LinkClass, list[Link]] = {}
    for (source, target), link in newest.items():
        if source in racks and target in racks and source != target and _is_possible(link):
            near = racks[source] == racks[target]
            classes.setdefault(LinkClass.RACK if near else LinkClass.RACKS, []).append(link)
    return tuple(
        PairFigure(
            kind, 1e9 * median(link.gbit_per_s for link in alike), 1e-6 * median(link.latency_us for link in alike)
        )
        for kind, alike in classes.items()
    )


def _is_possible(link: Link) -> bool:
    """Return whether a network can have these figures. A file that somebody changed can contain others."""
    return LEAST_BIT_PER_S <= 1e9 * link.gbit_per_s <= MOST_BIT_PER_S and 0 < link.latency_us <= MOST_LATENCY_US
