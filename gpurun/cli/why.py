"""``gpurun why`` and ``gpurun queue``: what jobs wait for, from the decision itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.jobs import find_job
from gpurun.cli.options import JobArgument, JsonOption
from gpurun.cli.printing import duration, print_json, printable, say
from gpurun.errors import GpurunError

if TYPE_CHECKING:
    from gpurun.jobs.record import JobRecord
    from gpurun.leases.allocate import Pass
    from gpurun.scheduler.explain import Explanation
    from gpurun.scheduler.model import Decisions


def why(job: JobArgument, as_json: JsonOption = False) -> None:
    """Say what a job waits for, what holds it, when it is expected to start, and what change would start it now."""
    from gpurun.scheduler.explain import explain

    folder = find_job(job)
    record = folder.record()
    if record.waits_for_restart(time.time()):
        story = record.story(time.time())
        if as_json:
            print_json({"job": record.id, "state": record.state.value, "message": story})
        else:
            typer.echo(f"{record.id} {printable(story)}")
        return
    looked = _look()
    inventory = os.path.realpath(record.inventory)
    decisions = looked.decisions.get(inventory)
    if decisions is None or record.state.value != "QUEUED":
        said = "; ".join(filter(None, (record.reason, _drained(record.id))))
        if as_json:
            print_json({"job": record.id, "state": record.state.value, "message": said})
        else:
            typer.echo(f"{record.id} is {record.state.value}{': ' if said else ''}{printable(said)}")
        return
    explanation = explain(decisions, looked.snapshots[inventory], record.id)
    if as_json:
        print_json({"job": record.id, **asdict(explanation)})
    else:
        print_explanation(explanation, record.id)


def _drained(job: str) -> str:
    """What becomes of a job on hosts that are being drained; "" if it is on none."""
    from gpurun.leases.allocate import loaded, look
    from gpurun.leases.draining import departures_of
    from gpurun.scheduler.drain import in_words
    from gpurun.state.home import home

    view = look(home(os.environ), now_s=time.time())
    for each in departures_of(view, lambda path: loaded(path, lambda _: None)):
        if each.gang == job:
            return f"{', '.join(each.hosts)} is being drained: the gang {in_words(each, view.now_s)}"
    return ""


def queue(
    inventory: Annotated[
        str | None, typer.Option("--inventory", "-i", metavar="FILE", help="Only jobs of this inventory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what waits, in the order in which it would start, each with its reason."""
    from gpurun.cli.jobs import open_store
    from gpurun.scheduler.explain import places

    store = open_store()
    looked = _look()
    records = {record.id: record for record in store.live_records()}
    only = None if inventory is None else os.path.realpath(inventory)
    rows: list[dict[str, Any]] = []
    for path, decisions in looked.decisions.items():
        if only not in (None, path):
            continue
        position = places(decisions)
        for job in decisions.order:
            if (record := records.get(job)) is None:  # it has ended meanwhile
                continue
            wait = decisions.waits.get(job)
            rows.append({
                "job": job, "name": record.name, "owner": record.owner, "gpus": record.gpus,
                "position": position.get(job),
                "pool": record.pool, "priority": record.priority, "inventory": path,
                "waiting_s": round(time.time() - record.queued_s, 1),
                "message": _decided(decisions, job),
                "expected_start_s": wait.expected_start_s if wait else None,
            })  # fmt: skip
    rows += _waiting_for_restart(records.values(), only)
    if as_json:
        print_json({"queue": rows})
        return
    if rows:
        typer.echo("\n".join(_line(row, time.time()) for row in rows))
    else:
        say("nothing waits")


def waits_for(record: JobRecord) -> str:
    """What a queued job waits for, in one sentence; "" if its inventory says nothing."""
    try:
        decisions = _look().decisions.get(os.path.realpath(record.inventory))
    except GpurunError as error:  # a damaged lease, say
        return f"nothing is decided: {error}"
    return "" if decisions is None or record.id not in decisions.order else _decided(decisions, record.id)


def _decided(decisions: Decisions, job: str) -> str:
    said = decisions.waits.get(job) or decisions.never.get(job)
    return said.message if said else "starts now"


def _line(row: Mapping[str, Any], now_s: float) -> str:
    from gpurun.scheduler.wording import expected_in

    start = f", expected {expected_in(row['expected_start_s'], now_s)}" if row["expected_start_s"] else ""
    return (
        f"{row['position'] or '-':>4}  {row['job']}  {row['gpus']:>4} GPUs  {duration(row['waiting_s']):>6}  "
        f"{printable(row['name'])}: {row['message']}{start}"
    )


def _waiting_for_restart(records: Iterable[JobRecord], inventory: str | None) -> list[dict[str, Any]]:
    """Jobs that no pass looks at yet: they have failed a moment ago. They have no place in the queue."""
    now_s = time.time()
    return [
        {
            "job": record.id, "name": record.name, "owner": record.owner, "gpus": record.gpus, "position": None,
            "pool": record.pool, "priority": record.priority, "inventory": record.inventory,
            "waiting_s": round(now_s - record.queued_s, 1), "message": record.story(now_s),
            "expected_start_s": record.restart.at_s if record.restart else None,
        }
        for record in records
        if record.waits_for_restart(now_s) and inventory in (None, os.path.realpath(record.inventory))
    ]  # fmt: skip


def _look() -> Pass:
    """The decisions that a pass would make now; nothing is changed."""
    from gpurun.leases.allocate import run_pass
    from gpurun.state.home import home

    return run_pass(home(os.environ), now_s=time.time(), commit=False)


def print_explanation(explanation: Explanation, job: str) -> None:
    """One screen: the decision, the hosts, who holds them, the expected start, the ways to start now."""
    from gpurun.inventory.hostset import fold
    from gpurun.scheduler.wording import lines

    typer.echo(f"{job}: {explanation.gpus} GPUs")
    for line in lines(explanation, now_s=time.time(), fold=fold):
        typer.echo(f"  {printable(line)}")
