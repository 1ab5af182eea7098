"""``gpurun status`` for people: racks and hosts with a cell for each GPU, then one line for each job."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpurun.cli.printing import duration, printable, wants_colour
from gpurun.inventory.folding import fold
from gpurun.quantities.counts import count
from gpurun.views.lines import (
    Line,
    job_lines,
    mark_line,
    out_lines,
    plain,
    rack_lines,
    table_lines,
    total_line,
    unheard_lines,
    wrapped,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gpurun.views.picture import Picture

LEAST_COLUMNS = 40
PIPE_COLUMNS = 10_000
_SGR = {"head": "1", "dim": "2", "bad": "31", "good": "32", "wait": "33", "free": "2"}
JOB_COLOURS = (39, 208, 76, 201, 226, 51, 141, 203, 118, 215, 123, 183)
"""Indices of xterm's 256 colours: light colours, on which black letters are readable."""


def print_status(
    picture: Picture,
    hosts: Sequence[dict[str, Any]],
    *,
    most_queued: int | None,
    unheard: Mapping[str, float | None] | None = None,
) -> None:
    """Print racks, jobs, and a line of totals. No line is cut or wrapped when the output is piped.

    Args:
        hosts: as in ``status --json``; their ``foreign`` says who else holds GPUs.
        most_queued: print at most this many queued jobs, the first in the picture's order; None = all.
        unheard: as `gpurun.views.reading.Reading.unheard`.
    """
    columns = _columns()
    waiting = [job.id for job in picture.jobs if job.state.value == "QUEUED"]
    left_out = set() if most_queued is None else set(waiting[most_queued:])
    lines = [*rack_lines(picture, fold, columns)]
    if (marks := mark_line(picture)) and plain(marks):
        lines.append(marks)
    if picture.jobs:
        jobs = [job for job in picture.jobs if job.id not in left_out]
        lines += [[], *job_lines(picture, jobs, columns, duration)]
    if left_out:
        more = count(len(left_out), "more job waits", "more jobs wait")
        lines.append([(f"{more}; `gpurun queue` lists all waiting jobs in order", "")])
    for host in hosts:
        for each in host.get("foreign", ()):
            whose = f"belong to {each['job']} of {each['user']} on {each['head']}"
            whose = f"are used by {each['process']}" if each["process"] else whose
            lines.append([(printable(f"{host['host']}: GPUs {', '.join(map(str, each['gpus']))} {whose}"), "")])
    lines += [*out_lines(picture.outs, fold, duration), *unheard_lines(unheard or {}, fold, duration)]
    lines.append(total_line(picture))
    print_lines(lines)


def print_jobs(picture: Picture) -> None:
    """Print the jobs of a picture as `print_status` does, without its hosts."""
    columns = max(shutil.get_terminal_size().columns, LEAST_COLUMNS) if sys.stdout.isatty() else None
    print_lines([*job_lines(picture, picture.jobs, columns, duration)])


Rows = Sequence[tuple[Sequence[str], str]]
"""For each row: printable cells, and the row's mark."""


def print_table(heads: Sequence[str], rows: Rows, *, figures: int = 0) -> None:
    """Print a table; its last `figures` columns are right-aligned. A pipe gets whole rows of any length.

    Prints nothing, not even heads, if there is no row.
    """
    if rows:
        print_lines(table_lines(heads, rows, _columns(), figures=figures))


def print_text(text: str) -> None:
    """Print a printable text, on a terminal wrapped between words: names and ids stay whole."""
    columns = _columns()
    lines = [text] if columns is None else wrapped(text, columns, whole_words=True)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _columns() -> int | None:
    return max(shutil.get_terminal_size().columns, LEAST_COLUMNS) if sys.stdout.isatty() else None


def text_of_table(heads: Sequence[str], rows: Rows) -> Text:
    """Return the table for a live view of Rich's."""
    from rich.text import Text

    return Text("\n").join(
        Text(plain(line), style="bold" if line[0][1] == "head" else "") for line in table_lines(heads, rows, _columns())
    )


def console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a Rich console for text as it is: what looks like markup or a number stays plain.

    A pipe gets whole lines of any length. Without colours (`wants_colour`), the output has no escape sequence at all.

    Args:
        soft_wrap: leave lines that are wider than the terminal to the terminal.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    made = Console(
        stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap,
        color_system="auto" if wants_colour(stream) else None,
    )  # fmt: skip
    if not made.is_terminal:
        made.width = PIPE_COLUMNS
    return made


def table_of(*heads: str) -> Table:
    """Return a Rich table with these columns, for live views. A cell that is too wide takes several lines."""
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(Text(head), overflow="fold") for head in heads)
    return Table(*columns, box=None, header_style="bold", pad_edge=False)


def print_lines(lines: Sequence[Line]) -> None:
    """Write lines to stdout, coloured if stdout is a terminal that wants colours."""
    paint = painted if wants_colour(sys.stdout) else plain
    sys.stdout.write("".join(f"{paint(line)}\n" for line in lines))
    sys.stdout.flush()  # messages on stderr follow


def painted(line: Line) -> str:
    """Return a line as text with SGR sequences for the colours of its marks."""
    return "".join(f"\x1b[{code}m{text}\x1b[0m" if (code := _code(mark)) else text for text, mark in line).rstrip()


def _code(mark: str) -> str:
    if mark.startswith("job:"):
        return f"38;5;16;48;5;{JOB_COLOURS[int(mark[4:]) % len(JOB_COLOURS)]}"
    return _SGR.get(mark, "")
