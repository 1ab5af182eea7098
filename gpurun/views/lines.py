"""Format a picture as lines of marked text: racks with cells, and tables. Pure; the painter knows the marks' colours.

A line is a sequence of (text, mark). Marks are ``job:N`` (the N-th job's colour), ``free``, ``bad``, ``head``, ``dim``,
``good``, ``wait`` and "". The lines are complete without colours: cells have letters, and states are words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import isfinite

from gpurun.documents.plain import printable
from gpurun.drawing import Chart, Drawing, Numbers, around
from gpurun.jobs.record import State
from gpurun.markup import Markup
from gpurun.quantities import count
from gpurun.views.picture import FREE, KEPT, MARKS, Alike, JobRow, OutHost, Picture, RackView, racks_of

Span = tuple[str, str]
Line = list[Span]
Cell = str | Span
Below = Callable[[int, Sequence[Span]], Iterable[Line]]
Fold = Callable[[Iterable[str]], str]

INDENT = "  "
_NAME = "\0"
"""Stands for the host's name in a text."""
GAP = 2
MOST_REASON_LINES = 3
MOST_OUT = 8
"""Reasons why hosts are out; the rest is counted."""
STATE_MARKS = {
    State.RUNNING: "good", State.SUCCEEDED: "dim", State.FAILED: "bad", State.TIMED_OUT: "bad", State.CANCELLED: "dim",
    State.QUEUED: "wait",
}  # fmt: skip


def width_of(text: str) -> int:
    """Return the number of terminal columns of a text."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width  # noqa: PLC0415 (few texts need the tables)

    return sum(0 if category(c) in ("Mn", "Me", "Cf") else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def plain(line: Line) -> str:
    """Return the text of a line, without trailing spaces."""
    return "".join(text for text, _ in line).rstrip()


# -- racks ------------------------------------------------------------------------------------------------------


def rack_lines(picture: Picture, fold: Fold, columns: int | None) -> Iterator[Line]:
    """Return a line for each rack, then its hosts: as many per line as fit the terminal.

    Args:
        columns: width of the terminal; None: one entry per line, without wrapping.
    """
    marks = _cell_marks(picture)
    racks = [(rack, [_entry(group, fold, marks) for group in rack.groups]) for rack in racks_of(picture.hosts)]
    widths = sorted(_width(entry) for _, entries in racks for entry in entries)
    unit = widths[len(widths) * 3 // 4] + GAP if widths else 1
    for rack, entries in racks:
        names, figures = _heading(rack, fold)
        if columns is not None and _width([names, figures]) > columns:
            yield [names]
            yield [figures]
        else:
            yield [names, figures]
        yield from _beside(entries, unit, columns)


def mark_line(picture: Picture) -> Line:
    """Return the meaning of the marks that occur in the cells; empty if no cell has a mark."""
    seen = {cell for host in picture.hosts for cell in host.cells}
    return [(", ".join(f"{mark} {words}" for mark, words in MARKS.items() if mark in seen), "dim")]


def total_line(picture: Picture) -> Line:
    """Return the number of free GPUs in one sentence."""
    hosts = len(picture.hosts)
    rest = picture.free_elsewhere
    are = "free GPU is on a host" if rest == 1 else "free GPUs are on hosts"
    more = f"; {rest} more {are} that get no new jobs" if rest else ""
    return [(f"{picture.free} of {count(picture.gpus, 'GPU')} free on {count(hosts, 'host')}{more}", "")]


def out_lines(outs: Iterable[tuple[str, OutHost]], fold: Fold, duration: Callable[[float], str]) -> Iterator[Line]:
    """Return why hosts are out, and what to do. Hosts with the same reason share a line.

    Args:
        outs: pairs of a host's name and why it is out.
    """
    given = dict(outs)
    groups = alike({name: (out.reason, out.remedy) for name, out in given.items()}, fold)
    for names, (reason, remedy) in groups[:MOST_OUT]:
        for_s = max(given[name].for_s for name in names)
        yield [(printable(f"{fold(names)}: out for {duration(for_s)}: {reason}"), "bad")]
        if remedy:
            yield [(printable(f"  → {remedy}"), "dim")]
    if left := sum(len(names) for names, _ in groups[MOST_OUT:]):
        are = count(left, "more host is", "more hosts are")
        yield [(f"… and {are} out; `gpurun inventory list @out` shows why", "dim")]


def alike(said: Mapping[str, tuple[str, ...]], fold: Fold) -> list[tuple[list[str], tuple[str, ...]]]:
    """Group hosts of which the same is said, also if each text has its own host's name in it: the names are folded.

    Args:
        said: host → texts about it.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, texts in said.items():
        groups.setdefault(texts, []).append(name)
    joined: dict[tuple[str, ...], list[str]] = {}
    for texts, names in groups.items():
        key = texts if len(names) > 1 else tuple(_own_name(names[0]).sub(_NAME, text) for text in texts)
        joined.setdefault(key, []).extend(names)
    return [(names, tuple(text.replace(_NAME, fold(names)) for text in texts)) for texts, names in joined.items()]


def _own_name(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")


def unheard_lines(ages: Mapping[str, float | None], fold: Fold, duration: Callable[[float], str]) -> Iterator[Line]:
    """Say how old the knowledge about hosts is.

    Args:
        ages: host → the seconds since somebody looked at it; None = never.
    """
    old = {name: age_s for name, age_s in ages.items() if age_s is not None}
    never = [name for name in ages if name not in old]
    for names, since in (
        (old, f"last checked {duration(max(old.values(), default=0))} ago"),
        (never, "never checked"),
    ):
        if names:
            yield [(printable(f"{fold(names)}: {since}; `gpurun doctor` checks now"), "dim")]


def _cell_marks(picture: Picture) -> dict[str, Span]:
    """Return the text and the mark of each cell; all texts are as wide as a job's letter."""
    wide = max(map(len, picture.letters.values()), default=1)
    spans: dict[str, Span] = {job: (letter, f"job:{at}") for at, (job, letter) in enumerate(picture.letters.items())}
    for mark in MARKS:
        spans[mark] = (mark.ljust(wide), "free" if mark == FREE else "wait" if mark == KEPT else "bad")
    return spans


def _entry(group: Alike, fold: Fold, marks: dict[str, Span]) -> Line:
    line: Line = [(printable(fold(group.names)) + " ", "")]
    for cell in group.cells:
        text, mark = marks[cell]
        if line[-1][1] == mark and mark:
            line[-1] = (line[-1][0] + text, mark)
        else:
            line.append((text, mark))
    if not group.cells:
        line.append(("no GPUs", "dim"))
    if group.state != "ok":
        line.append((f" {printable(group.shown)}", "bad"))
    return line


def _width(line: Line) -> int:
    return sum(width_of(text) for text, _ in line)


def _heading(rack: RackView, fold: Fold) -> tuple[Span, Span]:
    names = fold(rack.racks) if len(rack.racks) > 1 else rack.racks[0]
    each = count(rack.hosts, "host")
    kind, gpus = ", ".join(rack.generations), count(rack.gpus, "GPU")
    return (printable(names), "head"), (f"  {printable(kind)}  {each}  {rack.free} of {gpus} free", "dim")


def _beside(entries: Sequence[Line], unit: int, columns: int | None) -> Iterator[Line]:
    """Lay out entries in columns of one width; a wide entry takes several columns, and is never cut."""
    if columns is None:
        yield from ([(INDENT, ""), *entry] for entry in entries)
        return
    room = columns - len(INDENT)
    line: Line = [(INDENT, "")]
    used = 0
    for whole in entries:
        entry = whole
        while _width(entry) > room and "," in entry[0][0]:  # a long list of names takes several lines
            first, entry = _in_two(entry, room)
            if used:
                yield line
            line, used = [(INDENT, "")], 0
            yield [(INDENT, ""), first]
        wide = _width(entry)
        if used and used + wide > room:
            yield line
            line, used = [(INDENT, "")], 0
        takes = -(-(wide + GAP) // unit) * unit
        line = [*line, *entry, (" " * (takes - wide), "")]
        used += takes
    if used:
        yield line


def _in_two(entry: Line, room: int) -> tuple[Span, Line]:
    """Split off as many of an entry's names as fit. Returns them, and the entry with the other names."""
    names = entry[0][0]
    at = names.rfind(",", 0, room) + 1 or names.find(",") + 1
    return (names[:at], ""), [(names[at:], ""), *entry[1:]]


# -- tables -----------------------------------------------------------------------------------------------------


def job_lines(
    picture: Picture, jobs: Sequence[JobRow], columns: int | None, duration: Callable[[float], str]
) -> Iterator[Line]:
    """Return a table of jobs. On a narrow terminal, some columns go below the job's line; a pipe gets all columns.

    Args:
        jobs: the jobs of the picture to show.
        columns: width of the terminal; None: each job is one line of any length.
    """
    marks = _cell_marks(picture)
    most_name = max(columns // 4, 8) if columns else None
    several = len({job.owner for job in jobs}) > 1
    heads = ["", "job", *(["owner"] if several else []), "name", "state", "GPUs", "for", "hosts", "reason"]
    rows: list[list[Cell]] = [
        [marks.get(job.id, ""), job.id, *([job.owner] if several else []), _short(printable(job.name), most_name),
         (job.state.value, STATE_MARKS.get(job.state, "")), job.gpus, duration(job.for_s), job.hosts, job.reason]
        for job in jobs
    ]  # fmt: skip
    if not any(job.letter for job in jobs):
        heads, rows = heads[1:], [row[1:] for row in rows]

    def below(number: int, left: Sequence[Span]) -> Iterator[Line]:
        told = "; ".join(f"on {text}" if head == "hosts" else text for head, text in left)
        lines = list(wrapped(told, max((columns or 0) - 4, 20)))
        yield from ([(f"    {line}", "dim")] for line in lines[:MOST_REASON_LINES])
        if len(lines) > MOST_REASON_LINES:
            yield [(f"    … `gpurun status {jobs[number].id}` shows the whole reason", "dim")]

    return table_lines(heads, rows, columns, least=len(heads) - 2, below=below)


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[Cell]], columns: int | None = None, *, figures: int = 0,
    least: int = 1, below: Below | None = None,
) -> Iterator[Line]:  # fmt: skip
    """Yield a table of texts, which are made printable, and of which none is cut.

    On a narrow terminal, the cells of columns that do not fit go below their row, each behind its head: a part of a
    job's id or of a host's name is no use.

    Args:
        columns: width of the terminal; None: each row is one line of any length.
        figures: this many of the last columns are right-aligned.
        least: this many columns are in their row, even if they do not fit.
        below: other lines for cells that do not fit; gets a row's number, and heads and texts of the cells.
    """
    spans = [[_span((head, "head")) for head in heads], *([_span(cell) for cell in row] for row in rows)]
    widths = [max(width_of(text) for text, _ in column) for column in zip(*spans, strict=True)]
    ends = list(accumulate(width + GAP for width in widths))
    shown = max([least, *(at for at, end in enumerate(ends, 1) if columns is None or end - GAP <= columns)])
    for number, row in enumerate(spans, -1):
        yield _row(row[:shown], widths, len(heads) - figures)
        left = [(head, text) for (head, _), (text, _) in zip(spans[0][shown:], row[shown:], strict=True) if text]
        if columns is not None and number >= 0 and left:
            yield from below(number, left) if below else _behind_heads(left, columns)


def _span(cell: Cell) -> Span:
    return (printable(cell), "") if isinstance(cell, str) else (printable(cell[0]), cell[1])


def _behind_heads(left: Sequence[Span], columns: int) -> Iterator[Line]:
    told = "; ".join(f"{head} {text}".strip() for head, text in left)
    for line in wrapped(told, max(columns - 4, 20), whole_words=True):
        yield [(f"    {line}", "dim")]


def _row(cells: Sequence[Span], widths: Sequence[int], first_figure: int) -> Line:
    line: Line = []
    for at, (text, mark) in enumerate(cells):
        fill = " " * (widths[at] - width_of(text))
        gap = " " * GAP if at < len(cells) - 1 else ""
        line += [(fill + text, mark), (gap, "")] if at >= first_figure else [(text, mark), (gap and fill + gap, "")]
    return line


def _short(text: str, most: int | None) -> str:
    """Shorten a name to its column; the job's id beside it identifies the job."""
    if most is None or width_of(text) <= most:
        return text
    while width_of(text) >= most:
        text = text[:-1]
    return f"{text}…"


def wrapped(text: str, room: int, *, whole_words: bool = False) -> Iterator[str]:
    """Return a text as lines of at most so many columns, wrapped between words, and inside long ones unless
    `whole_words`.
    """
    line = ""
    for word in text.split(" "):
        rest = word
        if line and width_of(line) + 1 + width_of(rest) > room:
            yield line
            line = ""
        while width_of(rest) > room and not whole_words:
            yield rest[:room] if rest.isascii() else rest[: room // 2]
            rest = rest[room:] if rest.isascii() else rest[room // 2 :]
        line = f"{line} {rest}" if line else rest
    if line:
        yield line


# The reported metrics of a job's ranks, as curves over their steps. Pure.


MOST_METRICS, MOST_POINTS = 24, 50_000
MOST_STEP = 1 << 53
DRAWN_POINTS = 600
WIDTH, HEIGHT = 460.0, 240.0
BOX = (70.0, 40.0, WIDTH - 90, HEIGHT - 64)
COLOUR = "#1f6feb"


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

    def drawn(self) -> list[Markup]:
        """Return a picture of each metric, as SVG, sorted by name."""
        return [picture_of_curve(name, self.points[name]) for name in sorted(self.points)]


def picture_of_curve(name: str, points: dict[int, float]) -> Markup:
    """Return one curve with its axes, and its last value as text."""
    steps = sorted(points)
    shown = [*steps[:: -(-len(steps) // DRAWN_POINTS)], steps[-1]]
    values = [points[step] for step in shown]
    sheet = Drawing(WIDTH, HEIGHT, f"{name}: {points[steps[-1]]:.6g} at step {steps[-1]}")
    chart = Chart(sheet, BOX, Numbers(shown[0], shown[-1]), around(values), ("", ""))
    chart.curve(zip(shown, values, strict=True), COLOUR, width=1.8)
    chart.dot(shown[-1], values[-1], COLOUR)
    return sheet.svg()
