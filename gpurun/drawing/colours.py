"""Map a number to a colour. Pure."""

from __future__ import annotations

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
