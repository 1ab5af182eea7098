"""``gpurun inventory cordon|drain|uncordon``: keep gangs off hosts. Writes only state, never the inventory file."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpurun.cli.inventory_options import cluster
from gpurun.cli.options import HostsArgument, InventoryOption, JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.cli.values import TIME
from gpurun.state import clock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpurun.leases.cluster import Cluster

ReasonOption = Annotated[
    str,
    typer.Option("--reason", "-r", metavar="TEXT", help="Reason for the cordon or drain. All users see the reason."),
]


def cordon(
    hosts: HostsArgument, reason: ReasonOption = "", inventory: InventoryOption = None, as_json: JsonOption = False
) -> None:
    """Stop new jobs from starting on hosts. Jobs that already run on the hosts continue.

    gpurun inventory cordon gpu-r1-01 --reason 'fan is broken'
    """
    _put(hosts, "cordoned", reason, inventory, as_json)


def drain(
    hosts: HostsArgument,
    reason: ReasonOption = "",
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline", click_type=TIME, help="Stop jobs that still run on the hosts after this time, such as 2h."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until no job holds GPUs of the hosts.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop new jobs from starting on hosts, and move running jobs to other hosts.

    A job moves if its recipe sets max_restarts or preemptible, and if other hosts can run the job. When a job moves,
    its ranks get SIGTERM and have the grace period to end. The job then waits in the queue and continues from its
    checkpoint. A move does not count as one of the job's max_restarts. An elastic job whose other hosts are enough
    continues on its other hosts. The drain waits for jobs that cannot move. At the deadline, gpurun stops jobs that
    cannot move, and these jobs end as CANCELLED. `gpurun inventory uncordon` ends the drain.

    gpurun inventory drain @rack:r1 --reason 'new switch' --deadline 2h --wait
    """
    from gpurun.cli.draining import refuse_deadline, report_drain, wait_until_empty
    from gpurun.errors import BadInput

    found = cluster(inventory)
    if deadline_s is not None:
        refuse_deadline(found.home)
    until_s = None if deadline_s is None else clock.now_s() + deadline_s
    names = [host.name for host in found.choose(hosts)]
    if not names:
        raise BadInput(f"no host matches {hosts!r}", hint="`gpurun inventory list` shows all hosts")
    changed = _cordon(found, names, "draining", reason, until_s)
    if not as_json:
        _report(names, changed, "draining", as_json=False)
    _say_lost(found, names)
    _start_what_fits(found.home)
    show = wait_until_empty if wait else report_drain
    show(found, names, changed, as_json=as_json)


def uncordon(hosts: HostsArgument, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """End cordons and drains, so that new jobs can start on the hosts again.

    gpurun inventory uncordon gpu-r1-01
    """
    from gpurun.state.cordons import changing_cordons, lift_cordons

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with changing_cordons(found.home) as cordons:
        lifted = [name for name in names if lift_cordons(cordons, found.known[name])]
    _report(names, lifted, "ok", as_json)
    for name in names if not as_json else ():
        if (out := found.outs.get(name)) is not None:
            say(
                printable(
                    f"{name}: {out.words}; the host gets jobs again when a check passes. "
                    f"`gpurun doctor {name}` checks the host now"
                )
            )
    if lifted:
        _start_what_fits(found.home)


def _put(
    selection: str, state: Literal["cordoned", "draining"], reason: str, inventory: str | None, as_json: bool
) -> None:
    found = cluster(inventory)
    names = [host.name for host in found.choose(selection)]
    _report(names, _cordon(found, names, state, reason), state, as_json)


def _cordon(
    found: Cluster,
    names: Sequence[str],
    state: Literal["cordoned", "draining"],
    reason: str,
    until_s: float | None = None,
) -> list[str]:
    """Cordon hosts. Returns those for which this changes something."""
    from gpurun.errors import BadInput
    from gpurun.state.cordons import Cordon, changing_cordons, put_cordon
    from gpurun.state.people import myself

    if not reason.isprintable():
        raise BadInput("--reason must be one line of printable text")
    cordon = Cordon(state, myself(), time.time(), reason, until_s=until_s)
    with changing_cordons(found.home) as cordons:
        return [name for name in names if put_cordon(cordons, found.known[name], cordon)]


def _say_lost(found: Cluster, names: Sequence[str]) -> None:
    """Report the hosts that are lost: a drain does not change them."""
    from gpurun.inventory.hostset import fold
    from gpurun.state.cordons import cordons_on, read_cordons

    cordons = cordons_on(read_cordons(found.home), [found.known[name] for name in names])
    if lost := [name for name, cordon in cordons.items() if cordon.state == "lost"]:
        say(f"{fold(lost)}: lost; no job starts on a lost host until gpurun has proof that the host's GPUs are free")


def _report(names: Sequence[str], changed: Sequence[str], state: str, as_json: bool) -> None:
    from gpurun.inventory.hostset import fold

    if as_json:
        print_json({"hosts": list(names), "changed": list(changed), "state": state})
    elif changed:
        say(f"{fold(changed)}: {state}")
    else:
        say("nothing to change")


def _start_what_fits(home: Path) -> None:
    """Run a scheduling pass: jobs that waited for these hosts may start."""
    from gpurun.head.spawn import run_pass_and_start

    if (home / "live").is_dir():
        run_pass_and_start(home, now_s=clock.now_s(), environ=os.environ)
