"""Hosts that are out and keep a job waiting: for `gpurun why`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from gpurun.cli.printing import duration

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.scheduler.explain import Explanation
    from gpurun.state.machines import Out

LOOKED_AT_WITHIN_S = 30
"""So soon a waiter looks again at a host that is out: `gpurun.head.looks.AGAIN_S` and the longest look."""


def outs_in_the_way(inventory: Inventory, explanation: Explanation) -> dict[str, Out]:
    """Return host → why it is out, for the hosts that the job could use otherwise."""
    from gpurun.leases.cluster import Cluster
    from gpurun.state.home import home

    outs = Cluster(inventory, home(os.environ)).outs
    barred = {host: group.why for group in explanation.groups for host in group.hosts}
    return {host: out for host, out in outs.items() if barred.get(host) == out.words}


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

    now_s = time.time()
    typer.echo("  hosts that are out, and return when a check passes:")
    for line in out_lines([(host, out_host(out, now_s)) for host, out in outs.items()], fold, duration):
        typer.echo(f"    {plain(line)}")
    looks = waiter_lives(home(os.environ), owner_uid)
    typer.echo(
        f"    gpurun looks at them again within {LOOKED_AT_WITHIN_S} s"
        if looks else "    nobody looks at them now: `gpurun doctor` does"
    )  # fmt: skip
