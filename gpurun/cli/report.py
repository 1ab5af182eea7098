"""``gpurun report``: GPU hours by user, waiting times, and wasted GPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.history import (
    PoolOption,
    ProjectOption,
    SinceOption,
    UntilOption,
    UserOption,
    end_with,
    wanted_of,
)
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.quantities.local_time import date_minute
from gpurun.quantities.times import duration
from gpurun.state.home import home

if TYPE_CHECKING:
    from gpurun.history.accounts import Accounts, Share

SHOWN = 10


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
    """Summarise GPU hours by user, waiting times, use of the GPUs that jobs held, and failures by host.

    The report counts running attempts up to now. Without --since, the report begins with the first attempt.

    gpurun report --pool vision --since 30d --html report.html
    """
    from gpurun.history.accounts import accounts
    from gpurun.history.collect import sources

    wanted, now_s = wanted_of(user, pool, project, since, until), time.time()
    problems: list[StateError] = []
    with sources(home(os.environ), problems.append, now_s=now_s) as found:
        made = accounts(found, wanted, now_s=now_s, capacity=_capacity(inventory))
    if html is not None:
        from gpurun.history.page import page

        try:
            html.write_text(page(made), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"the report cannot be written: {error.strerror}", where=str(html)) from error
        say(f"the report is in {html}")
    if as_json:
        print_json(document(made))
    elif html is None:
        _print(made)
    end_with(problems)


def _capacity(inventory: str | None) -> int | None:
    """Return how many GPUs the inventory has now. None if no inventory is named and the default cannot be loaded."""
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find

    try:
        return load(find(inventory, os.environ)).total_gpus
    except GpurunError:
        if inventory is not None:
            raise
        return None


def document(made: Accounts) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return {**asdict(made), "largest": [{**asdict(row), "use": row.use_words} for row in made.largest]}


def _print(made: Accounts) -> None:
    from gpurun.cli.tables import print_text
    from gpurun.history.page import summary

    if not made.total.attempts:
        say(f"no attempt in {home(os.environ)} matches")
        return
    print_text(f"{date_minute(made.since_s)} to {date_minute(made.until_s)}: {summary(made)}")
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
            shown = [f"{printable(label)} {count}" for label, count in list(counts.items())[:SHOWN]]
            more = f", {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
            print_text(f"{name}: {', '.join(shown)}{more}")
    for row in made.largest[:SHOWN]:
        text = f"{row.job}  {row.user}  {row.name}  {row.gpu_s / 3600:.1f} GPU h  {row.use_words}  {row.outcome}"
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
    from gpurun.history.page import hours, percent

    heads = (name, "GPU h", "jobs", "attempts", "failed", "mean wait", "longest", "busy", "idle GPU h")
    rows = [
        (
            label, hours(share.gpu_s), str(share.jobs), str(share.attempts), str(share.failed),
            duration(share.mean_wait_s), duration(share.longest_wait_s), percent(share.busy_percent),
            hours(share.idle_gpu_s),
        )
        for label, share in list(shares.items())[:SHOWN]
    ]  # fmt: skip
    print_table(heads, [([*map(printable, cells)], "") for cells in rows])
    if len(shares) > SHOWN:
        typer.echo(f"{len(shares) - SHOWN} more; --json and --html show all")
