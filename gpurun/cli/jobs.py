"""``gpurun status``, and how commands find jobs."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.options import JOB, InventoryOption, JsonOption
from gpurun.cli.printing import (
    JobShape,
    StatusShape,
    WholeShape,
    host_json,
    job_json,
    print_json,
    ran_text,
    say,
    say_problem,
    waited_s,
)
from gpurun.cli.stores import open_store
from gpurun.documents.plain import printable, printed
from gpurun.errors import BadInput, StateError
from gpurun.moments import date_time
from gpurun.node.job.rules import BESIDE
from gpurun.quantities import count, duration
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord
    from gpurun.jobs.spec import JobSpec
    from gpurun.jobs.store import JobStore
    from gpurun.leases.look import Cluster


QUEUED_SHOWN = 20
LOOK_S = 0.1
MOST_BESIDE, MOST_COUNTED = 5, 10_000
"""So many files that ranks wrote beside their code are named, and looked for."""


def status(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB…]",
            help=f"Show all details of these jobs. {JOB}",
            show_default=False,
            autocompletion=completion.jobs,
        ),
    ] = None,
    inventory: InventoryOption = None,
    all_jobs: Annotated[bool, typer.Option("--all", "-a", help="Also show all jobs that have ended.")] = False,
    mine: Annotated[bool, typer.Option("--mine", help="Show only your jobs, and no hosts.")] = False,
    user: Annotated[
        str | None,
        typer.Option(
            "--user", metavar="USER", help="Show only this user's jobs, and no hosts.", autocompletion=completion.users
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Show only jobs in this state, such as RUNNING, and no hosts. You can repeat --state.",
            show_default=False,
            autocompletion=completion.states,
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="Show a live view of jobs, the queue, and GPUs that jobs hold. In a pipe, print the lines of "
            "`gpurun top --plain`.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show hosts, free GPUs, running jobs and queued jobs, and why each job waits.

    gpurun status --watch

    gpurun status --mine --state RUNNING
    """
    wanted = _wanted(mine=mine, user=user, states=states or ())
    if (jobs or watch) and (wanted or (jobs and watch)):
        raise BadInput("give only one of: jobs, --watch, filters (--mine, --user, --state)", where="status")
    store = open_store()
    if jobs:
        _show_jobs(store, jobs, as_json=as_json)
        return
    found = _hosts_of(inventory, store, are_needed=watch)
    if watch:
        from gpurun.cli.serve import watch_cluster

        watch_cluster(store, inventory)
        return
    from gpurun.views.reading import read_cluster

    reading = read_cluster(found, store, all_jobs=all_jobs, wanted=wanted)
    hosts = [] if wanted else [host_json(row) for row in reading.rows]
    if as_json:
        print_json(StatusShape(hosts=hosts, jobs=[job_json(record) for record in reading.records]))
    else:
        from gpurun.cli.tables import print_jobs, print_status

        most = None if all_jobs else QUEUED_SHOWN
        if wanted and not reading.records:
            say("no job matches" + ("" if all_jobs else "; --all also looks at jobs that ended earlier"))
        elif wanted:
            print_jobs(reading.picture)
        else:
            print_status(reading.picture, hosts, most_queued=most, unheard=reading.unheard)
    for problem in reading.problems:
        say_problem(problem)
    if reading.problems:
        raise typer.Exit(StateError.exit_code)


def _wanted(*, mine: bool, user: str | None, states: Sequence[str]) -> Callable[[JobRecord], bool] | None:
    """Return which jobs to show; None = all. Raises BadInput for a text that is not a state."""
    from gpurun.jobs.record import State

    if wrong := [text for text in states if text.upper() not in State.__members__]:
        raise BadInput(f"--state: {wrong[0]!r} is not a state", hint=f"the states are {', '.join(State.__members__)}")
    asked, uid = {State[text.upper()] for text in states}, os.getuid()
    if not (mine or asked) and user is None:
        return None
    return lambda record: (
        (not mine or record.owner_uid == uid) and user in (None, record.owner) and (not asked or record.state in asked)
    )


def _show_jobs(store: JobStore, jobs: Sequence[str], *, as_json: bool) -> None:
    from gpurun.views.reading import with_trouble

    found = {folder.id: folder for folder in map(store.find, jobs)}
    records = [with_trouble(store, folder.record()) for folder in found.values()]
    if as_json:
        print_json(StatusShape(hosts=[], jobs=[_more(record, found[record.id]) for record in records]))
        return
    for number, record in enumerate(records):
        if number:
            typer.echo()
        _print_job(store, record)


def _hosts_of(inventory: str | None, store: JobStore, *, are_needed: bool) -> Cluster:
    """Load the inventory and its state. Without any inventory, return no hosts, so that jobs can be shown."""
    from gpurun.cli.stores import cluster
    from gpurun.inventory.read import candidates, is_there

    try:
        return cluster(inventory)
    except BadInput as error:
        is_named = inventory or os.environ.get("GPURUN_INVENTORY") or any(map(is_there, candidates(os.environ)))
        if is_named or are_needed or not store.ids():
            raise
        say_problem(error)
        from gpurun.inventory.model import Inventory
        from gpurun.leases.look import Cluster

        return Cluster(Inventory(hosts=(), racks=(), fabrics={}), store.home)


def _print_job(store: JobStore, record: JobRecord) -> None:
    folder = store.get(record.id)
    spec = _spec_of(folder)
    now = record.ended_s or clock.now_s()
    rows = {
        "job": f"{record.id}  {printable(record.name)}",
        "state": f"{record.state.value}  {printable(_story(record, now))}",
        "owner": record.owner,
        "gpus": f"{record.gpus}",
        "image": "" if spec is None else printable(spec.image),
        "command": "" if spec is None else printable(shlex.join(spec.command)),
        "limit": "" if spec is None or spec.time_limit_s is None else duration(spec.time_limit_s),
        "hosts": ", ".join(f"{g.host}:{','.join(map(str, g.gpus))}" for g in record.granted) or "none",
        "sending": _sending(folder, record) if record.state.value == "PREPARING" else "",
        "submitted": _when(record.submitted_s),
        "waited": duration(waited_s(record, now)),
        "started": _when(record.started_s),
        "ran": ran_text(folder, record, now),
        "ended": _when(record.ended_s),
        "attempt": f"{record.attempt}, {count(record.restarts, 'restart')}{_retries(record, spec)}",
        "exit code": "" if record.exit_code is None else str(record.exit_code),
        "log": str(folder.log),
        "outputs": str(folder.outputs) if folder.outputs.is_dir() else "",
        "beside": printable(beside_text(folder)),
        "whole copy": whole_text(folder),
    }
    for key, value in rows.items():
        if value:
            typer.echo(f"{key:>10}  {value}")
    if record.outputs_left:
        left = record.outputs_left.words(record.id, is_over=record.state.ended)
        typer.echo(f"{'left':>10}  {printable(left)}")
    for text, lines in _warnings(folder, record).items():
        typer.echo(f"{'warning':>10}  {printable(text)}")
        for line in lines:
            typer.echo(f"{'':>10}  | {printable(line)}")
    for text in _lost(store, folder):
        typer.echo(f"{'lost':>10}  {printable(text)}")
    if record.first_failure and record.first_failure.evidence:
        typer.echo(f"{'evidence':>10}  {printable(record.first_failure.evidence)}")
    for text in record.first_failure.excerpt if record.first_failure else ():
        typer.echo(f"{'':>10}  | {printed(text)}")


def _retries(record: JobRecord, spec: JobSpec | None) -> str:
    """Return how many of its retries a job has used; "" if it asks for none."""
    times = spec.retry.times if spec is not None and spec.retry is not None else 0
    return f", {record.retries} of {count(times, 'retry', 'retries')}" if times or record.retries else ""


def _more(record: JobRecord, folder: JobFolder) -> JobShape:
    whole, warnings = whole_json(folder), list(_warnings(folder, record))
    return {**job_json(record), "whole": whole, "beside": beside(folder), "warnings": warnings}


def _warnings(folder: JobFolder, record: JobRecord) -> dict[str, list[str]]:
    from gpurun.jobs.events import warnings_of

    return warnings_of(folder.events, record.attempt)


def beside(folder: JobFolder) -> list[str]:
    """Return files that ranks wrote beside their code and that are on the head, by their paths there."""
    return list(islice(_beside(Path(folder.outputs) / BESIDE), MOST_COUNTED))


def _beside(top: Path) -> Iterator[str]:
    for where, folders, files in os.walk(top):
        folders.sort()
        yield from (str((Path(where) / name).relative_to(top)) for name in sorted(files))


def beside_text(folder: JobFolder) -> str:
    """Return the first of these files and how many there are, for people; "" if there are none."""
    found = beside(folder)
    more = f" and {len(found) - MOST_BESIDE} more" if len(found) > MOST_BESIDE else ""
    return f"{', '.join(found[:MOST_BESIDE])}{more}, in {folder.outputs / BESIDE}" if found else ""


def whole_json(folder: JobFolder) -> WholeShape | None:
    """Return what is known of the whole copy of the outputs, which a restart gets; None if there is none."""
    from gpurun.supervisor.outputs import keeping

    home = folder.path.open_folder()
    try:
        found = keeping.newest(home)
    finally:
        os.close(home)
    if found is None:
        return None
    number, about = found
    top = folder.path.plain / keeping.NAME.decode() / str(number) / keeping.OUTPUTS.decode()
    return {"at_s": about.at_s, "step": about.step, "path": str(top)}


def whole_text(folder: JobFolder) -> str:
    """Return step, age and path of that copy for people; "" if there is none."""
    found = whole_json(folder)
    if found is None:
        return ""
    step = "" if found["step"] is None else f"step {found['step']}, "
    return f"{step}{duration(max(0.0, time.time() - found['at_s']))} old, {found['path']}"


def _lost(store: JobStore, folder: JobFolder) -> list[str]:
    """Return, for each host whose GPUs the ended job keeps, why its last fence failed, such as who holds a GPU."""
    from gpurun.jobs.events import EventTail
    from gpurun.leases.store import LeaseStore

    leases = [lease for lease in LeaseStore(store.home).read_all().leases if lease.lost and lease.job == folder.id]
    why = {grant.host: "the host gave no proof that its GPUs are free" for lease in leases for grant in lease.grants}
    if why:
        for event in EventTail(folder.events).new():
            if event.get("kind") == "host" and event.get("host") in why and event.get("reason"):
                why[str(event["host"])] = str(event["reason"])
    return [f"{host}: {text}" for host, text in why.items()]


def _spec_of(folder: JobFolder) -> JobSpec | None:
    """Return the job's spec; None if it is damaged, so that `status` can still show the job's record."""
    try:
        return folder.spec()
    except StateError as error:
        say_problem(error)
        return None


def _when(time_s: float | None) -> str:
    return "" if time_s is None else date_time(time_s)


def _sending(folder: JobFolder, record: JobRecord) -> str:
    from gpurun.cli.shares import sending
    from gpurun.jobs.events import read_sent

    return printable("; ".join(sending(read_sent(folder, record.attempt))))


def _story(record: JobRecord, now_s: float) -> str:
    """Return the reason for the job's state; for a queued job, also what it waits for."""
    if record.state.value != "QUEUED" or record.waits_for_restart(now_s):
        return record.story(now_s)
    from gpurun.cli.why import waits_for

    return "; ".join(filter(None, (record.story(now_s), waits_for(record))))
