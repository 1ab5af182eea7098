"""``gpurun scale RECIPE``: run a campaign's jobs, one after the other."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.job_options import DryRunOption, Given, RecipeArgument, flags_of, job_options
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import duration, print_json, printable, say
from gpurun.cli.values import RATE
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.campaigns.plan import CampaignPlan, RunKey
    from gpurun.campaigns.runs import RunRecord
    from gpurun.campaigns.store import CampaignFolder
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.record import JobRecord
    from gpurun.scaling.shape import LinkRates


def _option(*names: str, metavar: str, text: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


@job_options("scale run")
def run(
    context: typer.Context,
    recipe: RecipeArgument = None,
    gpus: Annotated[
        str, _option("-n", "--gpus", metavar="GPUS,GPUS…", text="Numbers of GPUs to measure, such as 1,2,4,8.")
    ] = ...,  # type: ignore[assignment]
    launcher: Annotated[
        str | None,
        _option(
            "--launcher", metavar="LAUNCHER,LAUNCHER…", text="Launchers to compare. Default: the recipe's launcher."
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option("--repeat", metavar="NUMBER", min=1, max=100, help="Measure each number of GPUs this many times."),
    ] = 3,
    rate: Annotated[
        str | None,
        _option("--rate", metavar="METRIC", text="Metric to compare. Default: the metric whose name ends in _per_s."),
    ] = None,
    link: Annotated[
        int | None,
        typer.Option(
            "--link",
            click_type=RATE,
            help="Nominal bandwidth of the hosts' network links, such as 25gbit, for the report.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        _option(
            "--name",
            metavar="CAMPAIGN",
            text="Name of the campaign. With the name of an existing campaign, gpurun continues that campaign.",
        ),
    ] = None,
    inventory: InventoryOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Measure a recipe's training rate on several numbers of GPUs. gpurun runs one job after the other.

    The jobs of a measurement form a campaign. Ctrl-C stops the campaign. Repeat the command to continue the campaign.

    gpurun scale recipes/synthetic-benchmark --gpus 1,2,4,8

    gpurun scale recipes/synthetic-benchmark/ps.yaml --gpus 1,2,4 --launcher horovod,tensorflow --link 1gbit
    """
    from gpurun.campaigns.begin import begin, plan_of
    from gpurun.campaigns.plan import parse_sizes
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find
    from gpurun.jobs.recipe import read as read_recipe
    from gpurun.state.home import home

    sizes, rates = parse_sizes(gpus), _rates(link)
    read = read_recipe(Path(recipe)) if recipe is not None else None
    found = load(find(inventory, os.environ))
    launchers = tuple(dict.fromkeys(word.strip() for word in launcher.split(","))) if launcher else ()
    plan = plan_of(
        read, found, flags_of(given, context.obj, read, found), sizes=sizes, launchers=launchers,
        repeat=repeat, rate=rate, rates=rates, name=name, told=lambda text: say(printable(text)),
    )  # fmt: skip
    if dry_run:
        _show_plan(plan, found, as_json=as_json)
        return
    folder, is_older = begin(plan, found, home(os.environ), os.environ)
    if is_older:
        say(f"{folder.name} keeps its first image and code; to measure the current image and code, use another --name")
    plan = folder.plan()
    _say_refused(plan)
    _carry(folder)
    raise typer.Exit(_tell(folder, plan, as_json=as_json))


def _show_plan(plan: CampaignPlan, inventory: Inventory, *, as_json: bool) -> None:
    """Show the job of the largest size."""
    from gpurun.cli.dry_run import show_plan

    runs = len(list(plan.runs()))
    largest = max(plan.jobs, key=lambda job: job.gpus)
    if not as_json:
        _say_refused(plan)
        typer.echo(f"{count(runs, 'run')}, one after the other; the largest run:")
    more = {"runs": runs, "refused": [asdict(each) for each in plan.refused]}
    show_plan(largest, inventory, (), as_json=as_json, more=more)


def _say_refused(plan: CampaignPlan) -> None:
    for each in plan.refused:
        say(
            f"gpurun: {each.launcher or 'the recipe'} with {count(each.gpus, 'GPU')} cannot run: "
            f"{printable(each.reason)}"
        )


def _rates(link: int | None) -> LinkRates:
    from gpurun.scaling.shape import LinkRates

    return LinkRates(rack=None if link is None else float(link))


def _carry(folder: CampaignFolder) -> None:
    from gpurun.campaigns.carry import Carrier
    from gpurun.state.home import home

    try:
        with folder.carried():
            Carrier(home(os.environ), folder, os.environ, CampaignProgress()).run()
    except KeyboardInterrupt:
        say(
            f"\ncampaign {folder.name} is stopped; repeat the command to continue, "
            f"or run `gpurun scale show {folder.name}`"
        )
        raise


def _tell(folder: CampaignFolder, plan: CampaignPlan, *, as_json: bool) -> int:
    """Print the campaign's results. Returns the exit code."""
    from gpurun.campaigns.report import CampaignReport
    from gpurun.cli.scale_reading import print_curve

    told = CampaignReport(plan, folder.records(plan))
    if as_json:
        print_json(told.document())
    else:
        print_curve(told)
    if any(record.outcome in ("failed", "cancelled") for record in told.records):
        say("gpurun: some runs were not measured; repeat the command to measure these runs")
        return 1
    return max((each.code for each in plan.refused), default=0)


class CampaignProgress:
    """Prints on stderr which run is active, the campaign's progress and the time left."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def begins(self, run: RunKey, at: int, of: int, left_s: float | None) -> None:
        """Report that a run begins."""
        left = f"; about {duration(left_s)} left" if left_s is not None else ""
        say(f"run {at} of {of}: {run.words}{left}")
        self._began_s = time.monotonic()

    def moves(self, record: JobRecord) -> None:
        """Report the new state of the run's job."""
        where = f" on {', '.join(grant.host for grant in record.granted)}" if record.granted else ""
        text = f"{duration(time.monotonic() - self._began_s):>6}  {record.id} {record.state.value}{where}"
        if sys.stderr.isatty() and not record.state.ended:
            sys.stderr.write(f"\r\x1b[K{printable(text)}")
            sys.stderr.flush()
        else:
            say(("\r\x1b[K" if sys.stderr.isatty() else "") + printable(text))

    def ends(self, run: RunKey, record: RunRecord) -> None:
        """Report that the run has ended."""
        what = f"{record.rate.name} {record.rate.value:.4g}" if record.rate is not None else record.reason
        say(f"        {run.words}: {record.outcome}, {printable(what)}")
