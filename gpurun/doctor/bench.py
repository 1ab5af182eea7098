"""Results of ``gpurun bench``: their history, and a heat map of the bandwidth from host to host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpurun.doctor.findings import BenchResult, Finding, Link, link_findings
from gpurun.drawing import Drawing, shade
from gpurun.state import durable
from gpurun.state.locks import change_lock
from gpurun.state.paths import StatePath

# The history of link benchmarks, and links that have become slower.


KEPT_RUNS = 200
COMPARED_RUNS = 10

FEW_RUNS = 3
SLOWER, MUCH_SLOWER = 0.7, 0.5
"""Below this part of the median of earlier runs a link has become slower; the second while there are few of them."""


@dataclass(frozen=True)
class Run:
    """One benchmark. `time_s`: when, seconds since 1970."""

    time_s: float
    links: tuple[Link, ...]


@dataclass(frozen=True)
class BenchHistory:
    """The runs of `gpurun bench` that a state directory keeps."""

    home: Path

    def file(self) -> StatePath:
        """Return the file that keeps runs below the state directory: one JSON document per line."""
        return StatePath(self.home) / "bench" / "links.jsonl"

    def append(self, run: Run) -> None:
        """Add a run, and remove the oldest beyond `KEPT_RUNS`. Several processes may do so at the same time."""
        path = self.file()
        durable.make_folder(path.parent)
        with change_lock(self.home, "bench.lock"):
            lines = path.read_text().splitlines() if path.exists() else []
            links = [
                [link.source, link.target, round(link.gbit_per_s, 4), round(link.latency_us, 2)] for link in run.links
            ]
            lines = [*lines, json.dumps({"time_s": run.time_s, "links": links})][-KEPT_RUNS:]
            durable.write_bytes(path, "".join(f"{line}\n" for line in lines).encode())

    def read(self) -> tuple[Run, ...]:
        """Read runs, oldest first. Skips damaged lines.

        Raises:
            StateError: the file cannot be read.
        """
        try:
            text = self.file().read_text()
        except FileNotFoundError:
            return ()
        return tuple(run for line in text.splitlines() if (run := _run(line)) is not None)


def _run(line: str) -> Run | None:
    try:
        document = json.loads(line)
        links = tuple(
            Link(str(source), str(target), float(rate), float(latency))
            for source, target, rate, latency in document["links"]
        )
        return Run(float(document["time_s"]), links)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


FRESH_S = 7 * 86400.0
"""`gpurun doctor` does not judge a link by figures that are older."""


def slower(runs: Sequence[Run], hosts: Iterable[str], *, since_s: float = 0.0) -> tuple[Finding, ...]:
    """Find links of these hosts whose last figure is well below that of earlier runs.

    Args:
        since_s: judge only links that were measured after this, seconds since 1970.
    """
    wanted = frozenset(hosts)
    figures: dict[tuple[str, str], list[Link]] = {}
    fresh = {(link.source, link.target) for run in runs if run.time_s >= since_s for link in run.links}
    for run in runs:
        for link in run.links:
            if link.source in wanted and link.target in wanted and (link.source, link.target) in fresh:
                figures.setdefault((link.source, link.target), []).append(link)
    last = [links[-1] for links in figures.values()]
    usual = {links[-1]: _before(links) for links in figures.values() if len(links) > 1}
    slow = {link: before for link, before in usual.items() if link.gbit_per_s < before * _part(figures, link)}
    return tuple(link_findings("link-history", slow, last, {}))


def _before(links: Sequence[Link]) -> float:
    return median(link.gbit_per_s for link in links[-COMPARED_RUNS - 1 : -1])


def _part(figures: Mapping[tuple[str, str], Sequence[Link]], link: Link) -> float:
    return SLOWER if len(figures[link.source, link.target]) > FEW_RUNS else MUCH_SLOWER


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
    return sheet.svg()


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
