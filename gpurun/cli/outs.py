"""Hosts that keep a job waiting, because they are out or could not start it: for `gpurun why`."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from gpurun.cli.printing import duration, printable
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.record import JobRecord, StartFailure
    from gpurun.scheduler.explain import Explanation
    from gpurun.state.machines import Out

MOST_FAILURES = 8
LOOKED_AT_WITHIN_S = 30
"""So soon a waiter looks again at a host that is out: `gpurun.head.looks.AGAIN_S` and the longest look."""


def outs_in_the_way(inventory: Inventory, explanation: Explanation, owner_uid: int) -> dict[str, Out]:
    """Return host → why it is out, for the hosts that the job could use otherwise.

    Args:
        owner_uid: the owner of the job, whose knowledge of machines counts.
    """
    barred = {host: group.why for group in explanation.groups for host in group.hosts}
    return {host: out for host, out in _outs(inventory, owner_uid).items() if barred.get(host) == out.words}


def outs_that_failed(record: JobRecord) -> dict[str, Out]:
    """Return host → why it is out, for the hosts that could not start a job."""
    from gpurun.leases.look import loaded

    failed = {each.host for each in record.start_failures}
    inventory = loaded(os.path.realpath(record.inventory), lambda _: None) if failed else None
    outs = _outs(inventory, record.owner_uid) if inventory is not None else {}
    return {host: out for host, out in outs.items() if host in failed}


def _outs(inventory: Inventory, uid: int) -> dict[str, Out]:
    from gpurun.state.home import home
    from gpurun.state.machines import outs_of, read_machines

    known = outs_of(read_machines(home(os.environ), uid))
    return {host.name: known[host.machine] for host in inventory.hosts if host.machine in known}


def without_free(explanation: Explanation, outs: Mapping[str, Out]) -> Explanation:
    """Return the explanation in which no GPU of a host that is out is free."""
    groups = tuple(
        replace(group, free=0, largest_host=0, largest_rack=0) if any(host in outs for host in group.hosts) else group
        for group in explanation.groups
    )
    return replace(explanation, groups=groups)


def without_reasons(explanation: Explanation, outs: Mapping[str, Out]) -> Explanation:
    """Return the explanation that only says which hosts are out: `print_outs` says why."""
    out = [group for group in explanation.groups if any(host in outs for host in group.hosts)]
    others = [group for group in explanation.groups if group not in out]
    if not out:
        return explanation
    hosts = tuple(host for group in out for host in group.hosts)
    return replace(explanation, groups=(*others, replace(out[0], hosts=hosts, why="out")))


def print_start_failures(failures: Sequence[StartFailure], outs: Container[str], now_s: float) -> None:
    """Print why hosts could not start a job, how much space they lack, and when the job tries them again.

    Args:
        outs: hosts that are out: `print_outs` says why.
    """
    from gpurun.inventory.folding import fold
    from gpurun.views.lines import alike

    said = {each.host: (_failure(each, now_s),) for each in failures if each.host not in outs}
    groups = alike(said, fold)
    if groups:
        typer.echo("  hosts that could not start the job:")
    for names, (text,) in groups[:MOST_FAILURES]:
        typer.echo(printable(f"    {fold(names)}: {text}"))
    if left := sum(len(names) for names, _ in groups[MOST_FAILURES:]):
        typer.echo(f"    … and {count(left, 'more host')}")


def _failure(failure: StartFailure, now_s: float) -> str:
    from gpurun.scheduler.wording import in_time

    lacks = f" ({failure.lacks_mib / 1024:.1f} GiB more needed)" if failure.lacks_mib else ""
    again = f"; gpurun tries again {in_time(failure.until_s, now_s)}" if failure.until_s > now_s else ""
    return f"{failure.reason}{lacks}{again}"


def print_outs(outs: Mapping[str, Out], owner_uid: int) -> None:
    """Print why hosts are out, since when, what to do, and when somebody looks at them again.

    Args:
        owner_uid: the owner of the job, whose waiter looks.
    """
    if not outs:
        return
    from gpurun.inventory.folding import fold
    from gpurun.leases.waiters import waiter_lives
    from gpurun.state.home import home
    from gpurun.views.lines import out_lines, plain
    from gpurun.views.reading import out_host

    wall_s = time.time()
    typer.echo("  hosts that get no jobs until a check passes:")
    for line in out_lines([(host, out_host(out, wall_s)) for host, out in outs.items()], fold, duration):
        typer.echo(f"    {plain(line)}")
    looks = waiter_lives(home(os.environ), owner_uid)
    typer.echo(
        f"    gpurun checks these hosts again within {LOOKED_AT_WITHIN_S} s"
        if looks else "    no gpurun process checks these hosts now; run `gpurun doctor` to check the hosts"
    )  # fmt: skip
