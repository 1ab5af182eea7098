"""``gpurun inventory connect``: open SSH connections by hand that gpurun's other processes share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.inventory_options import cluster
from gpurun.cli.options import HostsArgument, InventoryOption
from gpurun.cli.printing import say
from gpurun.cli.values import TIME
from gpurun.errors import AuthenticationFailed, BadInput, HostFailure
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.remote.ssh_config import Route
    from gpurun.remote.target import Target


def connect(
    hosts: HostsArgument,
    inventory: InventoryOption = None,
    idle_s: Annotated[
        float,
        typer.Option(
            "--idle", click_type=TIME, help="Close a connection after this time without use.", show_default="12h"
        ),
    ] = 12 * 3600.0,
    close: Annotated[bool, typer.Option("--close", help="Close the connections of these hosts.")] = False,
) -> None:
    """Log in to hosts that ask for a second factor, and keep the connection open. The exit code is 4 if a login fails.

    ssh asks its questions on your terminal. If a host asks no question, gpurun opens no shared connection to that host.

    gpurun inventory connect @rack:r1
    """
    from gpurun.remote.masters import close_own
    from gpurun.remote.ssh_config import resolve
    from gpurun.remote.target import target_of

    found = cluster(inventory)
    targets = [target_of(host, found.inventory) for host in found.choose(hosts)]
    if close:
        closed = sum(close_own(resolve(target)) for target in targets)
        say(f"{count(closed, 'connection')} closed")
        return
    failures = [error for target in targets if (error := _connect(target, max(1, round(idle_s))))]
    for error in failures:
        say(f"{error}" + (f"\n  {error.hint}" if error.hint else ""))
    if failures:
        raise typer.Exit(HostFailure.exit_code)


def _connect(target: Target, keep_s: int) -> HostFailure | None:
    """Open the missing connections to a host, hop by hop. Returns the error if the host is still unreachable."""
    from gpurun.remote.masters import live, open_for_a_person
    from gpurun.remote.ssh_config import resolve

    if target.ssh == "paramiko":
        hint = f"to let gpurun choose how to connect: gpurun inventory set {target.name} ssh="
        raise BadInput(
            "the inventory says `ssh: paramiko`, and paramiko cannot share a connection", host=target.name, hint=hint
        )
    route = resolve(target)
    error = _refusal(target)
    for hop in route.hops:
        if not isinstance(error, AuthenticationFailed):
            break
        if hop not in live(hop):
            _ask_on_the_terminal(route)
            say(f"{hop.name}: ssh asks:")
            if not open_for_a_person(hop, keep_s):
                return AuthenticationFailed(f"{hop.name} refused the login", host=target.name, hint=error.hint)
            error = _refusal(target)
    if error is None:
        shared = [hop.name for hop in live(route)]
        say(f"{target.name}: connected" + (f" (shared: {', '.join(shared)})" if shared else "; the host asked nothing"))
    return error


def _refusal(target: Target) -> HostFailure | None:
    """Return why gpurun cannot start its agent on the host; None if it can."""
    from gpurun.remote.fleet import Fleet

    with Fleet.open([target]) as fleet:
        return fleet.failures.get(target.name)


def _ask_on_the_terminal(route: Route) -> None:
    if not sys.stdin.isatty():
        hint = f"run this command in a terminal: gpurun inventory connect {route.name}"
        raise BadInput("the host asks for input at login, but stdin is not a terminal", host=route.name, hint=hint)
