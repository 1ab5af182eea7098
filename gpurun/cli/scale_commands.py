"""``gpurun scale run | list | show | report``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from gpurun.cli import completion
from gpurun.cli.job_options import DryRunOption, Given, RecipeArgument, flags_of, job_options
from gpurun.cli.options import RATE, InventoryOption, JsonOption
from gpurun.cli.printing import print_json, say
from gpurun.cli.stores import open_store
from gpurun.documents.plain import json_text, printable
from gpurun.errors import BadInput, StateError
from gpurun.quantities import count, duration

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.record import JobRecord
    from gpurun.studies.campaign_plan import CampaignPlan, RunRecord
    from gpurun.studies.campaign_report import CampaignReport, CampaignRowShape
    from gpurun.studies.campaigns import CampaignFolder, CampaignStore


# ``gpurun scale RECIPE``: run a campaign's jobs, one after the other.


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
    from gpurun.inventory.read import find_inventory, load_inventory
    from gpurun.jobs.recipe import read_recipe
    from gpurun.scaling.model import LinkRates
    from gpurun.state.paths import home
    from gpurun.studies.campaign_plan import parse_sizes
    from gpurun.studies.campaigns import begin_campaign, plan_of

    sizes, rates = parse_sizes(gpus), LinkRates(rack=None if link is None else float(link))
    read = read_recipe(Path(recipe)) if recipe is not None else None
    found = load_inventory(find_inventory(inventory, os.environ))
    launchers = tuple(dict.fromkeys(word.strip() for word in launcher.split(","))) if launcher else ()
    plan = plan_of(
        read, found, flags_of(given, context.obj, read, found), sizes=sizes, launchers=launchers,
        repeat=repeat, rate=rate, rates=rates, name=name, told=lambda text: say(printable(text)),
    )  # fmt: skip
    if dry_run:
        _show_plan(plan, found, as_json=as_json)
        return
    folder, is_older = begin_campaign(plan, found, home(os.environ), os.environ)
    if is_older:
        say(f"{folder.id} keeps its first image and code; to measure the current image and code, use another --name")
    plan = folder.plan()
    _say_refused(plan)
    _carry(folder)
    raise typer.Exit(_tell(folder, plan, as_json=as_json))


def _show_plan(plan: CampaignPlan, inventory: Inventory, *, as_json: bool) -> None:
    """Show the job of the largest size."""
    from gpurun.cli.dry_run import show_plan

    runs = plan.trials
    largest = max(plan.jobs, key=lambda job: job.gpus)
    if not as_json:
        _say_refused(plan)
        typer.echo(f"{count(runs, 'run')}, one after the other; the largest run:")
    show_plan(largest, inventory, (), as_json=as_json, more={"runs": runs, "refused": plan.refused})


def _say_refused(plan: CampaignPlan) -> None:
    for each in plan.refused:
        say(
            f"gpurun: {each.launcher or 'the recipe'} with {count(each.gpus, 'GPU')} cannot run: "
            f"{printable(each.reason)}"
        )


def _carry(folder: CampaignFolder) -> None:
    from gpurun.studies.campaigns import Carrier

    try:
        with folder.carried():
            Carrier(folder, os.environ, CampaignProgress()).run()
    except KeyboardInterrupt:
        say(
            f"\ncampaign {folder.id} is stopped; repeat the command to continue, or run `gpurun scale show {folder.id}`"
        )
        raise


def _tell(folder: CampaignFolder, plan: CampaignPlan, *, as_json: bool) -> int:
    """Print the campaign's results. Returns the exit code."""
    from gpurun.studies.campaign_report import CampaignReport

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

    def begins(self, run: RunRecord, at: int, of: int, left_s: float | None) -> None:
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

    def ends(self, run: RunRecord) -> None:
        """Report that the run has ended."""
        what = f"{run.rate.name} {run.rate.value:.4g}" if run.rate is not None else run.reason
        say(f"        {run.words}: {run.outcome}, {printable(what)}")


SHOWN = ("launcher", "GPUs", "rate", "of linear", "of one host", "GPU hours", "step s")
CampaignArgument = Annotated[
    str, typer.Argument(metavar="CAMPAIGN", help="The campaign's name.", autocompletion=completion.campaigns)
]


class CampaignsShape(TypedDict):
    """All campaigns."""

    campaigns: list[CampaignRowShape]


def list_(as_json: JsonOption = False) -> None:
    """List all campaigns with their progress."""
    store, rows, damaged = _store(), [], []
    for name in store.ids():
        try:
            rows.append(_report(name))
        except StateError as error:
            damaged.append(error)
    if as_json:
        print_json(CampaignsShape(campaigns=[told.row() for told in rows]))
    for told in () if as_json else rows:
        typer.echo(printable(summary(told)))
    if not rows and not as_json:
        say("there is no campaign yet; `gpurun scale RECIPE --gpus 1,2,4` starts a campaign")
    for damage in damaged:
        say(f"gpurun: {printable(str(damage))}")
    if damaged:
        raise typer.Exit(StateError.exit_code)


def show(campaign: CampaignArgument, as_json: JsonOption = False) -> None:
    """Show a campaign's training rate, efficiency and cost for each number of GPUs.

    gpurun scale show mnist
    """
    told = _report(campaign)
    if as_json:
        print_json(told.document())
    else:
        print_curve(told)


class CampaignFilesShape(TypedDict):
    """The files of a campaign's report, as paths.

    Attributes:
        json: the document of `gpurun scale show CAMPAIGN --json`, with the predictions of the cost model.
    """

    campaign: str
    html: str
    json: str
    csv: str


def report(
    campaign: CampaignArgument,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Write the report into this folder.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a campaign's results to CAMPAIGN.html, CAMPAIGN.json and CAMPAIGN.csv. The HTML page needs no network.

    gpurun scale report mnist --to mnist-report
    """
    told = _with_predictions(_report(campaign))
    texts = {"html": told.html(), "json": json_text(told.document(), indent=1) + "\n", "csv": told.csv()}
    paths = {suffix: to / f"{told.plan.name}.{suffix}" for suffix in texts}
    try:
        to.mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            paths[suffix].write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the report: {error.strerror}", where=str(to)) from error
    if as_json:
        html, text, table = (str(paths[suffix]) for suffix in ("html", "json", "csv"))
        print_json(CampaignFilesShape(campaign=told.plan.name, html=html, json=text, csv=table))
    else:
        typer.echo(paths["html"])


def print_curve(told: CampaignReport) -> None:
    """Print the curve as a table, then one line about the campaign."""
    from gpurun.cli.tables import print_table
    from gpurun.studies.campaign_report import CURVE_HEADS, curve_row

    shown = [number for number, head in enumerate(CURVE_HEADS) if head in SHOWN]
    heads = [told.unit if CURVE_HEADS[number] == "rate" else CURVE_HEADS[number] for number in shown]
    print_table(heads, [[row[number] for number in shown] for row in map(curve_row, told.curve)])
    for each in told.plan.refused:
        typer.echo(
            printable(f"{each.launcher or 'the recipe'} with {count(each.gpus, 'GPU')} cannot run: {each.reason}")
        )
    typer.echo(printable(summary(told)))


def summary(told: CampaignReport) -> str:
    """Describe the campaign's progress in one line."""
    done = sum(record.outcome == "measured" for record in told.records)
    cost = sum(record.gpu_hours for record in told.records)
    state = "done" if told.is_done else "not done; repeat the command of the campaign to continue"
    return f"{told.plan.name}: {done} of {count(told.plan.trials, 'run')} measured, {cost:.3f} GPU hours; {state}"


def _store() -> CampaignStore:
    from gpurun.studies.campaigns import CampaignStore

    return CampaignStore(open_store().home)


def _report(name: str) -> CampaignReport:
    from gpurun.studies.campaign_report import CampaignReport

    folder = _store().find(name)
    plan = folder.plan()
    return CampaignReport(plan, folder.records(plan))


def _with_predictions(told: CampaignReport) -> CampaignReport:
    """Return the report with the cost model's predictions for other sizes."""
    from gpurun.doctor.bench import BenchHistory
    from gpurun.scaling.choice import pair_figures
    from gpurun.studies.campaign_pictures import predictions
    from gpurun.studies.campaign_report import CampaignReport

    links = [link for run in BenchHistory(open_store().home).read() for link in run.links]
    samples = [record.sample for record in told.records if record.sample is not None]
    points, unknown = predictions(samples, pair_figures(links, told.plan.racks))
    for text in unknown:
        say(printable(text))
    return CampaignReport(told.plan, told.records, points)
