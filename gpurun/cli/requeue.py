"""``gpurun requeue``: end a job's attempt, and put the job back into the queue."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.jobs import POLL_S, open_store
from gpurun.cli.options import JobsArgument, JsonOption
from gpurun.cli.patience import Patience, jobs_in_words
from gpurun.cli.printing import job_json, print_json, printable, say
from gpurun.errors import BadInput
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.states import State

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder


def requeue(
    jobs: JobsArgument,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="Only send the requeue request. Do not wait until the jobs' GPUs are free."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Put running jobs back into the queue. gpurun stops all ranks of each job, as in a preemption.

    Each rank gets SIGTERM and has the grace period to end. The job later continues from its checkpoint. A requeue does
    not count as one of the job's max_restarts. Only the job's owner and root may requeue a job. To repeat a job that
    has ended, use `gpurun rerun`.

    gpurun requeue JOB
    """
    from gpurun.head.requests import refuse_others
    from gpurun.head.requests import requeue as request
    from gpurun.state.people import myself

    store = open_store()
    folders = list({folder.id: folder for folder in map(store.find, jobs)}.values())
    for folder in folders:
        refuse_others(folder, "requeue", "put the job back into the queue")
        _refuse_what_stops(folder)
    going = {folder.id: folder.record().attempt for folder in folders if folder.record().state is not State.QUEUED}
    for folder in folders:
        if folder.id in going:
            request(folder, by=myself())
        else:
            say(f"{folder.id} is in the queue already")
    if not no_wait:
        _wait([folder for folder in folders if folder.id in going], going)
    for folder in folders:
        if folder.id in going:
            record = folder.record()
            is_back = record.is_past(going[folder.id])
            told = f"back in the queue, now {record.state.value}" if is_back else "goes back to the queue"
            say(printable(f"{record.id} ({record.name}): {record.state.value if record.state.ended else told}"))
    if as_json:
        print_json({"jobs": [job_json(folder.record()) for folder in folders]})


def _refuse_what_stops(folder: JobFolder) -> None:
    """Raise BadInput for a job whose end is decided, or asked for."""
    record = folder.record()
    if record.state.ended:
        raise BadInput(
            f"the job has ended: {record.state.value}",
            job=record.id,
            hint=f"`gpurun rerun {record.id}` runs the job again",
        )
    asked = folder.cancel_request()
    if record.state is State.STOPPING or (asked is not None and asked.kind == "cancel"):
        why = record.reason or (asked.outcome if asked is not None else record.state.value)
        raise BadInput(
            f"the job is ending: {why}", job=record.id, hint=f"`gpurun wait {record.id}` waits for the job's end"
        )


def _wait(folders: list[JobFolder], attempts: dict[str, int]) -> None:
    """Wait until each job's attempt is over: its GPUs are fenced and free."""
    caretaker, patience = Caretaker(), Patience()
    while waiting := [folder for folder in folders if not folder.record().is_past(attempts[folder.id])]:
        caretaker.look(waiting)
        patience.tell(partial(jobs_in_words, waiting))
        time.sleep(POLL_S)
