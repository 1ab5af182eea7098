"""``gpurun cancel``: stop jobs and free their GPUs. Root can stop every user's jobs."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.agreement import agree
from gpurun.cli.jobs import POLL_S, open_store
from gpurun.cli.options import InventoryOption, JsonOption, SomeJobsArgument, YesOption
from gpurun.cli.patience import Patience, jobs_in_words
from gpurun.cli.printing import job_json, print_json, printable, say, say_problem
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.head.caretaker import Caretaker, is_carried
from gpurun.jobs.states import State
from gpurun.state import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord
    from gpurun.jobs.store import JobStore

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
    from gpurun.head.requests import refuse_others

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
        print_json({"jobs": [job_json(folder.record()) for folder in folders]})
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
    from gpurun.head.requests import end_queued

    caretaker, patience = Caretaker(), Patience()
    while waiting := [folder for folder in folders if not _is_over(folder)]:
        for folder in waiting:
            end_queued(home, folder, now_s=clock.now_s(), environ=os.environ)
        caretaker.look(waiting)
        patience.tell(partial(jobs_in_words, waiting))
        time.sleep(POLL_S)


def _is_over(folder: JobFolder) -> bool:
    return folder.record().state.ended and not (_is_ownerless(folder) and _holds(folder))


def _is_ownerless(folder: JobFolder) -> bool:
    """Return whether this is root and the job cannot have a supervisor because its owner has no account."""
    from gpurun.state.people import has_account

    return os.getuid() == 0 and not has_account(folder.record().owner_uid)


def _holds(folder: JobFolder) -> tuple[str, ...]:
    from gpurun.head.takeover import held_by

    return held_by(folder.path.home, folder.id)


def _have_it_carried(folder: JobFolder) -> None:
    """As root, run `gpurun recover` as the owner: it starts a new supervisor for a job whose supervisor died."""
    from gpurun.head.everybody import recover_as

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
    from gpurun.cli.inventory_options import cluster
    from gpurun.head.takeover import take_over

    if not _is_ownerless(folder):
        return
    if is_carried(folder):
        if not may_wait:
            return
        _wait_at_most(_grace_s(folder) + PATIENCE_S, lambda: _is_over(folder))
    if _is_over(folder) or (_is_waiting(folder) and not _holds(folder)):
        return
    take_over(folder.path.home, folder, cluster(inventory).inventory, os.environ)
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
        time.sleep(POLL_S)
