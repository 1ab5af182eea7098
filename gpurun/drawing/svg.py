"""Write an SVG document. Escapes every text, so a hostile name cannot add elements. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gpurun.documents.plain import printable

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

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])

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
            f"{_escaped(text)}{_tip(tip)}</text>"
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
    return f"<title>{_escaped(text)}</title>" if text else ""


def _escaped(text: str) -> str:
    return escape(printable(text))
