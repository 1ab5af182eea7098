"""``gpurun history | report | audit``: ended attempts, GPU use, and who did what."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from gpurun.cli.options import WHEN, InventoryOption, JsonOption
from gpurun.cli.printing import print_json, say
from gpurun.documents.plain import csv_text, printable
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.moments import UNKNOWN, date_minute, date_time, day_minute, zone_name
from gpurun.quantities import count, duration
from gpurun.state.paths import home

if TYPE_CHECKING:
    from gpurun.history.report import Accounts, Share
    from gpurun.history.row import HistoryRow
    from gpurun.history.store import Wanted


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


class HistoryShape(TypedDict):
    """Ended attempts, the newest first."""

    attempts: Sequence[HistoryRow]


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
    from gpurun.state.paths import home

    if rebuild:
        _rebuild()
        return
    wanted = wanted_of(user, pool, project, since, until, host=host, states=state, name=name)
    to_all = as_csv or as_json
    found, problems = _read(wanted, None if to_all else SHOWN + 1)
    if as_json:
        print_json(HistoryShape(attempts=found))
    elif as_csv:
        from gpurun.history.row import COLUMNS

        sys.stdout.write(csv_text(COLUMNS, ([getattr(row, column) for column in COLUMNS] for row in found)))
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
    from gpurun.history.store import Wanted

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
    from gpurun.history.store import JobHistory, rows
    from gpurun.state.paths import home

    problems: list[StateError] = []
    with JobHistory(home(os.environ)).sources(problems.append) as found:
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
    from gpurun.history.store import JobHistory
    from gpurun.state.paths import home

    attempts, aside = JobHistory(home(os.environ)).rebuild()
    if aside is not None:
        say(f"the old history file was damaged; gpurun renamed the damaged file to {aside}")
    say(f"your history has {count(attempts, 'attempt')}")


def _print_table(found: Sequence[HistoryRow]) -> None:
    from gpurun.cli.tables import print_table
    from gpurun.inventory.folding import fold

    several = len({row.user for row in found}) > 1
    heads = (
        "job", "try", *(["owner"] if several else []), "name", "GPUs", "outcome", "ran", f"ended ({zone_name()})",
        "hosts", "waited", "GPU h", "busy", "goodput", "reason",
    )  # fmt: skip
    rows = [
        (
            row.job, str(row.attempt), *([row.user] if several else []), row.name, str(row.gpus), row.outcome,
            duration(row.ended_s - row.started_s) if row.started_s else "", day_minute(row.ended_s),
            fold(row.hosts.split()), duration(row.waited_s), f"{row.gpu_s / 3600:.1f}",
            "" if row.use_percent is None else f"{row.use_percent:.0f}%", row.goodput_words, row.reason,
        )
        for row in found
    ]  # fmt: skip
    print_table(heads, rows)


# ``gpurun report``: GPU hours by user, waiting times, and wasted GPU time.


SHOWN_ROWS = 10


def report(
    user: UserOption = None,
    pool: PoolOption = None,
    project: ProjectOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", "--to", metavar="FILE", help="Write the report to this HTML file.")
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Summarise GPU hours by user, goodput, waiting times, use of the GPUs that jobs held, and failures by host.

    The report counts running attempts up to now. Without --since, the report begins with the first attempt.

    gpurun report --pool vision --since 30d --html report.html
    """
    from gpurun.history.report import accounts, report_page
    from gpurun.history.store import JobHistory

    wanted, now_s = wanted_of(user, pool, project, since, until), time.time()
    problems: list[StateError] = []
    with JobHistory(home(os.environ)).sources(problems.append, now_s=now_s) as found:
        made = accounts(found, wanted, now_s=now_s, capacity=_capacity(inventory))
    if html is not None:
        try:
            html.write_text(report_page(made), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"the report cannot be written: {error.strerror}", where=str(html)) from error
        say(f"the report is in {html}")
    if as_json:
        print_json(made)
    elif html is None:
        _print(made)
    end_with(problems)


def _capacity(inventory: str | None) -> int | None:
    """Return how many GPUs the inventory has now. None if no inventory is named and the default cannot be loaded."""
    from gpurun.inventory.read import find_inventory, load_inventory

    try:
        return load_inventory(find_inventory(inventory, os.environ)).total_gpus
    except GpurunError:
        if inventory is not None:
            raise
        return None


def _print(made: Accounts) -> None:
    from gpurun.cli.tables import print_text
    from gpurun.history.report import goodput_words, history_summary

    if not made.total.attempts:
        say(f"no attempt in {home(os.environ)} matches")
        return
    print_text(f"{date_minute(made.since_s)} to {date_minute(made.until_s)}: {history_summary(made)}")
    if words := goodput_words(made):
        print_text(printable(words))
    print_text(_timeline(made))
    for name in ("users", "pools", "projects", "generations"):
        shares = getattr(made, name)
        if len(shares) > 1 or name == "users":
            _print_shares(name[:-1], shares)
    for name, counts in (
        ("attempts by outcome", made.outcomes), ("failures by cause", made.causes),
        ("failures by host", made.failed_hosts),
    ):  # fmt: skip
        if counts:
            shown = [f"{printable(label)} {count}" for label, count in list(counts.items())[:SHOWN_ROWS]]
            more = f", {len(counts) - SHOWN_ROWS} more" if len(counts) > SHOWN_ROWS else ""
            print_text(f"{name}: {', '.join(shown)}{more}")
    for row in made.largest[:SHOWN_ROWS]:
        text = f"{row.job}  {row.user}  {row.name}  {row.gpu_s / 3600:.1f} GPU h  {row.use}  {row.outcome}"
        print_text(printable(text))


def _timeline(made: Accounts) -> str:
    """Return a line of blocks: the number of leased GPUs over time. It fits 60 columns."""
    most = max([1.0, float(made.capacity or 0), *made.timeline])
    head = f"leased GPUs, 0 to {most:.0f}: "
    width = 57 - len(head)
    blocks = " ▁▂▃▄▅▆▇█"
    stretches = len(made.timeline)
    parts = [made.timeline[stretches * n // width : stretches * (n + 1) // width] for n in range(width)]
    line = "".join(blocks[round(8 * min(1.0, sum(part) / len(part) / most))] if part else " " for part in parts)
    return f"{head}|{line}|"


def _print_shares(name: str, shares: Mapping[str, Share]) -> None:
    from gpurun.cli.tables import print_table
    from gpurun.history.report import share_cells

    heads = (name, "GPU h", "jobs", "attempts", "failed", "mean wait", "longest", "busy", "idle GPU h")
    print_table(heads, [*map(share_cells, list(shares.items())[:SHOWN_ROWS])])
    if len(shares) > SHOWN_ROWS:
        typer.echo(f"{len(shares) - SHOWN_ROWS} more; --json and --html show all")


# ``gpurun audit``: who did what in a state directory.


HOST = re.compile(r"[A-Za-z][A-Za-z0-9.-]*")
COMMON = ("time_s", "what", "user", "uid", "sudo_user", "host", "pid", "command", "job")


class AuditShape(TypedDict):
    """The audit log, the oldest entry first.

    Attributes:
        entries: each has `what`; most have `time_s`, `user`, `uid`, `host`, `pid`, `command` and `job`.
    """

    entries: list[Mapping[str, Any]]


def audit(
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            "-j",
            metavar="JOB",
            help="Show only entries of this job. JOB is the job's id or the beginning of the id.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which users submitted, granted, preempted or cancelled jobs, cordoned hosts, or changed the inventory."""
    from gpurun.state.audit import AuditLog
    from gpurun.state.paths import home

    entries = [entry for entry in AuditLog(home(os.environ)).read() if job is None or _is_about(entry, job)]
    if as_json:
        print_json(AuditShape(entries=entries))
        return
    for entry in entries:
        typer.echo(printable(_line(entry)))
    if not entries:
        say("no entry of the audit log matches")


def _is_about(entry: Mapping[str, Any], job: str) -> bool:
    about = entry.get("job")
    return isinstance(about, str) and bool(job) and about.startswith((job, f"j-{job}"))


def _line(entry: Mapping[str, Any]) -> str:
    try:
        when = date_time(float(entry["time_s"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        when = UNKNOWN
    behind = f"{entry['sudo_user']} as " if entry.get("sudo_user") else ""
    rest = " ".join(f"{key}={_text(value)}" for key, value in entry.items() if key not in COMMON and value != "")
    who = f"{behind}{entry.get('user', '?')}"
    return f"{when:23}  {who:12} {entry.get('what', '?')!s:10} {entry.get('job') or '':10}  {rest}".rstrip()


def _text(value: object) -> str:
    """Return a field as text. Folds a list only if all its words look like host names: the log may be damaged."""
    if not isinstance(value, list):
        return str(value)
    words = [str(each) for each in value]
    if words and all(HOST.fullmatch(word) for word in words):
        from gpurun.inventory.folding import fold

        return fold(words)
    return ",".join(words)
