"""Start supervisors and waiters: detached processes that inherit the lock of their lease, or of their queue."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun import faults
from gpurun.errors import OUTLIVED, StateError
from gpurun.head import children
from gpurun.head.forged import check_lease
from gpurun.head.found_claims import FoundClaim, adopt_claims, claims_to_adopt
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.live import LiveJob
from gpurun.jobs.record import JobRecord
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore, end_queued_job, finish
from gpurun.leases.allocator import PATIENCE_S, allocator_lock
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.leases.waiters import take_waiter_lock
from gpurun.state import audit, clock

if TYPE_CHECKING:
    from gpurun.leases.allocate import Pass


def run_pass_and_start(
    home: Path, *, now_s: float, environ: Mapping[str, str], patience_s: float | None = PATIENCE_S
) -> Pass:
    """Run a pass, and start the supervisor of every job of this user that the pass granted.

    The only function that does so: whatever fails, this process keeps no lease's lock. A job whose supervisor could not
    start has a lease without a lock, which this user's waiter adopts.

    Raises:
        StateError: as `run_pass`; or a supervisor could not start. All that was granted and could start has started.
    """
    from gpurun.leases.allocate import run_pass  # noqa: PLC0415 (the whole scheduler, and rarely needed)

    done = run_pass(home, now_s=now_s, patience_s=patience_s)
    try:
        start_all(home, done.granted, environ)
        if done.failure is not None:
            raise done.failure
    except OUTLIVED:
        with suppress(*OUTLIVED):  # then the next command adopts it
            ensure_waiter(home, environ)
        raise
    return done


ADOPTED_AT_ONCE = 8
"""Hundreds of supervisors that start at one moment leave the head no memory and no CPU."""


def adopt_orphans(home: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Start supervisors for leases of this user without one; return their jobs' ids. Idempotent and quick.

    It starts `ADOPTED_AT_ONCE` of them. Each of these, once it runs, starts the next one (`adopt_next`).

    If a supervisor dies, the next command replaces it. If it dies after it released the GPUs and before it wrote the
    job's outcome, the job is stopping without a lease; this function writes its outcome.
    """
    live, problems = live_jobs(home)
    jobs = _own(home, live, problems)
    restore_removed(home, [job.record for job in jobs])
    adopted = _adopt(home, environ, most=ADOPTED_AT_ONCE)
    finish_interrupted(home, jobs)
    return (*adopted, *adopt_found(home, claims_to_adopt(home, [job.record for job in live]), environ))


def adopt_next(home: Path, environ: Mapping[str, str], name: str) -> None:
    """Start a supervisor for the first orphan behind the lease `name`.

    Each looks only at leases behind its own. So a supervisor that ends at once, such as for a damaged job, is not
    started again and again.
    """
    _adopt(home, environ, most=1, after=name)


def _adopt(home: Path, environ: Mapping[str, str], *, most: int, after: str = "") -> list[str]:
    adopted = list[str]()
    for lease, lock in LeaseStore(home).take_orphans(os.getuid(), after=after):
        try:
            check_lease(home, lease)
            start_supervisor(home, lease, lock, environ, adopts=True)
        except (FileNotFoundError, StateError):  # forged, or its job's folder is gone or damaged; or tried again
            lock.close()
            continue
        except BaseException:
            lock.close()
            raise
        audit.note(home, "adopt", job=lease.job)
        adopted.append(lease.job)
        if len(adopted) == most:
            break
    return adopted


def adopt_found(home: Path, claims: Iterable[FoundClaim], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Start fences for GPUs that hosts claim for this user's forgotten jobs; return those jobs' ids."""
    found = adopt_claims(home, claims)
    start_all(home, found, environ)
    return tuple(lease.job for lease, _ in found)


def start_all(home: Path, held: Collection[tuple[Lease, LeaseLock]], environ: Mapping[str, str]) -> None:
    """Start the supervisors of leases whose locks this process holds. Afterwards it holds none of them.

    Raises:
        StateError: one could not start; the others have started, and the next command or waiter adopts it.
    """
    problems = list[Exception]()
    with ExitStack() as locks:
        for _, lock in held:
            locks.enter_context(lock)
        faults.point()
        for lease, lock in held:
            try:
                start_supervisor(home, lease, lock, environ)
            except OUTLIVED as error:
                problems.append(error)
            faults.point()
    if problems:
        raise problems[0]


def restore_removed(home: Path, mine: Iterable[JobRecord]) -> None:
    """Restore lease files of this user's running jobs that somebody removed."""
    store, leases = JobStore(home), LeaseStore(home)
    names = leases.names()
    for record in mine:
        if record.state.holds_gpus and record.id not in names and leases.restore(record.id):
            audit.note(home, "restore", job=record.id)
            text = "somebody removed the job's lease, which reserves its GPUs; gpurun restored the lease"
            EventLog(store.get(record.id).events, clock=time.time).emit("note", text=text)


def own_jobs(home: Path) -> list[LiveJob]:
    """Return this user's jobs that have not ended. Sets damaged requests aside and adds an event to their jobs."""
    return _own(home, *live_jobs(home))


def live_jobs(home: Path) -> tuple[list[LiveJob], list[StateError]]:
    """Return all users' jobs that have not ended, and the errors of jobs that cannot be read."""
    problems = list[StateError]()
    return list(JobStore(home).live_jobs(problems.append).values()), problems


def _own(home: Path, live: Iterable[LiveJob], problems: Iterable[StateError]) -> list[LiveJob]:
    store, mine = JobStore(home), [job for job in live if job.record.owner_uid == os.getuid()]
    damaged = {Path(problem.where or "").parent.name for problem in problems}
    for folder in (store.get(job.record.id) for job in mine if job.record.id in damaged):
        if damage := folder.mend_request():
            EventLog(folder.events, clock=time.time).emit("note", text=damage)
    return mine


def finish_interrupted(home: Path, mine: Iterable[LiveJob]) -> None:
    """Write the outcome of this user's jobs that have ended, but whose supervisor died before it could write it.

    gpurun removes a lease only after the fence. So a granted job without a lease has ended, or a person has discarded
    its lease. A queued job has ended if somebody requested its cancel.
    """
    store, leases = JobStore(home), LeaseStore(home)
    names = leases.names()
    suspects = [
        job.record.id
        for job in mine
        if job.record.state is not State.QUEUED or job.request is not None
        if (job.record.state.ended or job.record.id not in names) and _is_over(store, leases, job.record)
    ]
    if not suspects:
        return
    with allocator_lock(home):
        for job in suspects:
            _end(store, leases, store.get(job).record())


def _end(store: JobStore, leases: LeaseStore, record: JobRecord) -> None:
    """Check the job again under the allocator lock, then write its outcome."""
    folder = store.get(record.id)
    if record.state.ended:
        store.retire(record.id)
    elif not _is_over(store, leases, record):
        return
    elif record.state is State.QUEUED and (request := folder.cancel_request()) is not None:
        end_queued_job(store, record, request, now_s=clock.now_s())
    else:
        if record.state is not State.STOPPING:
            reason = "somebody removed the job's lease, the file that reserves the job's GPUs"
            record = folder.move(State.STOPPING, outcome=State.FAILED, reason=reason, code=StateError.exit_code)
        finish(store, record, now_s=clock.now_s())


def _is_over(store: JobStore, leases: LeaseStore, record: JobRecord) -> bool:
    if record.owner_uid != os.getuid():
        return False
    if record.state.ended:
        return True
    if leases.path(record.id).exists():  # also a damaged lease, or a lost one that has not its proper name yet
        return False
    if record.state.holds_gpus and (any(leases.removed([record.id])) or leases.is_carried(record.id)):
        return False
    request = store.get(record.id).cancel_request() if record.state is State.QUEUED else None
    return record.state is not State.QUEUED or (request is not None and request.kind == "cancel")


def start_supervisor(
    home: Path, lease: Lease, lock: LeaseLock, environ: Mapping[str, str], *, adopts: bool = False
) -> None:
    """Start the supervisor of a leased job. It inherits the lock, so the lock is never free in between.

    The lock is closed here if it starts; otherwise the caller closes it.

    Args:
        adopts: there may be more orphans; it starts the next one's supervisor before its own work.
    """
    faults.point()
    log = _log_of(JobStore(home).get(lease.job), needed=not lease.lost)
    try:
        name, rest = lock.path.name.removesuffix(".json"), ["adopts"] if adopts else []
        children.start(
            "gpurun.supervisor", name, str(lock.descriptor), *rest,
            home=home, environ=environ, lock=lock.descriptor, log=log,
        )  # fmt: skip
    finally:
        os.close(log)
    faults.point()
    lock.close()


def ensure_waiter(home: Path, environ: Mapping[str, str]) -> bool:
    """Start this user's waiter unless it lives; return True if it was started.

    It inherits its lock, so the lock is never free in between.
    """
    taken = take_waiter_lock(home)
    if taken is None:
        return False  # it looks at the queue once more after it has released the lock
    descriptor, path = taken
    try:
        faults.point()
        log = path.open_file(os.O_WRONLY | os.O_APPEND)  # another open file: what a child keeps open holds no lock
        try:
            children.start(
                "gpurun.head.waiter", str(descriptor), home=home, environ=environ, lock=descriptor, log=log
            )  # fmt: skip
        finally:
            os.close(log)
        faults.point()
    finally:
        os.close(descriptor)
    return True


def _log_of(folder: JobFolder, *, needed: bool) -> int:
    """Open a supervisor's log for appending; open nothing if something else is in its place.

    Args:
        needed: the supervisor needs the job's folder. The keeper of a lost lease does not.

    Raises:
        FileNotFoundError, StateError: the job's folder is gone or damaged.
    """
    try:
        return folder.supervisor_log.open_file(os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except (FileNotFoundError, StateError):
        if needed and not _is_there(folder):
            raise
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _is_there(folder: JobFolder) -> bool:
    """Return whether something is in the place of a supervisor's log."""
    try:
        return folder.supervisor_log.exists()
    except StateError:
        return False
