"""``gpurun status`` for people: one folded line per kind of host, one line per job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpurun.cli.printing import duration, printable, shown_for_s
from gpurun.inventory.hostset import fold

if TYPE_CHECKING:
    from gpurun.jobs.record import JobRecord

STATE_STYLES = {
    "RUNNING": "green", "SUCCEEDED": "dim green", "FAILED": "red", "TIMED_OUT": "red", "CANCELLED": "dim",
    "QUEUED": "yellow",
}  # fmt: skip


def print_status(hosts: Sequence[dict[str, Any]], records: Sequence[JobRecord], *, most_queued: int) -> None:
    """Both tables and a line that sums them up.

    Args:
        most_queued: so many of the jobs that wait are shown, the first of `records`.
    """
    console = Console()
    console.print(_hosts(hosts))
    waiting = [record.id for record in records if record.state.value == "QUEUED"]
    left_out = set(waiting[most_queued:])
    if records:
        console.print(_jobs([record for record in records if record.id not in left_out]))
    if left_out:
        console.print(f"{len(left_out)} more wait; `gpurun queue` lists all that wait, in order", highlight=False)
    for host in hosts:
        for each in host.get("foreign", ()):
            text = f"{host['host']}: GPUs {', '.join(map(str, each['gpus']))} belong to {each['job']}"
            console.print(printable(f"{text} of {each['user']} on {each['head']}"), highlight=False, markup=False)
    free, gpus = sum(host["free"] for host in hosts if host["state"] == "ok"), sum(host["gpus"] for host in hosts)
    rest = sum(host["free"] for host in hosts) - free
    more = f"; {rest} more on hosts that get no new gangs" if rest else ""
    console.print(f"{free} of {gpus} GPUs free on {len(hosts)} host{'s' * (len(hosts) != 1)}{more}", highlight=False)


def _hosts(hosts: Sequence[dict[str, Any]]) -> Table:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for host in hosts:
        key = (host["rack"], host["generation"], host["gpus"], host["free"], host.get("drain", host["state"]))
        groups.setdefault(key, []).append(host["host"])
    table = Table("hosts", "rack", "generation", "GPUs", "free", "state", box=None, header_style="bold", pad_edge=False)
    for (rack, generation, gpus, free, state), names in groups.items():
        bar = Text("█" * (gpus - free) + "░" * free if gpus <= 16 else "")
        style = "" if state == "ok" else "red"
        table.add_row(fold(names), rack, generation, bar, f"{free}/{gpus}", Text(state, style=style))
    return table


def _gpus(record: JobRecord) -> str:
    """``8``; ``6 of 8`` for an elastic gang that runs with fewer than it asked for."""
    have = sum(len(grant.gpus) for grant in record.granted)
    return f"{have} of {record.gpus}" if 0 < have < record.gpus else str(record.gpus)


def _jobs(records: Sequence[JobRecord]) -> Table:
    """One line per job; with the owner where the jobs are of more than one."""
    several = len({record.owner_uid for record in records}) > 1
    columns = ("job", *(["owner"] if several else []), "name", "state", "GPUs", "hosts", "for", "reason")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    now = time.time()
    for record in records:
        table.add_row(
            record.id,
            *([Text(printable(record.owner))] if several else []),
            Text(printable(record.name)),
            Text(record.state.value, style=STATE_STYLES.get(record.state.value, "")),
            _gpus(record),
            fold(grant.host for grant in record.granted),
            duration(shown_for_s(record, now)),
            Text(printable(record.story(now))),
        )
    return table
