"""Host × host as colours: from whom to whom, how fast. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from gpurun.doctor.bench_result import BenchResult

# Five stops of viridis (matplotlib, CC0): readable in grey and by colour-blind people. Slow is dark, fast is light.
STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
CELL, LABEL, TITLE = 46, 130, 60
NUMBERS_UP_TO = 40


def matrix(result: BenchResult) -> Mapping[tuple[str, str], float]:
    """(from, to) → Gbit/s."""
    return {(link.source, link.target): link.gbit_per_s for link in result.links}


def colour(part: float) -> tuple[int, int, int]:
    """Red, green, blue of a figure, as a part of the best."""
    place = min(1.0, max(0.0, part)) * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    share = place - low
    first, second = STOPS[low], STOPS[low + 1]
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def svg(result: BenchResult, title: str) -> str:
    """A standalone picture: a row sends, a column receives. Figures in the cells, exact ones as tooltips."""
    hosts, figures = result.hosts, matrix(result)
    best = max(figures.values(), default=0.0) or 1.0
    width, height = LABEL + CELL * len(hosts) + 20, TITLE + LABEL + CELL * len(hosts) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="10" y="44" fill="#555">Gbit/s; rows send, columns receive; the best is {best:.2f}</text>',
        *_labels(hosts),
    ]
    for row, source in enumerate(hosts):
        for column, target in enumerate(hosts):
            parts.append(_cell(row, column, source, target, figures.get((source, target)), best, len(hosts)))
    return "\n".join([*parts, "</svg>", ""])


def _labels(hosts: Sequence[str]) -> list[str]:
    found = []
    for place, host in enumerate(hosts):
        middle = CELL * place + CELL // 2
        down, across = TITLE + LABEL + middle + 4, LABEL + middle + 4
        found.append(f'<text x="{LABEL - 6}" y="{down}" text-anchor="end">{escape(host)}</text>')
        corner = TITLE + LABEL - 6
        found.append(f'<text x="{across}" y="{corner}" transform="rotate(-90 {across} {corner})">{escape(host)}</text>')
    return found


def _cell(row: int, column: int, source: str, target: str, figure: float | None, best: float, count: int) -> str:
    x, y = LABEL + CELL * column, TITLE + LABEL + CELL * row
    if figure is None:
        return f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="#eee"/>'
    part = figure / best
    tip = f"<title>{escape(source)} → {escape(target)}: {figure:.3f} Gbit/s</title>"
    fill = "rgb({},{},{})".format(*colour(part))
    cell = f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}">{tip}</rect>'
    if count > NUMBERS_UP_TO:
        return cell
    ink = "black" if part > 0.55 else "white"
    text = f'<text x="{x + CELL // 2}" y="{y + CELL // 2 + 4}" text-anchor="middle" fill="{ink}">{short(figure)}</text>'
    return cell + text


def short(figure: float) -> str:
    """A figure in at most four characters: ``0.09``, ``2.31``, ``24.7``, ``187``."""
    if figure < 9.995:
        return f"{figure:.2f}"
    return f"{figure:.1f}" if figure < 99.95 else f"{figure:.0f}"
