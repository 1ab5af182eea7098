"""``gpurun lab``: a cluster of real hosts on this machine."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.lazy import Place, lazy_group
from gpurun.cli.values import RATE, SIZE

if TYPE_CHECKING:
    from gpurun.lab.status import LabStatus

COMMANDS = {
    "up": Place("gpurun.cli.lab:up", "Start a lab, and print the folder of its inventory"),
    "down": Place("gpurun.cli.lab:down", "Stop a lab, and keep its hosts' disks"),
    "status": Place("gpurun.cli.lab:status", "Show the state of a lab and its hosts"),
    "run": Place("gpurun.cli.lab:run", "Run a command inside a host"),
    "cut": Place("gpurun.cli.lab:cut", "Cut the network link of a host"),
    "heal": Place("gpurun.cli.lab:heal", "Connect a host's network link again"),
    "crash": Place("gpurun.cli.lab:crash", "Kill all processes of a host, as a power cut would"),
    "boot": Place("gpurun.cli.lab:boot", "Start a host again after `gpurun lab crash`"),
    "engine": Place("gpurun.cli.lab:engine", "Print the DOCKER_HOST of this machine's Docker engine"),
}
app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Name = Annotated[
    str,
    typer.Option(
        "--name", metavar="NAME", help="Name of the lab. Several labs can run side by side.",
        autocompletion=completion.labs,
    ),
]  # fmt: skip
Host = Annotated[
    str, typer.Argument(help="Name of a host, such as gpu-r1-01.", autocompletion=completion.lab_hosts)
]  # fmt: skip
Port = Annotated[
    str,
    typer.Argument(
        help="Name of a host, or `head` for this machine's link to the lab.", autocompletion=completion.lab_ports
    ),
]


@app.callback()
def _lab() -> None:
    """Run hosts with real sshd and dockerd on this machine, for tests and demos. Only root can run a lab."""


def up(
    name: Name = "default",
    racks: Annotated[int, typer.Option(metavar="COUNT", help="Number of racks.")] = 2,
    hosts: Annotated[int, typer.Option(metavar="COUNT", help="Number of hosts in each rack.")] = 2,
    gpus: Annotated[int, typer.Option(metavar="COUNT", help="Number of GPUs in each host.")] = 4,
    generation: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="GPU generation of all racks, or one generation for each rack, such as pascal,volta."
        ),
    ] = "pascal",
    host_link: Annotated[
        int,
        typer.Option(click_type=RATE, help="Rate of each host's link in each direction.", show_default="10gbit"),
    ] = 10_000_000_000,
    rack_uplink: Annotated[
        int,
        typer.Option(click_type=RATE, help="Rate of each rack's uplink in each direction.", show_default="2.5gbit"),
    ] = 2_500_000_000,
    disk: Annotated[
        int | None, typer.Option(click_type=SIZE, help="Give each host a disk of this size, such as 2GiB.")
    ] = None,
    fabric: Annotated[
        str, typer.Option(metavar="KIND", help="Fabric in the inventory: tcp, or roce (simulated).")
    ] = "tcp",
    resolve_names: Annotated[bool, typer.Option(help="Let each host resolve the names of all hosts.")] = True,
) -> None:
    """Start a lab, and print the folder that contains the lab's inventory.

    gpurun lab up --racks 2 --hosts 2 --gpus 4
    """
    from gpurun.lab.lab import Lab
    from gpurun.lab.spec import LabSpec

    lab = Lab(name)
    lab.up(
        LabSpec(
            name=name,
            racks=racks,
            hosts=hosts,
            gpus=gpus,
            generation=tuple(generation.split(",")),
            host_link_bps=host_link,
            rack_uplink_bps=rack_uplink,
            disk_mib=disk,
            fabric=fabric,
            resolve_names=resolve_names,
        )
    )
    typer.echo(f"lab {name!r} is up; use the lab with: gpurun … --inventory {lab.inventory}", err=True)
    typer.echo(str(lab.folder))


def down(
    name: Name = "default",
    purge: Annotated[bool, typer.Option("--purge", help="Also remove the hosts' disks and keys.")] = False,
) -> None:
    """Stop a lab, and keep the lab's folder with the hosts' disks."""
    from gpurun.lab.lab import Lab

    Lab(name).down(purge=purge)


def status(
    name: Name = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show the state of a lab and its hosts."""
    from gpurun.lab.lab import Lab

    now = Lab(name).status()
    if as_json:
        typer.echo(json.dumps(now.to_json(), indent=2))
    else:
        _print_status(now)


def run(
    host: Host,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD ...", help="Program to run, with its arguments.")],
    name: Name = "default",
    user: Annotated[str, typer.Option(metavar="USER", help="User that runs the command.")] = "root",
) -> None:
    """Run a command inside a host of the lab.

    The command starts without SSH and without the host's network. gpurun exits with the command's exit code.

    gpurun lab run gpu-r1-01 -- nvidia-smi
    """
    from gpurun.lab.host import enter_argv
    from gpurun.lab.lab import Lab

    argv = enter_argv(Lab(name).init_of(host), command, user=user)
    os.execvp(argv[0], argv)  # the command replaces this process and keeps the terminal


def cut(host: Port, name: Name = "default") -> None:
    """Cut the network link of a host. The host keeps running.

    gpurun lab cut gpu-r1-01
    """
    from gpurun.lab.lab import Lab

    Lab(name).cut(host)


def heal(host: Port, name: Name = "default") -> None:
    """Connect a host's network link again after `gpurun lab cut`.

    gpurun lab heal gpu-r1-01
    """
    from gpurun.lab.lab import Lab

    Lab(name).heal(host)


def crash(host: Host, name: Name = "default") -> None:
    """Kill all processes of a host, as a power cut would. The host's disk stays.

    gpurun lab crash gpu-r1-01
    """
    from gpurun.lab.lab import Lab

    Lab(name).crash(host)


def boot(host: Host, name: Name = "default") -> None:
    """Start a host again after `gpurun lab crash`.

    gpurun lab boot gpu-r1-01
    """
    from gpurun.lab.lab import Lab

    Lab(name).boot(host)


def engine(
    stop: Annotated[bool, typer.Option("--stop", help="Stop the Docker engine that the lab started.")] = False,
) -> None:
    """Print the DOCKER_HOST of this machine's Docker engine.

    If no engine answers, gpurun starts an engine."""
    from gpurun.lab import engine as engines

    if stop:
        typer.echo("stopped" if engines.stop() else "not running", err=True)
    else:
        typer.echo(engines.ensure())


def _print_status(now: LabStatus) -> None:
    from gpurun.cli.tables import print_table

    typer.echo(f"lab {now.name}: {now.state}, {now.folder}")
    rows = [
        (each.name, each.rack, each.address, each.state, f"{each.gpus} × {each.generation}", f"{each.memory_mib:.0f}")
        for each in now.hosts
    ]
    if rows:
        print_table(("host", "rack", "address", "state", "GPUs", "memory MiB"), [(cells, "") for cells in rows])


def main() -> None:
    """Run as ``python -m gpurun.cli.lab``."""
    from gpurun.errors import GpurunError

    try:
        app()
    except GpurunError as error:
        typer.echo(f"gpurun: {error}" + (f"\n  {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
