"""``gpurun inventory cordon|drain|uncordon``: what hosts may be used for now. State, never in the file."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpurun.cli.inventory_options import HostsArgument, InventoryOption, JsonOption, cluster
from gpurun.cli.printing import print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ReasonOption = Annotated[str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; others will read it.")]


def cordon(
    hosts: HostsArgument, reason: ReasonOption = "", inventory: InventoryOption = None, as_json: JsonOption = False
) -> None:
    """Give hosts no new gangs; those that run there go on."""
    _put(hosts, "cordoned", reason, inventory, as_json)


def drain(
    hosts: HostsArgument, reason: ReasonOption = "", inventory: InventoryOption = None, as_json: JsonOption = False
) -> None:
    """Give hosts no new gangs, and move away those that run there."""
    _put(hosts, "draining", reason, inventory, as_json)


def uncordon(hosts: HostsArgument, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Give hosts gangs again, whoever cordoned them."""
    from gpurun.state.cordons import changing_cordons

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with changing_cordons(found.home) as cordons:
        lifted = [name for name in names if cordons.pop(name, None) is not None]
    _report(names, lifted, "ok", as_json)
    if lifted:
        _start_what_fits(found.home)


def _put(
    selection: str, state: Literal["cordoned", "draining"], reason: str, inventory: str | None, as_json: bool
) -> None:
    from gpurun.errors import BadInput
    from gpurun.state.cordons import Cordon, changing_cordons
    from gpurun.state.people import myself

    if not reason.isprintable():
        raise BadInput("a reason is one line of printable text")
    found = cluster(inventory)
    names = [host.name for host in found.choose(selection)]
    made = Cordon(state, myself(), time.time(), reason)
    changed = []
    with changing_cordons(found.home) as cordons:
        for name in names:
            old = cordons.get(name)
            if old is not None and (old.state == "lost" or (old.state, old.reason) == (state, reason)):
                continue  # a lost host stays lost until it is heard of or uncordoned
            cordons[name] = made
            changed.append(name)
    _report(names, changed, state, as_json)


def _report(names: Sequence[str], changed: Sequence[str], state: str, as_json: bool) -> None:
    from gpurun.inventory.hostset import fold

    if as_json:
        print_json({"hosts": list(names), "changed": list(changed), "state": state})
    elif changed:
        say(f"{fold(changed)}: {state}")
    else:
        say("nothing to change")


def _start_what_fits(home: Path) -> None:
    """A pass: what waited for these hosts may start."""
    from gpurun.supervisor.spawn import run_pass_and_start

    if (home / "live").is_dir():
        run_pass_and_start(home, now_s=time.time(), environ=os.environ)
