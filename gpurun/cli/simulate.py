"""``gpurun simulate``: replay a trace through the scheduler, on this or another cluster."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.inventory_options import located
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import duration, print_json
from gpurun.cli.values import RATE, TIME_OR_0
from gpurun.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpurun.inventory.model import Inventory
    from gpurun.scheduler.model import Placement
    from gpurun.scheduler.policy import Policy
    from gpurun.simulate.replay import Replay
    from gpurun.simulate.report import Report
    from gpurun.simulate.trace import TraceJob
    from gpurun.simulate.yardsticks import Yardstick


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
    from gpurun.inventory.load import load
    from gpurun.simulate.report import report
    from gpurun.simulate.trace import read_trace

    chosen = _policy(policy, patience_s)
    jobs = read_trace(trace)
    cluster = load(located(inventory))
    began = time.perf_counter()
    factor = _factor(scaling, between_racks, cluster)
    done = _replay(jobs, cluster, chosen, str(trace), {"factor": factor, "is_kept_in_rack": in_rack})
    figures = report(done, time.perf_counter() - began)
    if plot is not None:
        from gpurun.simulate.plot import write_plot

        write_plot(done, plot)
    if as_json:
        print_json(asdict(figures))
    else:
        _print(figures, chosen)


def _policy(name: str, patience_s: float | None) -> Policy | Yardstick:
    from gpurun.scheduler.policy import Policy
    from gpurun.simulate.yardsticks import POLICIES

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
    from gpurun.scaling.measured import read_samples
    from gpurun.scaling.model import fit
    from gpurun.simulate.pace import PlacementPace

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
