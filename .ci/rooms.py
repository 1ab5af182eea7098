"""Draw the rooms of gpurun and which room imports which: docs/rooms.svg, which `make reference` writes.

Rows and rooms come from the import contract in pyproject.toml, lines from the imports. Left out are lines that follow
from others (`cli` imports `state`, but `cli` → `jobs` → `state` says so, too), and files that any room may import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import grimp

from gpurun.drawing import Drawing, Place

TOP = Path(__file__).resolve().parents[1]
ROW, BOX_WIDTH, BOX_HEIGHT, FIRST, GAP, BEND = 74, 112, 30, 66, 14, 30
PURE, OTHER, LINE = "#cfe3f7", "#e9e9e4", "#7a8794"
SWEEPS, STEPS = 30, 12

Rows = Sequence[Sequence[str]]
Imports = Mapping[str, frozenset[str]]
Node = tuple[str, ...]
"""A room, or the place where the line between two rooms passes a row."""


def contracts() -> Sequence[Mapping[str, list[str]]]:
    """The import contracts of pyproject.toml."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def imports_of(rooms: Iterable[str]) -> Imports:
    """Room → the rooms that its files import, also where only a function or a type checker does."""
    graph = grimp.build_graph("gpurun", cache_dir=None)
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for module in graph.modules:
        _, _, rest = module.partition(".")
        room = rest.split(".")[0]
        for other in graph.find_modules_directly_imported_by(module) if room in found else ():
            found[room] |= {other.partition(".")[2].split(".")[0]} & found.keys() - {room}
    return {room: frozenset(others) for room, others in found.items()}


def without_detours(imports: Imports) -> Imports:
    """The imports that do not follow from others."""
    return {
        room: frozenset(each for each in others if not any(each in reached(imports, other) for other in others))
        for room, others in imports.items()
    }


def reached(imports: Imports, room: str) -> frozenset[str]:
    """What a room imports, itself or through others. Rooms have no circle: the contract forbids it."""
    return imports[room].union(*(reached(imports, other) for other in imports[room]))


def is_shown(room: str, imports: Imports) -> bool:
    """Whether a room is in the picture: a folder, or a file that imports a folder."""
    return any((TOP / "gpurun" / each).is_dir() for each in (room, *imports[room]))


def threads(rows: Rows, lines: Imports) -> Sequence[Sequence[Node]]:
    """Each line as the nodes that it passes, row by row."""
    row_of = {room: number for number, row in enumerate(rows) for room in row}
    return [
        ((room,), *((room, other, str(row)) for row in range(row_of[room] + 1, row_of[other])), (other,))
        for room, others in sorted(lines.items())
        for other in sorted(others)
    ]


def laid_out(rows: Rows, lines: Sequence[Sequence[Node]]) -> Mapping[Node, float]:
    """Node → its x. Again and again, a row's nodes go to the mean place of their neighbours above or below.

    Source: K. Sugiyama et al., "Methods for visual understanding of hierarchical system structures", 1981.
    """
    row_of = {(room,): number for number, row in enumerate(rows) for room in row}
    row_of |= {node: int(node[2]) for line in lines for node in line if len(node) > 1}
    layers = [[node for node in sorted(row_of) if row_of[node] == number] for number in range(len(rows))]
    x = {node: 100.0 * at for layer in layers for at, node in enumerate(layer)}
    above: dict[Node, list[Node]] = {node: [] for node in row_of}
    below: dict[Node, list[Node]] = {node: [] for node in row_of}
    for line in lines:
        for upper, lower in pairwise(line):
            above[lower].append(upper)
            below[upper].append(lower)
    for sweep in range(SWEEPS):
        order, near = (layers, above) if sweep % 2 == 0 else (layers[::-1], below)
        for layer in order:
            wish = {node: fmean(x[each] for each in near[node]) if near[node] else x[node] for node in layer}
            x |= spaced([node for _, node in sorted((wish[node], node) for node in layer)], wish)
    return x


def spaced(layer: Sequence[Node], wish: Mapping[Node, float]) -> Mapping[Node, float]:
    """The places of one row, near those wished for: from the left each as far left as it may, then as far right."""
    forward: list[float] = []
    for at, node in enumerate(layer):
        least = forward[-1] + distance(layer[at - 1], node) if at else wish[node]
        forward.append(max(least, wish[node]))
    backward = [forward[-1]]
    for at in range(len(layer) - 2, -1, -1):
        most = backward[0] - distance(layer[at], layer[at + 1])
        backward.insert(0, min(most, wish[layer[at]]))
    return {node: (one + other) / 2 for node, one, other in zip(layer, forward, backward, strict=True)}


def distance(left: Node, right: Node) -> float:
    """The least distance of two neighbours' middles."""
    return sum(BOX_WIDTH / 2 if len(node) == 1 else 0 for node in (left, right)) + GAP


def curve(start: Place, end: Place) -> Iterable[Place]:
    """A line that leaves one place downwards and comes to the other from above."""
    for step in range(STEPS + 1):
        t = step / STEPS
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
        y = (a + b) * start[1] + (c + d) * end[1] + BEND * (b - c)
        yield (a + b) * start[0] + (c + d) * end[0], y


def picture() -> str:
    """The picture as SVG."""
    first, *others = contracts()
    named = [[name.strip().removeprefix("gpurun.") for name in row.split("|")] for row in first["layers"]]
    imports = imports_of(room for row in named for room in row)
    rows = [kept for row in named if (kept := [room for room in row if is_shown(room, imports)])]
    shown = frozenset(room for row in rows for room in row)
    (pure,) = (each["source_modules"] for each in others if "pure core" in each["name"])
    lines = threads(rows, without_detours({room: imports[room] & shown for room in shown}))
    x = laid_out(rows, lines)
    left, right = min(x.values()) - BOX_WIDTH, max(x.values()) + BOX_WIDTH
    y = {room: FIRST + ROW * number for number, row in enumerate(rows) for room in row}
    height = FIRST + ROW * (len(rows) - 1) + BOX_HEIGHT
    drawing = Drawing(right - left, height, "Each room imports rooms below it. Blue: pure")
    for line in lines:
        ((room,), *between, (other,)) = line
        stops = [(x[node] - left, FIRST + ROW * int(node[2])) for node in between]
        upper, lower = (x[line[0]] - left, y[room] + BOX_HEIGHT / 2), (x[line[-1]] - left, y[other] - BOX_HEIGHT / 2)
        way = [place for ends in pairwise([upper, *stops, lower]) for place in curve(*ends)]
        drawing.line(way, LINE, width=1.2, tip=f"{room} imports {other}")
    for room in sorted(shown):
        colour = PURE if f"gpurun.{room}" in pure else OTHER
        drawing.box(x[room,] - left - BOX_WIDTH / 2, y[room] - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, colour)
        drawing.text(x[room,] - left, y[room] + 5, room, anchor="middle", size=14)
    return drawing.svg()
