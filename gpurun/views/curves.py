"""The reported metrics of a job's ranks, as curves over their steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from gpurun.drawing.axes import Numbers, around
from gpurun.drawing.svg import Drawing

MOST_METRICS, MOST_POINTS = 24, 50_000
MOST_STEP = 1 << 53
DRAWN_POINTS = 600
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 460, 240, 70, 40, 24
COLOUR, GRID = "#1f6feb", "#ddd"


class Curves:
    """Metric → step → value. If several ranks report a metric, the lowest rank counts.

    An attempt replaces the values of earlier attempts for the same steps.
    """

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}
        self._rank: dict[str, int] = {}

    def add(self, rank: int, step: int, metrics: Mapping[str, float]) -> None:
        """Take one report. Ignores infinite values and NaN, and metrics and points beyond the limits."""
        for name, value in metrics.items() if abs(step) <= MOST_STEP else ():
            lowest = self._rank.setdefault(name, rank)
            if rank > lowest or not isfinite(value):
                continue
            if rank < lowest:
                self._rank[name] = rank
                self.points.pop(name, None)
            if name not in self.points and len(self.points) >= MOST_METRICS:
                continue
            points = self.points.setdefault(name, {})
            points[step] = value
            if len(points) > MOST_POINTS:
                self.points[name] = dict(list(points.items())[::2])

    def drawn(self) -> list[str]:
        """Return a picture of each metric, as SVG, sorted by name."""
        return [picture_of_curve(name, self.points[name]) for name in sorted(self.points)]


def picture_of_curve(name: str, points: dict[int, float]) -> str:
    """Return one curve with its axes, and its last value as text."""
    steps = sorted(points)
    shown = [*steps[:: -(-len(steps) // DRAWN_POINTS)], steps[-1]]
    values = [points[step] for step in shown]
    across, up = Numbers(shown[0], shown[-1]), around(values)
    sheet = Drawing(WIDTH, HEIGHT, f"{name}: {points[steps[-1]]:.6g} at step {steps[-1]}")
    for at, text in up.marks():
        y = _down(at)
        sheet.line([(LEFT, y), (WIDTH - 10, y)], GRID)
        sheet.text(LEFT - 6, y + 4, text, anchor="end", colour="#555")
    for at, text in across.marks():
        sheet.text(_right(at), HEIGHT - 6, text, anchor="middle", colour="#555")
    places = []
    for step in shown:
        right, high = across.place(step), up.place(points[step])
        if right is not None and high is not None:
            places.append((_right(right), _down(high)))
    sheet.line(places, COLOUR, width=1.8)
    if places:
        sheet.dot(*places[-1], COLOUR)
    return str(sheet)


def _right(at: float) -> float:
    return LEFT + at * (WIDTH - LEFT - 20)


def _down(at: float) -> float:
    return HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM)
