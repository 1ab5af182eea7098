"""``gpurun scale list | show | report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.jobs import open_store
from gpurun.cli.options import JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput, StateError
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.campaigns.report import CampaignReport
    from gpurun.campaigns.store import CampaignStore

SHOWN = ("launcher", "GPUs", "rate", "of linear", "of one host", "GPU hours", "step s")
CampaignArgument = Annotated[
    str, typer.Argument(metavar="CAMPAIGN", help="The campaign's name.", autocompletion=completion.campaigns)
]


def list_(as_json: JsonOption = False) -> None:
    """List all campaigns with their progress."""
    store, rows, damaged = _store(), [], []
    for name in store.names():
        try:
            rows.append(_report(name))
        except StateError as error:
            damaged.append(error)
    if as_json:
        documents = [told.document() for told in rows]
        shown = ("campaign", "created_s", "done", "unit", "runs_in_all", "gpu_hours")
        print_json({"campaigns": [{key: each[key] for key in shown} for each in documents]})
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


def report(
    campaign: CampaignArgument,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Write the report into this folder.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a campaign's results to CAMPAIGN.html, CAMPAIGN.json and CAMPAIGN.csv. The HTML page needs no network.

    gpurun scale report mnist --to mnist-report
    """
    told = _with_predictions(_report(campaign))
    texts = {"html": told.html(), "json": json.dumps(told.document(), indent=1) + "\n", "csv": told.csv()}
    paths = {suffix: to / f"{told.plan.name}.{suffix}" for suffix in texts}
    try:
        to.mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            paths[suffix].write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the report: {error.strerror}", where=str(to)) from error
    if as_json:
        print_json({"campaign": told.plan.name, **{suffix: str(path) for suffix, path in paths.items()}})
    else:
        typer.echo(paths["html"])


def print_curve(told: CampaignReport) -> None:
    """Print the curve as a table, then one line about the campaign."""
    from gpurun.campaigns.report import CURVE_HEADS, curve_row
    from gpurun.cli.tables import print_table

    shown = [number for number, head in enumerate(CURVE_HEADS) if head in SHOWN]
    heads = [printable(told.unit) if CURVE_HEADS[number] == "rate" else CURVE_HEADS[number] for number in shown]
    print_table(heads, [([printable(row[number]) for number in shown], "") for row in map(curve_row, told.curve)])
    for each in told.plan.refused:
        typer.echo(
            printable(f"{each.launcher or 'the recipe'} with {count(each.gpus, 'GPU')} cannot run: {each.reason}")
        )
    typer.echo(printable(summary(told)))


def summary(told: CampaignReport) -> str:
    """Describe the campaign's progress in one line."""
    of = sum(1 for _ in told.plan.runs())
    done = sum(record.outcome == "measured" for record in told.records)
    cost = sum(record.gpu_hours for record in told.records)
    state = "done" if told.is_done else "not done; repeat the command of the campaign to continue"
    return f"{told.plan.name}: {done} of {count(of, 'run')} measured, {cost:.3f} GPU hours; {state}"


def _store() -> CampaignStore:
    from gpurun.campaigns.store import CampaignStore

    return CampaignStore(open_store().home)


def _report(name: str) -> CampaignReport:
    from gpurun.campaigns.report import CampaignReport

    folder = _store().get(name)
    plan = folder.plan()
    return CampaignReport(plan, folder.records(plan))


def _with_predictions(told: CampaignReport) -> CampaignReport:
    """Return the report with the cost model's predictions for other sizes."""
    from gpurun.campaigns.predicted import predictions
    from gpurun.campaigns.report import CampaignReport
    from gpurun.doctor.bench_history import read
    from gpurun.scaling.pairs import pair_figures

    links = [link for run in read(open_store().home) for link in run.links]
    samples = [record.sample for record in told.records if record.sample is not None]
    points, unknown = predictions(samples, pair_figures(links, told.plan.racks))
    for text in unknown:
        say(printable(text))
    return CampaignReport(told.plan, told.records, points)
