"""Draw SVG pictures without a library: shapes, colours for values, axes, and charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpurun.markup import Markup, element, markup

# Map a number to a colour. Pure.


# Five stops of viridis (matplotlib, CC0): readable in grey and by colour-blind people.
STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def viridis(part: float) -> tuple[int, int, int]:
    """Return red, green and blue: from dark (0) to light (1)."""
    place = min(1.0, max(0.0, part)) * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    share = place - low
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True))
    return red, green, blue


def shade(part: float) -> str:
    """Return `viridis` in SVG's notation."""
    return "rgb({},{},{})".format(*viridis(part))


# Write an SVG document. Escapes every text, so a hostile name cannot add elements. Pure.


Place = tuple[float, float]


class Drawing:
    """A white sheet of this many pixels. Later shapes cover earlier ones.

    Args:
        title: written at the top left.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="12" stroke-linecap="round">'
        ]
        self.box(0, 0, width, height, "white")
        self.text(10, 24, title, size=16)

    def svg(self) -> Markup:
        """Return the document."""
        return Markup("\n".join([*self._parts, "</svg>", ""]))

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222",
        turn: int = 0, tip: str = "", is_over_lines: bool = False,
    ) -> None:  # fmt: skip
        """Write a text that starts at, ends at or is centred on a place (``start``, ``end``, ``middle``), turned by
        `turn` degrees.
        """
        halo = ' paint-order="stroke" stroke="white" stroke-width="3"' if is_over_lines else ""
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{turned}{halo}>'
            f"{markup(text)}{_tip(tip)}</text>"
        )

    def line(
        self, places: Iterable[Place], colour: str, *, width: float = 1.0, opacity: float = 1.0,
        is_dashed: bool = False, tip: str = "",
    ) -> None:  # fmt: skip
        """Draw a line through these places."""
        dashed = ' stroke-dasharray="5 4"' if is_dashed else ""
        self._parts.append(
            f'<polyline points="{_points(places)}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
            f'stroke-opacity="{opacity:g}"{dashed}>{_tip(tip)}</polyline>'
        )

    def area(self, places: Iterable[Place], colour: str) -> None:
        """Fill the area inside these places with a light colour."""
        self._parts.append(
            f'<polygon points="{_points(places)}" fill="{colour}" fill-opacity="0.35" stroke="{colour}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, *, tip: str = "") -> None:
        """Fill a rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">'
            f"{_tip(tip)}</rect>"
        )

    def dot(self, x: float, y: float, colour: str, *, radius: float = 3.0, tip: str = "") -> None:
        """Draw a filled circle."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}">{_tip(tip)}</circle>')


def clipped(text: str, most: int) -> str:
    """Return at most this many characters of a text."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _points(places: Iterable[Place]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _tip(text: str) -> str:
    return element("title", text) if text else ""


# Positions of values on an axis, from 0 to 1, and the axis's labels. Pure.


MOST_MARKS = 12
Mark = tuple[float, str]


class Axis(Protocol):
    """One axis of a plot."""

    def place(self, value: object) -> float | None:
        """Return the position of a value, 0 to 1; None if the axis has no position for it."""
        ...

    def marks(self) -> Sequence[Mark]:
        """Return positions and their labels."""
        ...


@dataclass(frozen=True)
class Numbers:
    """Numbers from `low` to `high`, on a logarithmic scale if `is_log` (then both are positive)."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: object) -> float | None:
        """Return the position of a number; None for values that are not finite numbers between the ends."""
        number = as_finite(value)
        if number is None or not self.low <= number <= self.high:
            return None
        low, high, at = (math.log(each) if self.is_log else each / 2 for each in (self.low, self.high, number))
        return (at - low) / (high - low) if high > low else 0.5

    def marks(self) -> list[Mark]:
        """Return round numbers; the two ends if there are fewer than two round numbers."""
        found = self._powers() if self.is_log else self._round()
        values = found if len(found) > 1 else [self.low, self.high] if self.high > self.low else [self.low]
        placed = [(self.place(value), written(value)) for value in values]
        return [(at, text) for at, text in placed if at is not None]

    def _round(self) -> list[float]:
        """Return four to nine multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high / 2 - self.low / 2) / 1.5
        if not rough > abs(self.high) * 1e-9:
            return []
        power = 10.0 ** math.floor(math.log10(rough))
        # 1 if even that is too large: 0.1 is 10 ** -1, and (0.3 / 2) / 1.5 is a little less.
        step = max((factor for factor in (2, 5) if factor * power <= rough), default=1) * power
        if not math.isfinite(self.low / step) or not math.isfinite(self.high / step):
            return []
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _powers(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        stride = max(1, (last - first) // (MOST_MARKS - 2))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        values = [float(f"{factor}e{power}") for power in range(first, last + 1, stride) for factor in factors]
        return [value for value in values if self.low <= value <= self.high]


class Choices:
    """Values at equal distances."""

    def __init__(self, values: Sequence[object]) -> None:
        self._values = values
        self._at = {(type(value), value): number for number, value in enumerate(values)}

    def place(self, value: object) -> float | None:
        """Return the position of one of the values."""
        number = self._at.get((type(value), value))
        return None if number is None else (number + 0.5) / len(self._values)

    def marks(self) -> list[Mark]:
        """Return the values; only some if there are many."""
        stride = -(-len(self._values) // MOST_MARKS)
        return [((number + 0.5) / len(self._values), written(self._values[number]))
                for number in range(0, len(self._values), stride)]  # fmt: skip


@dataclass(frozen=True)
class Labelled:
    """Parts of the axis itself, from 0 to 1, with labels of their own, such as dates."""

    labels: Sequence[Mark]

    def place(self, value: object) -> float | None:
        """Return the part."""
        return Numbers(0.0, 1.0).place(value)

    def marks(self) -> Sequence[Mark]:
        """Return the labels."""
        return self.labels


def around(values: Sequence[float]) -> Numbers:
    """Return an axis for these finite numbers, logarithmic if they are positive and differ a thousandfold."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return Numbers(low, high, is_log=0 < low < high / 1000)


def as_finite(value: object) -> float | None:
    """Return a finite number as a float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def written(value: object) -> str:
    """Return the label of a value: ``0.001``, ``1e-5``, ``true``, ``adam``."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    return f"{value:.10g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


# A plot with two axes. Pure.


FRAME, GRID = "#444", "#ddd"
MOST_LABEL = 14
Point = tuple[object, object]


class Chart:
    """A plot with two axes on a sheet: first its frame and grid, then curves over them.

    Args:
        box: left, top, width and height on the sheet.
        names: of the axes, across and up; "" = none.
    """

    def __init__(
        self, sheet: Drawing, box: tuple[float, float, float, float], across: Axis, up: Axis, names: tuple[str, str]
    ) -> None:
        self._sheet, self._across, self._up = sheet, across, up
        self._left, self._top, self._width, self._height = box
        left, top, right, bottom = self._left, self._top, self._left + self._width, self._top + self._height
        for part, text in up.marks():
            y = bottom - self._height * part
            sheet.line([(left, y), (right, y)], GRID)
            sheet.text(left - 6, y + 4, clipped(text, MOST_LABEL), anchor="end", size=11, tip=text)
        for part, text in across.marks():
            x = left + self._width * part
            sheet.line([(x, bottom), (x, bottom + 4)], FRAME)
            sheet.text(x, bottom + 17, text, anchor="middle", size=11)
        sheet.line([(left, top), (left, bottom), (right, bottom)], FRAME)
        name = f"{names[1]} (log)" if isinstance(up, Numbers) and up.is_log else names[1]
        if name:
            sheet.text(left, top - 10, clipped(name, 60), size=13, tip=names[1])
        if names[0]:
            sheet.text(left + self._width / 2, bottom + 34, names[0], anchor="middle", size=13)

    def at(self, x: object, y: object) -> Place | None:
        """Return the place of a point on the sheet; None if an axis has no place for it."""
        right, up = self._across.place(x), self._up.place(y)
        if right is None or up is None:
            return None
        return self._left + self._width * right, self._top + self._height * (1 - up)

    def curve(
        self, points: Iterable[Point], colour: str, *, width: float = 2.0, opacity: float = 1.0,
        is_dashed: bool = False, tip: str = "",
    ) -> None:  # fmt: skip
        """Draw a line through points, with gaps where an axis has no place for them."""
        for stretch in stretches(self.at(*point) for point in points):
            self._sheet.line(stretch, colour, width=width, opacity=opacity, is_dashed=is_dashed, tip=tip)

    def dot(self, x: object, y: object, colour: str, *, tip: str = "") -> None:
        """Mark one point."""
        if (place := self.at(x, y)) is not None:
            self._sheet.dot(*place, colour, radius=4, tip=tip)

    def band(self, spans: Sequence[tuple[object, float, float]], colour: str) -> None:
        """Fill the area between low and high values: ``(x, low, high)``."""
        ends = [self.at(x, high) for x, _, high in spans] + [self.at(x, low) for x, low, _ in reversed(spans)]
        places = [place for place in ends if place is not None]
        if len(places) > 2:
            self._sheet.area(places, colour)

    def columns(self, values: Sequence[float], colour: str) -> None:
        """Fill the area below values, each of which stands for an equal part of the axis."""
        bottom, step = self._top + self._height, self._width / max(1, len(values))
        places: list[Place] = [(self._left, bottom)]
        for number, value in enumerate(values):
            part = self._up.place(value)
            y = bottom - self._height * (1.0 if part is None else part)  # a sum that rounding made a little too large
            places += [(self._left + number * step, y), (self._left + (number + 1) * step, y)]
        self._sheet.area([*places, (self._left + self._width, bottom)], colour)


def stretches(places: Iterable[Place | None]) -> Iterator[list[Place]]:
    """Yield the lines between gaps. A single place is a line of no length, which is drawn as a dot."""
    stretch: list[Place] = []
    for place in (*places, None):
        if place is not None:
            stretch.append(place)
        elif stretch:
            yield stretch if len(stretch) > 1 else [*stretch, *stretch]
            stretch = []
