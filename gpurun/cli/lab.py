"""``gpurun lab``: a cluster of real hosts on this machine; ``gpurun simulate``: a trace without hosts."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli import completion
from gpurun.cli.main import Place, lazy_group
from gpurun.cli.options import RATE, SIZE, TIME_OR_0, InventoryOption, JsonOption
from gpurun.cli.printing import print_json
from gpurun.cli.stores import located
from gpurun.errors import BadInput
from gpurun.quantities import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpurun.inventory.model import Inventory
    from gpurun.jobs.spec import Placement
    from gpurun.lab.lab import LabStatus
    from gpurun.scheduler.model import Policy
    from gpurun.simulate.replay import Replay, TraceJob, Yardstick
    from gpurun.simulate.report import Report


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
        typer.echo("stopped" if engines.stop_engine() else "not running", err=True)
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
        print_table(("host", "rack", "address", "state", "GPUs", "memory MiB"), rows)


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


# ``gpurun simulate``: replay a trace through the scheduler, on this or another cluster.


def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.csv", help="CSV file of jobs: job_id,submit_time_s,duration_s,gpus.")
    ],
    inventory: InventoryOption = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY", help="Policy: fifo, sjf (shortest job first) or default (the policy of `submit`)."
        ),
    ] = "default",
    patience_s: Annotated[
        float | None,
        typer.Option(
            "--patience",
            click_type=TIME_OR_0,
            help="How long other jobs may overtake a large job before gpurun reserves hosts for the large job. A "
            "longer time shortens the average wait. A shorter time shortens the wait of large jobs.",
            show_default="10d",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            "--to",
            metavar="FILE",
            help="Write a plot of GPUs in use, queue length and fragmentation to this .svg or .png file.",
        ),
    ] = None,
    scaling: Annotated[
        Path | None,
        typer.Option(
            metavar="SAMPLES.jsonl",
            help="Use the `gpurun scale` measurements in this file to compute how placement changes each job's "
            "duration.",
            show_default=False,
        ),
    ] = None,
    between_racks: Annotated[
        int | None,
        typer.Option(click_type=RATE, help="With --scaling, the bandwidth of the links between racks, such as 25gbit."),
    ] = None,
    in_rack: Annotated[
        bool, typer.Option("--in-rack", help="Keep each job in one rack if the job fits into one rack.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace of jobs through the scheduler in simulated time.

    gpurun simulate trace.csv --policy fifo --plot trace.svg
    """
    from gpurun.inventory.read import load_inventory
    from gpurun.simulate.replay import read_trace
    from gpurun.simulate.report import report_replay

    chosen = _policy(policy, patience_s)
    jobs = read_trace(trace)
    cluster = load_inventory(located(inventory))
    began = time.perf_counter()
    factor = _factor(scaling, between_racks, cluster)
    done = _replay(jobs, cluster, chosen, str(trace), {"factor": factor, "is_kept_in_rack": in_rack})
    figures = report_replay(done, time.perf_counter() - began)
    if plot is not None:
        from gpurun.simulate.report import write_plot

        write_plot(done, plot)
    if as_json:
        print_json(figures)
    else:
        _print(figures, chosen)


def _policy(name: str, patience_s: float | None) -> Policy | Yardstick:
    from gpurun.scheduler.model import Policy
    from gpurun.simulate.replay import POLICIES

    if name not in POLICIES:
        raise BadInput(f"--policy {name!r} must be one of {', '.join(sorted(POLICIES))}")
    policy = POLICIES[name]
    if patience_s is None or not isinstance(policy, Policy):
        return policy
    return replace(policy, patience_s=patience_s)


def _factor(samples: Path | None, between_racks: int | None, cluster: Inventory) -> Callable[[Placement], float]:
    """Return the function that gives the factor by which a placement slows a job down."""
    if samples is None:
        if between_racks is not None:
            raise BadInput(
                "--between-racks needs --scaling",
                hint="measure with `gpurun scale`, then give the campaign's file: --scaling samples.jsonl",
            )
        return lambda _: 1.0
    from gpurun.scaling.model import fit
    from gpurun.simulate.pace import PlacementPace
    from gpurun.studies.campaigns import read_samples

    return PlacementPace(fit(read_samples(samples)), cluster, between_racks).factor


def _replay(
    jobs: tuple[TraceJob, ...], cluster: Inventory, policy: Policy | Yardstick, source: str, asked: Mapping[str, Any]
) -> Replay:
    from gpurun.simulate.replay import replay

    if not sys.stderr.isatty():
        return replay(jobs, cluster, policy, source=source, **asked)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from gpurun.cli.tables import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"replay, {policy.name}", total=len(jobs))
        return replay(
            jobs, cluster, policy, source=source, progress=lambda ended: bar.update(task, completed=ended), **asked
        )


def _print(figures: Report, policy: Policy | Yardstick) -> None:
    rows = [
        ("policy", policy.name),
        ("jobs", f"{figures.jobs}"),
        ("average completion", duration(figures.avg_jct_s)),
        ("average wait", duration(figures.avg_wait_s)),
        ("median wait", duration(figures.p50_wait_s)),
        ("99th percentile of waits", duration(figures.p99_wait_s)),
        ("makespan", duration(figures.makespan_s)),
        ("GPUs in use", f"{figures.gpu_utilization:.1%}"),
        ("GPUs idle while jobs waited", f"{figures.idle_while_pending:.1%}"),
        ("jobs over several hosts", f"{figures.multi_host_jobs}"),
        ("jobs over several racks", f"{figures.multi_rack_jobs}"),
        ("preemptions", f"{figures.preemptions}"),
        ("replayed in", f"{figures.elapsed_s:.2f}s"),
    ]
    for name, value in rows:
        typer.echo(f"{name:<28}{value:>12}")
