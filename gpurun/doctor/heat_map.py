"""Draw bandwidth from host to host as a heat map. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpurun.doctor.bench_result import BenchResult
from gpurun.drawing.colours import shade
from gpurun.drawing.svg import Drawing

CELL, LABEL, TITLE = 46, 130, 60
NUMBERS_UP_TO = 40


def matrix(result: BenchResult) -> Mapping[tuple[str, str], float]:
    """Return (from, to) → Gbit/s."""
    return {(link.source, link.target): link.gbit_per_s for link in result.links}


def svg(result: BenchResult, title: str) -> str:
    """Return a standalone picture. A row is a sender, a column a receiver. Cells show figures, tooltips the exact
    figures.
    """
    hosts, figures = result.hosts, matrix(result)
    best = max(figures.values(), default=0.0) or 1.0
    width, height = LABEL + CELL * len(hosts) + 20, TITLE + LABEL + CELL * len(hosts) + 20
    sheet = Drawing(width, height, title)
    sheet.text(10, 44, f"Gbit/s; rows send, columns receive; the best is {best:.2f}", colour="#555")
    corner = TITLE + LABEL - 6
    for place, host in enumerate(hosts):
        middle = CELL * place + CELL // 2
        sheet.text(LABEL - 6, TITLE + LABEL + middle + 4, host, anchor="end")
        sheet.text(LABEL + middle + 4, corner, host, turn=-90)
    for row, source in enumerate(hosts):
        for column, target in enumerate(hosts):
            _cell(sheet, row, column, f"{source} → {target}", figures.get((source, target)), best, len(hosts))
    return str(sheet)


def _cell(sheet: Drawing, row: int, column: int, link: str, figure: float | None, best: float, count: int) -> None:
    """Draw one cell: slow is dark, fast is light."""
    x, y, side = LABEL + CELL * column, TITLE + LABEL + CELL * row, CELL - 1
    if figure is None:
        sheet.box(x, y, side, side, "#eee")
        return
    part = figure / best
    sheet.box(x, y, side, side, shade(part), tip=f"{link}: {figure:.3f} Gbit/s")
    if count <= NUMBERS_UP_TO:
        ink = "black" if part > 0.55 else "white"
        sheet.text(x + CELL // 2, y + CELL // 2 + 4, short(figure), anchor="middle", colour=ink)


def short(figure: float) -> str:
    """Return a figure in at most four characters: ``0.09``, ``2.31``, ``24.7``, ``187``."""
    if figure < 9.995:
        return f"{figure:.2f}"
    return f"{figure:.1f}" if figure < 99.95 else f"{figure:.0f}"
