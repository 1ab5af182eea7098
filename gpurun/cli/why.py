"""``gpurun why`` and ``gpurun queue``: explain the wait of jobs from the scheduler's own decision."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.jobs import find_job
from gpurun.cli.options import JobArgument, JsonOption
from gpurun.cli.printing import duration, print_json, printable, say
from gpurun.cli.shares import lines, shares_of
from gpurun.errors import GpurunError
from gpurun.quantities.counts import plural
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.jobs.record import JobRecord
    from gpurun.leases.allocate import Pass
    from gpurun.scheduler.explain import Explanation


_DOING = {
    "PREPARING": "gpurun connects to the job's hosts and copies image, code and data to the hosts",
    "STARTING": "gpurun creates the job's containers and checks the GPUs",
}
"""What happens in states in which a job's record has no reason."""


def why(job: JobArgument, as_json: JsonOption = False) -> None:
    """Explain why a job waits, when the job may start, and which changes would start the job now.

    gpurun why @last
    """
    from gpurun.cli.auto_gpus import smaller_gang_of, smaller_in_words
    from gpurun.cli.outs import (
        outs_in_the_way,
        outs_that_failed,
        print_outs,
        print_start_failures,
        without_free,
        without_reasons,
    )
    from gpurun.jobs.store import JobStore
    from gpurun.scheduler.explain import explain
    from gpurun.views.reading import with_trouble

    folder = find_job(job)
    record = with_trouble(JobStore(folder.path.home), folder.record())
    failed = {"start_failures": [vars(each) for each in record.start_failures]} if record.start_failures else {}
    if record.waits_for_restart(clock.now_s()):
        story = record.story(clock.now_s())
        if as_json:
            print_json({"job": record.id, "state": record.state.value, "message": story, **failed})
        else:
            typer.echo(f"{record.id} {printable(story)}")
            outs = outs_that_failed(record)
            print_start_failures(record.start_failures, outs, clock.now_s())
            print_outs(outs, record.owner_uid)
        return
    looked = _look(record.owner_uid)
    inventory = os.path.realpath(record.inventory)
    decisions, left_out = looked.decisions.get(inventory), looked.left_out.get(record.id, "")
    if decisions is None or left_out or record.state.value != "QUEUED":
        reason = record.reason or _DOING.get(record.state.value, "")
        said = "; ".join(filter(None, (reason, left_out, _drained(record.id))))
        if as_json:
            print_json({"job": record.id, "state": record.state.value, "message": said})
        else:
            typer.echo(f"{record.id} is {record.state.value}{': ' if said else ''}{printable(said)}")
            for line in lines(shares_of(folder)):
                typer.echo(f"  {line}")
        return
    snapshot = looked.snapshots[inventory]
    explanation = explain(decisions, snapshot, record.id)
    smaller = smaller_gang_of(folder, snapshot, explanation)
    outs = outs_in_the_way(snapshot.inventory, explanation, record.owner_uid)
    explanation = without_free(explanation, outs)
    if as_json:
        before = {"reason": record.reason} if record.reason else {}
        after = {"smaller_gang": smaller and asdict(smaller), "out": {host: vars(out) for host, out in outs.items()}}
        print_json({"job": record.id, **before, **asdict(explanation), **after, **failed})
        return
    print_explanation(without_reasons(explanation, outs), f"{record.name} ({record.id})")
    print_start_failures(record.start_failures, outs, clock.now_s())
    print_outs(outs, record.owner_uid)
    if record.reason and all(each.attempt != record.attempt for each in record.start_failures):
        typer.echo(f"  the job's last attempt ended: {printable(record.reason)}")
    if smaller is not None:
        typer.echo(f"  {smaller_in_words(smaller, explanation.gpus)}")


def _drained(job: str) -> str:
    """Say what a drain does to the job; "" if none of its hosts is draining."""
    from gpurun.leases.draining import departures_of
    from gpurun.leases.look import loaded, look
    from gpurun.scheduler.drain import in_words
    from gpurun.state.home import home

    view = look(home(os.environ), now_s=clock.now_s())
    for each in departures_of(view, lambda path: loaded(path, lambda _: None)):
        if each.gang == job:
            return f"{', '.join(each.hosts)} is being drained: the job {in_words(each, view.now_s)}"
    return ""


def queue(
    inventory: Annotated[
        str | None, typer.Option("--inventory", "-i", metavar="FILE", help="List only jobs of this inventory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List queued jobs in the order in which the jobs would start, and why each job waits."""
    from gpurun.cli.jobs import open_store
    from gpurun.views.waiting import look_ahead, waiting_jobs

    store = open_store()
    only = None if inventory is None else os.path.realpath(inventory)
    rows = [row._asdict() for row in waiting_jobs(look_ahead(store.home), store.live_records(), only)]
    if as_json:
        print_json({"queue": rows})
        return
    if rows:
        typer.echo("\n".join(_line(row, clock.now_s()) for row in rows))
    else:
        say("no job waits")


def waits_for(record: JobRecord) -> str:
    """Say in one sentence what a queued job waits for; "" if it has started by now."""
    try:
        looked = _look(record.owner_uid)
    except GpurunError as error:  # such as a damaged lease
        return f"gpurun cannot decide when jobs start: {error}"
    from gpurun.views.waiting import decided

    decisions = looked.decisions.get(os.path.realpath(record.inventory))
    if decisions is not None and record.id in decisions.order:
        return decided(decisions, record.id)
    return looked.left_out.get(record.id, "")


def _line(row: Mapping[str, Any], now_s: float) -> str:
    from gpurun.scheduler.wording import expected_in

    start = f", expected {expected_in(row['expected_start_s'], now_s)}" if row["expected_start_s"] else ""
    return (
        f"{row['position'] or '-':>4}  {row['job']}  {row['gpus']:>4} {plural(row['gpus'], 'GPU'):<4}  "
        f"{duration(row['waiting_s']):>6}  {printable(row['name'])}: {row['message']}{start}"
    )


def _look(knower: int) -> Pass:
    from gpurun.state.home import home
    from gpurun.views.waiting import look_ahead

    return look_ahead(home(os.environ), knower)


def print_explanation(explanation: Explanation, job: str) -> None:
    """Print the decision, the hosts, who holds them, the expected start, and changes that would start the job now.

    Args:
        job: what the first line calls it.
    """
    from gpurun.inventory.hostset import fold
    from gpurun.scheduler.wording import lines

    for line in lines(replace(explanation, gang=job), now_s=clock.now_s(), fold=fold, named=_named):
        typer.echo(printable(line))


def _named(job: str) -> str:
    """Return a job's name and id; only the id if the job was removed or is damaged."""
    from gpurun.cli.jobs import open_store

    try:
        return f"{open_store().get(job).record().name} ({job})"
    except GpurunError:
        return job
