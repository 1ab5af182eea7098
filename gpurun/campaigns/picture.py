"""Draw scaling curves as SVG: rate and efficiency by GPUs; measured, predicted, and linear. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpurun.campaigns.curve import CurvePoint
from gpurun.drawing.axes import Axis, Choices, Numbers
from gpurun.drawing.svg import Drawing, Place, clipped
from gpurun.quantities.counts import count

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


class CurvePanel:
    """One plot of a drawing, with GPUs on the horizontal axis and a value on the vertical axis."""

    def __init__(self, drawing: Drawing, left: float, title: str, sizes: Sequence[int], most: float) -> None:
        self.drawing, self._left = drawing, left
        self._x: Axis = Choices(sizes)
        self._y = Numbers(0.0, most)
        bottom = HEIGHT - BOTTOM
        drawing.text(left, TOP - 10, title)
        drawing.line([(left, TOP), (left, bottom), (left + PANEL, bottom)], "#444")
        for at, text in self._y.marks():
            y = bottom - at * (bottom - TOP)
            drawing.line([(left, y), (left + PANEL, y)], "#ddd")
            drawing.text(left - 6, y + 4, text, anchor="end")
        for at, text in self._x.marks():
            drawing.text(left + at * PANEL, bottom + 16, text, anchor="middle")
        drawing.text(left + PANEL / 2, bottom + 36, "GPUs", anchor="middle")

    def place(self, gpus: int, value: float) -> Place | None:
        """Return the position of a value; None if it is beyond the axes."""
        x, y = self._x.place(gpus), self._y.place(value)
        if x is None or y is None:
            return None
        return self._left + x * PANEL, HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - TOP)

    def curve(self, values: Mapping[int, float], colour: str, *, is_dashed: bool = False, dots: str = "") -> None:
        """Draw a line through values by GPUs. With `dots`, also draw each value with a tooltip that begins with this
        text.
        """
        found = [(gpus, value, self.place(gpus, value)) for gpus, value in sorted(values.items())]
        places = [place for _, _, place in found if place is not None]
        if len(places) > 1:
            self.drawing.line(places, colour, width=2, is_dashed=is_dashed)
        for gpus, value, place in found:
            if place is not None and dots:
                self.drawing.dot(*place, colour, radius=4, tip=f"{dots}, {count(gpus, 'GPU')}: {value:.4g}")

    def span(self, gpus: int, low: float, high: float, colour: str) -> None:
        """Draw a vertical line from a low value to a high value."""
        ends = self.place(gpus, low), self.place(gpus, high)
        if ends[0] is not None and ends[1] is not None:
            self.drawing.line([ends[0], ends[1]], colour, width=2)

    def band(self, points: Sequence[PredictedPoint], scale: Mapping[int, float], colour: str) -> None:
        """Fill the range of predictions, each divided by `scale`."""
        upper = [self.place(each.gpus, each.high / scale[each.gpus]) for each in points]
        lower = [self.place(each.gpus, each.low / scale[each.gpus]) for each in points]
        places = [place for place in (*upper, *reversed(lower)) if place is not None]
        if len(places) > 2:
            self.drawing.area(places, colour)


def svg_of(title: str, unit: str, points: Sequence[CurvePoint], predicted: Sequence[PredictedPoint] = ()) -> str:
    """The picture as an SVG document.

    Args:
        unit: of the rate, such as ``images/s``.
    """
    drawing = Drawing(WIDTH, HEIGHT, clipped(title, 90))
    if not points:
        drawing.text(LEFT, TOP, "nothing was measured yet")
        return str(drawing)
    sizes = sorted({each.gpus for each in points} | {each.gpus for each in predicted})
    base = {each.launcher: each.rate / each.gpus / each.efficiency for each in points}
    tops = [each.gpus * base[each.launcher] for each in points]
    tops += [each.high for each in points] + [each.high for each in predicted]
    rates = CurvePanel(drawing, LEFT, unit, sizes, max(tops))
    most = max([1.0, *(each.efficiency for each in points)])
    shares = CurvePanel(drawing, LEFT + PANEL + GAP, "share of linear growth", sizes, most)
    for number, launcher in enumerate(base):
        colour = COLOURS[number % len(COLOURS)]
        own = [each for each in points if each.launcher == launcher]
        told = [each for each in predicted if each.launcher == launcher and each.gpus in sizes]
        linear = {gpus: gpus * base[launcher] for gpus in sizes}
        rates.band(told, dict.fromkeys(sizes, 1.0), colour)
        shares.band(told, linear, colour)
        rates.curve(linear, GREY, is_dashed=True)
        rates.curve({each.gpus: each.rate for each in told}, colour, is_dashed=True)
        for each in own:
            rates.span(each.gpus, each.low, each.high, colour)
        rates.curve({each.gpus: each.rate for each in own}, colour, dots=launcher)
        shares.curve({each.gpus: each.efficiency for each in own}, colour, dots=launcher)
        drawing.box(LEFT + 10, TOP + 6 + number * 18, 10, 10, colour)
        drawing.text(LEFT + 26, TOP + 15 + number * 18, clipped(launcher, 24), is_over_lines=True)
    drawing.text(LEFT + 10, TOP + 15 + len(base) * 18, "dashed grey: linear", colour=GREY, is_over_lines=True)
    return str(drawing)
