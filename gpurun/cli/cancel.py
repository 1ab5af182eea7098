"""``gpurun cancel | requeue | wait``, and the questions that commands ask before they change something."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.jobs import LOOK_S
from gpurun.cli.options import TIME_OR_0, InventoryOption, JobsArgument, JsonOption, SomeJobsArgument, YesOption
from gpurun.cli.printing import JobsShape, job_json, print_json, say, say_problem
from gpurun.cli.stores import open_store
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.head.caretaker import Caretaker, is_carried
from gpurun.jobs.record import State
from gpurun.quantities import count, duration
from gpurun.state import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord
    from gpurun.jobs.store import JobStore


# Ask a person before a command changes or removes something.


DECLINED = 1
"""The exit code after a person declines a command."""


def agree(question: str, nobody: str, hint: str) -> None:
    """Ask a question on stderr. Return only if the person says yes.

    Args:
        nobody: the error message if stdin is not a terminal.

    Raises:
        BadInput: stdin is not a terminal.
        typer.Exit: the person declined; exit code 1. Ctrl-C exits with 130, as in every command.
    """
    if not sys.stdin.isatty():
        raise BadInput(nobody, hint=hint)
    if not typer.confirm(question, err=True):
        raise typer.Exit(DECLINED)


# Messages of a waiting command on stderr: what it waits for, and for how long.


FIRST_S, EVERY_S = 5.0, 30.0
MOST_NAMED = 3


class Patience:
    """Says what a command waits for: after 5 s, then every 30 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._due_s = self._began_s + FIRST_S

    def tell(self, what: Callable[[], str]) -> None:
        """Print the message if it is due.

        Args:
            what: returns what the command waits for; called only if a message is due.
        """
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            say(f"waited {duration(now_s - self._began_s)} so far: {printable(what())}")


def jobs_in_words(folders: Iterable[JobFolder]) -> str:
    """Return a text such as ``j-1 is STOPPING, j-2 is RUNNING and 4 more jobs``."""
    records = [record for folder in folders if not (record := folder.record()).state.ended]
    named = ", ".join(f"{record.id} is {record.state.value}" for record in records[:MOST_NAMED])
    more = len(records) - MOST_NAMED
    checks = "gpurun checks that the jobs left no process on their hosts"
    return f"{named} and {count(more, 'more job')}" if more > 0 else named or checks


PATIENCE_S = 60.0
"""If a job's owner has no account, root waits this long, plus the job's grace period, for its supervisor."""


def cancel(
    jobs: SomeJobsArgument = None,
    mine: Annotated[bool, typer.Option("--mine", help="Cancel all your jobs that have not ended.")] = False,
    everybody: Annotated[
        bool, typer.Option("--all", help="As root, cancel the jobs of all users that have not ended.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Only send the cancel request. Do not wait until the jobs' GPUs are free.")
    ] = False,
    yes: YesOption = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop jobs and free their GPUs. Each rank gets SIGTERM and, after the grace period, SIGKILL.

    Finally, gpurun checks that no process of the job still runs on a host.

    If you give a name, gpurun cancels the job that has this name and has not ended. If several jobs that have not ended
    have the same name, give an id.

    Root can cancel the jobs of all users. If the account of a job's owner no longer exists, gpurun finds the job's
    hosts in root's inventory.

    gpurun cancel @last
    """
    from gpurun.head.spawn import refuse_others

    store = open_store()
    folders = _chosen(store, jobs or (), mine=mine, everybody=everybody)
    if not jobs:
        _ask(folders, yes=yes)
    for folder in folders:
        refuse_others(folder)
    asked = [folder for folder in folders if not folder.record().state.ended]
    failed: dict[str, GpurunError] = {}
    for act in (_request, partial(_end_ownerless, inventory=inventory, may_wait=not no_wait)):
        for folder in folders:
            if folder.id not in failed:
                with _noting(folder, failed):
                    act(folder)
    if not no_wait:
        _wait_until_ended(store.home, [folder for folder in folders if folder.id not in failed])
    _say_what_happened(folder.record() for folder in asked if folder.id not in failed)
    if as_json:
        print_json(JobsShape(jobs=[job_json(folder.record()) for folder in folders]))
    if failed:
        raise typer.Exit(next(iter(failed.values())).exit_code)


def _chosen(store: JobStore, jobs: Sequence[str], *, mine: bool, everybody: bool) -> list[JobFolder]:
    """Return the named jobs, each once, or all that have not ended. Raises BadInput for neither or both."""
    if not jobs and not (mine or everybody):
        raise BadInput("name the jobs to cancel, or give --mine", where="cancel")
    if jobs and (mine or everybody):
        raise BadInput("give only one of: jobs, --mine, --all", where="cancel")
    if jobs:
        return list({folder.id: folder for folder in map(store.find, jobs)}.values())
    return _live(store, everybody=everybody)


def _say_what_happened(records: Iterable[JobRecord]) -> None:
    """Say which jobs the requests have reached: a name may mean another job than the person thinks of."""
    for record in records:
        ends = record.state.value if record.state.ended else f"{record.state.value}, is being cancelled"
        say(printable(f"{record.id} ({record.name}): {ends}"))


@contextmanager
def _noting(folder: JobFolder, failed: dict[str, GpurunError]) -> Iterator[None]:
    """Print a job's error and note it: one job's failure does not keep the others from their end."""
    try:
        yield
    except GpurunError as error:
        say_problem(error)
        failed[folder.id] = error


def _request(folder: JobFolder) -> None:
    """Request a job's cancellation, and have a supervisor carry it out."""
    from gpurun.cli.follow import cancel_job

    if not folder.record().state.ended:
        cancel_job(folder, reason="gpurun cancel")
    elif not _is_ownerless(folder) or not _holds(folder):
        say(f"{folder.id} has ended already: {folder.record().state.value}")
    if not _is_ownerless(folder):
        _have_it_carried(folder)


def _live(store: JobStore, *, everybody: bool) -> list[JobFolder]:
    """Return the jobs that have not ended: every user's, or only this user's."""
    records = sorted(store.live_records(), key=lambda record: record.submitted_s)
    return [
        store.get(record.id)
        for record in records  # who ends a job removes its mark a moment later
        if not record.state.ended and (everybody or record.owner_uid == os.getuid())
    ]


def _ask(folders: list[JobFolder], *, yes: bool) -> None:
    if not folders:
        say("there is no job to cancel")
    for folder in folders:
        record = folder.record()
        say(printable(f"{record.id}  {record.owner}  {record.name}  {record.state.value}"))
    if folders and not yes:
        question = f"Cancel these {len(folders)} jobs?" if len(folders) > 1 else "Cancel this job?"
        agree(
            question,
            "gpurun cancelled nothing, because stdin is not a terminal, so gpurun cannot ask you",
            "give --yes to cancel without a question",
        )


def _wait_until_ended(home: Path, folders: Iterable[JobFolder]) -> None:
    from gpurun.head.spawn import Head

    caretaker, patience = Caretaker(), Patience()
    while waiting := [folder for folder in folders if not _is_over(folder)]:
        for folder in waiting:
            Head(home).end_queued(folder, now_s=clock.now_s())
        caretaker.look(waiting)
        patience.tell(partial(jobs_in_words, waiting))
        time.sleep(LOOK_S)


def _is_over(folder: JobFolder) -> bool:
    return folder.record().state.ended and not (_is_ownerless(folder) and _holds(folder))


def _is_ownerless(folder: JobFolder) -> bool:
    """Return whether this is root and the job cannot have a supervisor because its owner has no account."""
    from gpurun.state.paths import has_account

    return os.getuid() == 0 and not has_account(folder.record().owner_uid)


def _holds(folder: JobFolder) -> tuple[str, ...]:
    from gpurun.head.spawn import Head

    return Head(folder.path.home).held_by(folder.id)


def _have_it_carried(folder: JobFolder) -> None:
    """As root, run `gpurun recover` as the owner: it starts a new supervisor for a job whose supervisor died."""
    from gpurun.head.waiter import recover_as

    record = folder.record()
    if os.getuid() == record.owner_uid or not record.state.holds_gpus or is_carried(folder):
        return
    if problem := recover_as(record.owner_uid, folder.path.home, os.environ).problem:
        raise StateError(
            f"the job has no supervisor, and gpurun could not start a supervisor: {printable(problem)}", job=folder.id,
            hint="gpurun keeps the cancel request. Correct the cause, then run `gpurun recover` as root",
        )  # fmt: skip


def _end_ownerless(folder: JobFolder, *, inventory: str | None, may_wait: bool) -> None:
    """If a job's owner has no account, wait for its supervisor if it runs. Take it over if it still holds GPUs then."""
    from gpurun.cli.stores import cluster
    from gpurun.head.spawn import Head

    if not _is_ownerless(folder):
        return
    if is_carried(folder):
        if not may_wait:
            return
        _wait_at_most(_grace_s(folder) + PATIENCE_S, lambda: _is_over(folder))
    if _is_over(folder) or (_is_waiting(folder) and not _holds(folder)):
        return
    Head(folder.path.home).take_over(folder, cluster(inventory).inventory)
    if hosts := _holds(folder):
        say(f"{folder.id}: the job's owner has no account, so root stops the job's processes on {', '.join(hosts)}")


def _is_waiting(folder: JobFolder) -> bool:
    return folder.record().state is State.QUEUED


def _grace_s(folder: JobFolder) -> float:
    with suppress(StateError):
        return folder.spec().grace_s
    return 0.0


def _wait_at_most(limit_s: float, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + limit_s
    while not is_over() and time.monotonic() < deadline:
        time.sleep(LOOK_S)


# ``gpurun requeue``: end a job's attempt, and put the job back into the queue.


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
    from gpurun.head.spawn import refuse_others
    from gpurun.head.spawn import requeue as request
    from gpurun.state.paths import myself

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
        print_json(JobsShape(jobs=[job_json(folder.record()) for folder in folders]))


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
        time.sleep(LOOK_S)


# ``gpurun wait``: wait until jobs have ended.


TIMED_OUT = 124
"""The exit code after `--timeout`, the same as timeout(1) uses."""


def wait(
    jobs: JobsArgument,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            click_type=TIME_OR_0,
            help="Stop waiting after this time, such as 10m. The exit code is then 124.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until all named jobs have ended. The exit code is 0, or the exit code of the first job that failed.

    gpurun wait @last && gpurun outputs @last --to results
    """
    store = open_store()
    folders = [store.find(job) for job in jobs]
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    caretaker, patience = Caretaker(), Patience()
    while not all(folder.record().state.ended for folder in folders):
        if deadline is not None and time.monotonic() > deadline:
            say(f"--timeout is over: {printable(jobs_in_words(folders))}")
            raise typer.Exit(TIMED_OUT)
        caretaker.look(folders)
        patience.tell(lambda: jobs_in_words(folders))
        time.sleep(LOOK_S)
    records = [folder.record() for folder in folders]
    if as_json:
        print_json(JobsShape(jobs=[job_json(record) for record in records]))
    else:
        for record in records:
            typer.echo(f"{record.id} {record.state.value}{' ' if record.reason else ''}{printable(record.reason)}")
    raise typer.Exit(next((int(record.code or 0) for record in records if record.code), 0))
