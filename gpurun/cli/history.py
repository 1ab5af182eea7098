"""``gpurun history``: show the ended attempts of all jobs."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import JsonOption
from gpurun.cli.printing import duration, print_json, printable, say
from gpurun.cli.values import WHEN
from gpurun.documents.table_cells import cell
from gpurun.errors import BadInput, StateError
from gpurun.quantities.counts import count
from gpurun.quantities.local_time import date_minute, day_minute, zone_name

if TYPE_CHECKING:
    from gpurun.history.row import HistoryRow
    from gpurun.history.select import Wanted

SHOWN = 50
UserOption = Annotated[str | None, typer.Option("--user", metavar="USER", help="Show only jobs of this user.")]
PoolOption = Annotated[str | None, typer.Option("--pool", metavar="POOL", help="Show only jobs of this pool.")]
ProjectOption = Annotated[
    str | None, typer.Option("--project", metavar="PROJECT", help="Show only jobs of this project.")
]
SinceOption = Annotated[
    float | None,
    typer.Option("--since", click_type=WHEN, help="Start of the period, such as 7d, yesterday or '2026-11-01 10:00'."),
]
UntilOption = Annotated[float | None, typer.Option("--until", click_type=WHEN, help="End of the period.")]


def history(
    user: UserOption = None,
    pool: PoolOption = None,
    project: ProjectOption = None,
    host: Annotated[str | None, typer.Option("--host", metavar="HOST", help="Show only attempts on this host.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help="Show only jobs with this outcome, such as FAILED. You can repeat --state."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="TEXT", help="Show only jobs whose name or id contains this text.")
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Only rebuild the history of your jobs from the folders of the jobs.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a CSV table with all columns.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show past attempts of jobs with owner, waiting time, GPU use and outcome. Each start of a job is an attempt.

    gpurun history --user alice --since 7d --state FAILED
    """
    from gpurun.state.home import home

    if rebuild:
        _rebuild()
        return
    wanted = wanted_of(user, pool, project, since, until, host=host, states=state, name=name)
    to_all = as_csv or as_json
    found, problems = _read(wanted, None if to_all else SHOWN + 1)
    if as_json:
        print_json({"attempts": [asdict(row) for row in found]})
    elif as_csv:
        _print_csv(found)
    elif found:
        _print_table(found[:SHOWN])
        if len(found) > SHOWN:
            say(
                f"the table shows only the newest {SHOWN} ended attempts; --until, --csv and --json show older attempts"
            )
    else:
        say(f"no ended attempt in {home(os.environ)} matches")
    end_with(problems)


def wanted_of(
    user: str | None, pool: str | None, project: str | None, since_s: float | None, until_s: float | None, *,
    host: str | None = None, states: Sequence[str] | None = None, name: str | None = None,
) -> Wanted:  # fmt: skip
    """Return the options as conditions. Raises BadInput for an invalid value."""
    from gpurun.history.row import OUTCOMES
    from gpurun.history.select import Wanted

    if since_s is not None and until_s is not None and until_s < since_s:
        period = f"{date_minute(since_s)} to {date_minute(until_s)}"
        raise BadInput(f"--until is before --since: {period}", hint="give the earlier time to --since")

    asked = tuple(state.upper() for state in states or ())
    if wrong := [state for state in asked if state not in OUTCOMES]:
        raise BadInput(f"--state: {wrong[0]!r} is not an outcome", hint=f"the outcomes are {', '.join(OUTCOMES)}")
    return Wanted(
        user=user, pool=pool, project=project, host=host, states=asked, name=name,
        since_s=since_s, until_s=until_s,
    )  # fmt: skip


def _read(wanted: Wanted, most: int | None) -> tuple[list[HistoryRow], list[StateError]]:
    from gpurun.history.collect import sources
    from gpurun.history.select import rows
    from gpurun.state.home import home

    problems: list[StateError] = []
    with sources(home(os.environ), problems.append) as found:
        return rows(found, wanted, most=most), problems


def end_with(problems: Sequence[StateError]) -> None:
    """Report unreadable histories. Raises typer.Exit if there are any."""
    for problem in problems:
        say(printable(f"gpurun: {problem}"))
        if problem.hint:
            say(printable(f"  → {problem.hint}"))
    if problems:
        raise typer.Exit(StateError.exit_code)


def _rebuild() -> None:
    from gpurun.history.collect import rebuild
    from gpurun.state.home import home

    attempts, aside = rebuild(home(os.environ))
    if aside is not None:
        say(f"the old history file was damaged; gpurun renamed the damaged file to {aside}")
    say(f"your history has {count(attempts, 'attempt')}")


def _print_csv(found: Sequence[HistoryRow]) -> None:
    from gpurun.history.row import COLUMNS

    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in found:
        table.writerow([cell(getattr(row, column)) for column in COLUMNS])


def _print_table(found: Sequence[HistoryRow]) -> None:
    from gpurun.cli.tables import print_table
    from gpurun.inventory.folding import fold

    several = len({row.user for row in found}) > 1
    heads = (
        "job", "try", *(["owner"] if several else []), "name", "GPUs", "outcome", "ran", f"ended ({zone_name()})",
        "hosts", "waited", "GPU h", "busy", "reason",
    )  # fmt: skip
    rows = [
        (
            row.job, str(row.attempt), *([row.user] if several else []), row.name, str(row.gpus), row.outcome,
            duration(row.ended_s - row.started_s) if row.started_s else "", day_minute(row.ended_s),
            fold(row.hosts.split()), duration(row.waited_s), f"{row.gpu_s / 3600:.1f}",
            "" if row.use_percent is None else f"{row.use_percent:.0f}%", row.reason,
        )
        for row in found
    ]  # fmt: skip
    print_table(heads, [([*map(printable, cells)], "") for cells in rows])
