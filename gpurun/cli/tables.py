"""Tables and bars for people: racks and hosts with a cell for each GPU, jobs, and the progress of copies."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpurun.cli.printing import say, wants_colour
from gpurun.documents.plain import printable
from gpurun.inventory.folding import fold
from gpurun.quantities import count, duration
from gpurun.views.lines import (
    Cell,
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
    from rich.progress import Progress, TaskID

    from gpurun.cli.printing import HostShape
    from gpurun.views.picture import Picture


LEAST_COLUMNS = 40
PIPE_COLUMNS = 10_000
_SGR = {"head": "1", "dim": "2", "bad": "31", "good": "32", "wait": "33", "free": "2"}
JOB_COLOURS = (39, 208, 76, 201, 226, 51, 141, 203, 118, 215, 123, 183)
"""Indices of xterm's 256 colours: light colours, on which black letters are readable."""


def print_status(
    picture: Picture,
    hosts: Sequence[HostShape],
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
    columns = terminal_columns()
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
    print_lines(job_lines(picture, picture.jobs, terminal_columns(), duration))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, figures: int = 0) -> None:
    """Print a table; its last `figures` columns are right-aligned. A pipe gets whole rows of any length.

    Prints nothing, not even heads, if there is no row.
    """
    if rows:
        print_lines(table_lines(heads, rows, terminal_columns(), figures=figures))


def print_text(text: str) -> None:
    """Print a printable text, on a terminal wrapped between words: names and ids stay whole."""
    columns = terminal_columns()
    lines = [text] if columns is None else wrapped(text, columns, whole_words=True)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def terminal_columns() -> int | None:
    """Return the width of the terminal; None if stdout is no terminal."""
    return max(shutil.get_terminal_size().columns, LEAST_COLUMNS) if sys.stdout.isatty() else None


@contextmanager
def redrawn() -> Iterator[Callable[[Iterable[Line]], None]]:
    """Yield a function that draws lines on the terminal, in place of those that it drew before.

    Counts the lines for which a terminal has no room. A pipe gets the last picture, whole.
    """
    from rich.live import Live
    from rich.text import Text

    def draw(lines: Iterable[Line]) -> None:
        shown = list(lines)
        room = shutil.get_terminal_size().lines - 1 if sys.stdout.isatty() else len(shown)
        if len(shown) > room:
            shown = [*shown[: room - 1], [(f"… {count(len(shown) - room + 1, 'more line')}", "dim")]]
        live.update(Text.from_ansi("\n".join(map(painted, shown))), refresh=True)

    with Live(console=console(), auto_refresh=False) as live:
        yield draw


def console(*, stderr: bool = False) -> Console:
    """Return a Rich console for text as it is: what looks like markup or a number stays plain.

    A pipe gets whole lines of any length. Without colours (`wants_colour`), the output has no escape sequence at all.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    made = Console(
        stderr=stderr, highlight=False, markup=False, emoji=False,
        color_system="auto" if wants_colour(stream) else None,
    )  # fmt: skip
    if not made.is_terminal:
        made.width = PIPE_COLUMNS
    return made


def print_lines(lines: Iterable[Line]) -> None:
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


# Progress of an image or a data set to hosts: a bar per host on a terminal, otherwise a line every 5 s.


LINE_EVERY_S = 5.0
MOST_BARS = 16


def _bars(*, is_shown: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[state]}"),
        console=console(stderr=True), transient=True, disable=not is_shown,
    )  # fmt: skip


class ShipProgress:
    """Shows the progress of a copy to hosts. Beyond `MOST_BARS` hosts, one bar shows the sum.

    Attributes:
        what: is copied.
    """

    def __init__(self, what: str = "image") -> None:
        self.what = what
        self._live = sys.stderr.isatty()
        self._done: dict[str, tuple[int, int]] = {}
        self._bars: dict[str, TaskID] = {}
        self._said = 0.0
        self._progress = _bars(is_shown=self._live)
        self._progress.start()

    def show(self, event: Mapping[str, Any]) -> None:
        """Show an event of a host: `bytes` of `total`, and its state."""
        host, state = str(event.get("host")), str(event.get("state", ""))
        done, total = int(event.get("bytes") or 0), int(event.get("total") or 0)
        self._done[host] = (done, total)
        if self._live:
            self._update_bar(host, done, total, state)
        elif total and time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            all_done, all_total = self._sums()
            left = f", {duration(float(event['eta_s']))} left" if event.get("eta_s") else ""
            what, amount = printable(self.what), f"{all_done >> 20} of {all_total >> 20} MiB"
            say(f"        {what}: {amount} on {count(len(self._done), 'host')}{left}")

    def close(self) -> None:
        """Remove the bars."""
        self._progress.stop()

    def _sums(self) -> tuple[int, int]:
        return sum(done for done, _ in self._done.values()), sum(total for _, total in self._done.values())

    def _update_bar(self, host: str, done: int, total: int, state: str) -> None:
        key = host if host in self._bars or len(self._bars) < MOST_BARS else "other hosts"
        if key == "other hosts":
            done, total = self._sums()
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(key, total=total or None, state=state)
        self._progress.update(self._bars[key], completed=done, total=total or None, state=state)
