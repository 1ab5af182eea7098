"""``gpurun logs``: print the output of a job's ranks."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.jobs import POLL_S, find_job
from gpurun.cli.options import JobArgument
from gpurun.cli.printing import printable, printed, say
from gpurun.cli.values import WHEN
from gpurun.errors import BadInput
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.states import State
from gpurun.quantities.local_time import of_log

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord
    from gpurun.supervisor.loglines import LoggedLine


def logs(
    job: JobArgument,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="RANK", help="Print only the lines of this rank.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="LINES", help="Begin with the last LINES lines.")
    ] = None,
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since", click_type=WHEN, help="Print lines since this time, such as 10m, 08:00 or '2026-11-25 08:00'."
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option("--grep", metavar="PATTERN", help="Print only lines that match this regular expression."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Print the local time before each line.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")] = False,
) -> None:
    """Print the output of a job's ranks.

    If the job failed, gpurun also prints on stderr which rank failed first.

    gpurun logs @last --rank 0 --tail 50

    gpurun logs @last --follow --grep loss
    """
    from gpurun.supervisor.loglines import LogTail

    folder = find_job(job)
    wanted = _Wanted(_checked_rank(folder, rank), _since(since_s), _pattern(grep))
    lines, caretaker, printed_some = LogTail(folder.log), Caretaker(), False
    if tail is not None:
        lines.skip_to_last(tail, wanted.has)
    while True:
        record = folder.record()
        for logged in lines.new():
            if wanted.has(logged):
                printed_some = True
                sys.stdout.write(_json(logged) if as_json else _text(logged, rank, timestamps=timestamps))
        sys.stdout.flush()
        if record.state.ended or not follow:
            break
        caretaker.look([folder])
        time.sleep(POLL_S)
    if record.state.ended:
        _say_first_failure(record)
    if not printed_some:
        _say_why_nothing(folder, record)


@dataclass(frozen=True)
class _Wanted:
    """The filters for lines."""

    rank: int | None
    since: str
    pattern: re.Pattern[str] | None

    def has(self, logged: LoggedLine) -> bool:
        return (
            (self.rank is None or logged.line.rank == self.rank)
            and logged.time >= self.since
            and (self.pattern is None or self.pattern.search(logged.line.text) is not None)
        )


def _checked_rank(folder: JobFolder, rank: int | None) -> int | None:
    """Return the rank. Raises BadInput if no attempt of the job can have it."""
    if rank is None:
        return None
    spec = folder.spec()
    ranks = spec.gpus + (spec.roles.without_gpu if spec.roles is not None else 0)
    if spec.one_per_host and spec.min_gpus is None:
        record = folder.record()
        ranks = len(record.granted) if record.granted and record.attempt == 1 else ranks
    if rank >= ranks:
        raise BadInput(f"the job has no rank {rank}", job=folder.id, hint=f"the job's ranks are 0 to {ranks - 1}")
    return rank


def _since(when_s: float | None) -> str:
    """Return the value of ``--since`` in the log's time format (RFC 3339, UTC); "" for the whole log."""
    return "" if when_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when_s))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(
            f"--grep {text[:40]!r} is not a regular expression: {error}" if text else f"--grep: {error}"
        ) from None


def _text(logged: LoggedLine, rank: int | None, *, timestamps: bool) -> str:
    who = "" if rank is not None else f"{logged.who} "
    return f"{of_log(logged.time) + ' ' if timestamps else ''}{who}{printed(logged.line.text)}\n"


def _json(logged: LoggedLine) -> str:
    line = logged.line
    return json.dumps({"time": logged.time, "rank": line.rank, "stream": line.stream, "text": line.text}) + "\n"


def _say_why_nothing(folder: JobFolder, record: JobRecord) -> None:
    """Say why no line is printed: the job waits, its ranks have not printed, or no line matches."""
    if folder.log.exists() and folder.log.stat().st_size:
        say(f"no line of {record.id}'s log matches the options")
    elif record.state is State.QUEUED:
        say(f"{record.id} has printed nothing: the job waits in the queue; `gpurun why {record.id}` explains why")
    else:
        say(f"{record.id} has printed nothing{'' if record.state.ended else ' yet'}: the job is {record.state.value}")


def _say_first_failure(record: JobRecord) -> None:
    """Print the first rank to fail and its last lines: a launcher prints many lines after them."""
    failure = record.first_failure
    if failure is None:
        return
    say(printable(f"{record.id} {record.state.value}: {record.reason or failure.reason}"))
    for text in failure.excerpt:
        say(f"        | {printed(text)}")
