"""Start and replace supervisors and waiters, which inherit their lock; cancel and requeue jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun import faults
from gpurun.errors import OUTLIVED, BadInput, NotYours, StateError, StateUnavailable
from gpurun.head import children
from gpurun.head.claims import Claims, FoundClaim
from gpurun.inventory.model import SSH_PORT, Host, Inventory
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import CancelRequest, JobRecord, State
from gpurun.jobs.store import JobStore, LiveJob, end_queued_job, finish
from gpurun.leases.lease import Lease, machines_of, places_of
from gpurun.leases.look import WaiterLocks
from gpurun.leases.store import PATIENCE_S, WAY_OUT, AllocatorLock, LeaseLock, LeaseStore
from gpurun.state import clock, locks
from gpurun.state.audit import AuditLog
from gpurun.state.paths import has_account, myself, not_only_root_s, user_name

if TYPE_CHECKING:
    from gpurun.leases.allocate import Pass


@dataclass(frozen=True)
class Head:
    """A state directory, as a process of one user works on it for all jobs.

    Attributes:
        environ: the environment of processes that it starts.
    """

    home: Path
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def run_pass(self, *, now_s: float, patience_s: float | None = PATIENCE_S) -> Pass:
        """Run a pass, and start the supervisor of every job of this user that the pass granted.

        The only function that does so: whatever fails, this process keeps no lease's lock. A job whose supervisor could
        not start has a lease without a lock, which this user's waiter adopts.

        Raises:
            StateError: as `run_pass`; or a supervisor could not start. All that was granted and could start has
            started.
        """
        from gpurun.leases.allocate import Allocator  # noqa: PLC0415 (the whole scheduler, and rarely needed)

        done = Allocator(self.home).run_pass(now_s=now_s, patience_s=patience_s)
        try:
            self.start_all(done.granted)
            if done.failure is not None:
                raise done.failure
        except OUTLIVED:
            with suppress(*OUTLIVED):  # then the next command adopts it
                self.ensure_waiter()
            raise
        return done

    def adopt_orphans(self) -> tuple[str, ...]:
        """Start supervisors for leases of this user without one; return their jobs' ids. Idempotent and quick.

        It starts `ADOPTED_AT_ONCE` of them. Each of these, once it runs, starts the next one (`adopt_next`).

        If a supervisor dies, the next command replaces it. If it dies after it released the GPUs and before it wrote
        the job's outcome, the job is stopping without a lease; this function writes its outcome.
        """
        live, problems = self.live_jobs()
        jobs = self._own(live, problems)
        self.restore_removed([job.record for job in jobs])
        adopted = self._adopt(most=ADOPTED_AT_ONCE)
        self.finish_interrupted(jobs)
        return (*adopted, *self.adopt_found(Claims(self.home).to_adopt([job.record for job in live])))

    def adopt_next(self, name: str) -> None:
        """Start a supervisor for the first orphan behind the lease `name`.

        Each looks only at leases behind its own. So a supervisor that ends at once, such as for a damaged job, is not
        started again and again.
        """
        self._adopt(most=1, after=name)

    def _adopt(self, *, most: int, after: str = "") -> list[str]:
        adopted = list[str]()
        for lease, lock in LeaseStore(self.home).take_orphans(os.getuid(), after=after):
            try:
                Claims(self.home).check_lease(lease)
                self.start_supervisor(lease, lock, adopts=True)
            except (FileNotFoundError, StateError):  # forged, or its job's folder is gone or damaged; or tried again
                lock.close()
                continue
            except BaseException:
                lock.close()
                raise
            AuditLog(self.home).note("adopt", job=lease.job)
            adopted.append(lease.job)
            if len(adopted) == most:
                break
        return adopted

    def adopt_found(self, claims: Iterable[FoundClaim]) -> tuple[str, ...]:
        """Start fences for GPUs that hosts claim for this user's forgotten jobs; return those jobs' ids."""
        found = Claims(self.home).adopt(claims)
        self.start_all(found)
        return tuple(lease.job for lease, _ in found)

    def start_all(self, held: Collection[tuple[Lease, LeaseLock]]) -> None:
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
                    self.start_supervisor(lease, lock)
                except OUTLIVED as error:
                    problems.append(error)
                faults.point()
        if problems:
            raise problems[0]

    def restore_removed(self, mine: Iterable[JobRecord]) -> None:
        """Restore lease files of this user's running jobs that somebody removed."""
        store, leases = JobStore(self.home), LeaseStore(self.home)
        names = leases.names()
        for record in mine:
            if record.state.holds_gpus and record.id not in names and leases.restore(record.id):
                AuditLog(self.home).note("restore", job=record.id)
                text = "somebody removed the job's lease, which reserves its GPUs; gpurun restored the lease"
                EventLog(store.get(record.id).events, clock=time.time).emit("note", text=text)

    def live_jobs(self) -> tuple[list[LiveJob], list[StateError]]:
        """Return all users' jobs that have not ended, and the errors of jobs that cannot be read."""
        problems = list[StateError]()
        return list(JobStore(self.home).live_jobs(problems.append).values()), problems

    def _own(self, live: Iterable[LiveJob], problems: Iterable[StateError]) -> list[LiveJob]:
        store, mine = JobStore(self.home), [job for job in live if job.record.owner_uid == os.getuid()]
        damaged = {Path(problem.where or "").parent.name for problem in problems}
        for folder in (store.get(job.record.id) for job in mine if job.record.id in damaged):
            if damage := folder.mend_request():
                EventLog(folder.events, clock=time.time).emit("note", text=damage)
        return mine

    def finish_interrupted(self, mine: Iterable[LiveJob]) -> None:
        """Write the outcome of this user's jobs that have ended, but whose supervisor died before it could write it.

        gpurun removes a lease only after the fence. So a granted job without a lease has ended, or a person has
        discarded its lease. A queued job has ended if somebody requested its cancel.
        """
        store, leases = JobStore(self.home), LeaseStore(self.home)
        names = leases.names()
        suspects = [
            job.record.id
            for job in mine
            if job.record.state is not State.QUEUED or job.request is not None
            if (job.record.state.ended or job.record.id not in names) and _is_over(store, leases, job.record)
        ]
        if not suspects:
            return
        with AllocatorLock(self.home).held():
            for job in suspects:
                _end(store, leases, store.get(job).record())

    def start_supervisor(self, lease: Lease, lock: LeaseLock, *, adopts: bool = False) -> None:
        """Start the supervisor of a leased job. It inherits the lock, so the lock is never free in between.

        The lock is closed here if it starts; otherwise the caller closes it.

        Args:
            adopts: there may be more orphans; it starts the next one's supervisor before its own work.
        """
        faults.point()
        log = _log_of(JobStore(self.home).get(lease.job), needed=not lease.lost)
        try:
            name, rest = lock.path.name.removesuffix(".json"), ["adopts"] if adopts else []
            children.start_detached(
                "gpurun.supervisor", name, str(lock.descriptor), *rest,
                home=self.home, environ=self.environ, lock=lock.descriptor, log=log,
            )  # fmt: skip
        finally:
            os.close(log)
        faults.point()
        lock.close()

    def ensure_waiter(self) -> bool:
        """Start this user's waiter unless it lives; return True if it was started.

        It inherits its lock, so the lock is never free in between.
        """
        taken = WaiterLocks(self.home).take()
        if taken is None:
            return False  # it looks at the queue once more after it has released the lock
        descriptor, path = taken
        try:
            faults.point()
            log = path.open_file(os.O_WRONLY | os.O_APPEND)  # another open file: what a child keeps open holds no lock
            try:
                children.start_detached(
                    "gpurun.head.waiter", str(descriptor), home=self.home, environ=self.environ, lock=descriptor,
                    log=log,
                )  # fmt: skip
            finally:
                os.close(log)
            faults.point()
        finally:
            os.close(descriptor)
        return True

    def end_queued(self, folder: JobFolder, *, now_s: float) -> bool:
        """End a job with a cancel request if it is queued and holds nothing. Returns True if it has ended now.

        A job with a lease has a supervisor that ends it. Runs a pass afterwards, because other jobs may have waited
        behind this one.
        """
        if folder.record().state is not State.QUEUED:
            return folder.record().state.ended
        with AllocatorLock(self.home).held():
            record = folder.record()
            request = folder.cancel_request()
            leased = LeaseStore(self.home).path(folder.id).exists()
            if record.state is not State.QUEUED or leased or request is None:
                return record.state.ended
            end_queued_job(JobStore(self.home), record, request, now_s=now_s)
        EventLog(folder.events, clock=lambda: now_s).emit("state", state=State.CANCELLED.value, reason="while queued")
        self.run_pass(now_s=now_s)
        return True

    def ownerless_jobs(self) -> dict[int, tuple[str, ...]]:
        """Return, for each uid without an account, the jobs that have not ended or still hold GPUs."""
        found = {(record.owner_uid, record.id) for record in JobStore(self.home).live_records()}
        found |= {(lease.owner_uid, lease.job) for lease in LeaseStore(self.home).read_all().leases}
        jobs: dict[int, tuple[str, ...]] = {}
        for uid, job in sorted(found):
            if not has_account(uid):
                jobs[uid] = (*jobs.get(uid, ()), job)
        return jobs

    def held_by(self, job: str) -> tuple[str, ...]:
        """Return the hosts on which a job's leases hold GPUs, including lost leases."""
        leases = LeaseStore(self.home).read_all().leases
        return tuple(dict.fromkeys(grant.host for lease in leases if lease.job == job for grant in lease.grants))

    def take_over(self, folder: JobFolder, inventory: Inventory) -> None:
        """End a job whose owner has no account, and start the fence of its hosts. Idempotent.

        Kills a live supervisor, so the gang gets no grace period. Outputs stay on the hosts.

        Raises:
            BadInput: other users than root can change the inventory, or it lacks a machine that the job holds.
            StateError: another process keeps a lease locked, or a lease is damaged.
        """
        check_inventory(inventory)
        leases = LeaseStore(self.home)
        record = folder.record()
        leases.restore(record.id)
        try:
            leases.read(record.id)
        except StateError as error:
            error.hint = error.hint or WAY_OUT
            raise
        mine = [
            each for each in leases.read_all().leases if each.job == record.id and each.owner_uid == record.owner_uid
        ]
        wanted = [(lease, lost_lease(lease, inventory)) for lease in mine]  # before anything is changed
        taken: list[tuple[Lease, LeaseLock]] = []
        for lease, lost in wanted:
            held = _take_lock(leases, lease)
            if held is None:
                continue
            with AllocatorLock(self.home).held():
                taken.append((lost, leases.hand_over(held, lost)))
            AuditLog(self.home).note(
                "take over", job=lease.job, owner=user_name(lease.owner_uid), inventory=inventory.source,
                hosts=[grant.host for grant in lost.grants],
            )  # fmt: skip
        with AllocatorLock(self.home).held():
            _end_of_takeover(JobStore(self.home), folder)
        self.start_all(taken)


ADOPTED_AT_ONCE = 8
"""Hundreds of supervisors that start at one moment leave the head no memory and no CPU."""


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


# Request a job's cancel or requeue, and end queued jobs, which need no supervisor.


def refuse_others(folder: JobFolder, command: str = "cancel", what: str = "end it") -> None:
    """Refuse users other than the job's owner and root: only they may stop or enter a job.

    Args:
        command: the command of gpurun that the owner could run.
        what: what it does to the job.

    Raises:
        NotYours: the job belongs to another user.
    """
    owner = folder.record().owner_uid
    if os.getuid() not in (owner, 0):
        raise NotYours(
            f"the job belongs to {user_name(owner)}; only the owner and root may {what}", job=folder.id,
            hint=f"ask the owner to run: gpurun {command} {folder.id}" if command != "exec"
            else "users who may use Docker on the job's hosts can run commands with `docker exec` there",
        )  # fmt: skip


def cancel(folder: JobFolder, *, by: str, reason: str, environ: Mapping[str, str]) -> None:
    """Request a job's cancel, and end the job immediately if it is queued. The caller checks permission."""
    home = folder.path.home
    folder.ask_to_cancel(CancelRequest("cancel", by=by, asked_s=clock.now_s(), reason=reason))
    AuditLog(home).note("cancel", job=folder.id, owner=folder.record().owner)
    Head(home, environ).end_queued(folder, now_s=clock.now_s())


def requeue(folder: JobFolder, *, by: str) -> None:
    """Request that a job's supervisor ends the attempt and queues the job again. The caller checks permission.

    Raises:
        StateError: the request cannot be written.
    """
    reason = f"{by} put the job back into the queue"
    folder.ask_to_cancel(CancelRequest("preempt", by=by, asked_s=clock.now_s(), reason=reason))
    AuditLog(folder.path.home).note("requeue", job=folder.id, owner=folder.record().owner)


# Root ends jobs whose owner no longer has an account.


KILL_S = 10.0
"""How long root waits for the lock of a lease after it has killed the lease's supervisor."""
POLL_S = 0.05


def check_inventory(inventory: Inventory) -> None:
    """Refuse an inventory that other users than root can change: it can run commands as root.

    Raises:
        BadInput: it is such an inventory.
    """
    part = not_only_root_s(Path(inventory.source))
    if part is not None:
        raise BadInput(
            f"users other than root can change {part}, so root does not use the inventory", where=inventory.source,
            hint="use an inventory in a folder that only root can write: --inventory FILE",
        )  # fmt: skip


def lost_lease(lease: Lease, inventory: Inventory) -> Lease:
    """Return the lease as root's lost lease: the same GPUs, on the hosts as this inventory names them.

    Raises:
        BadInput: the inventory names no host for one of the lease's machines.
    """
    hosts = {grant.host: _host(grant.host, lease.machines.get(grant.host), inventory) for grant in lease.grants}
    grants = tuple(replace(grant, host=hosts[grant.host].name) for grant in lease.grants)
    racks = tuple(dict.fromkeys(host.rack for host in hosts.values()))
    return replace(
        lease, owner=myself(), owner_uid=os.getuid(), grants=grants, racks=racks, inventory=inventory.source, lost=True,
        found=True, apart=(), joins=(), machines=machines_of(inventory, grants),
        places=places_of(inventory, grants),
        ids={hosts[host].name: machine_id for host, machine_id in lease.ids.items() if host in hosts},
    )  # fmt: skip


def _host(name: str, machine: str | None, inventory: Inventory) -> Host:
    """Return the host that is this machine. For a name without an address, SSH's own configuration resolves it."""
    for host in inventory.hosts:
        if host.machine == machine:
            return host
    resolved_by_ssh = machine in (None, f"{name.rstrip('.').lower()}:{SSH_PORT}")
    if resolved_by_ssh and name in inventory.by_name:
        return inventory.by_name[name]
    raise BadInput(
        f"the job holds GPUs on {machine or name}, but the inventory has no host with this address. "
        f"The job's owner calls the host {name!r}",
        where=inventory.source, hint="use an inventory that has a host with this address: --inventory FILE",
    )  # fmt: skip


def _take_lock(leases: LeaseStore, lease: Lease) -> LeaseLock | None:
    """Kill the owner's processes that hold a lease's lock, and take the lock. Returns None if the lease is gone."""
    path = leases.path(lease.name) if leases.path(lease.name).exists() else leases.path(lease.job)
    name = path.name.removesuffix(".json")
    deadline = time.monotonic() + KILL_S
    while True:
        held = leases.try_lock(name)
        if held is not None:
            if leases.read(name) == lease:
                return held
            held.close()
            raise StateUnavailable(
                "the job's lease, the file that reserves its GPUs, has just changed",
                job=lease.job,
                hint="cancel the job again",
            )
        if not path.exists():
            return None
        others = _kill_holders(leases, name, lease.owner_uid)
        if others or time.monotonic() > deadline:
            pids = ", ".join(map(str, others)) or "unknown"
            raise StateUnavailable(
                f"another user's process (pid {pids}) locks the job's lease, the file that reserves "
                "its GPUs", job=lease.job, where=str(path),
                hint=f"run `fuser -v {path}` as root to find the process, end the process, and cancel the job again",
            )  # fmt: skip
        time.sleep(POLL_S)


def _kill_holders(leases: LeaseStore, name: str, uid: int) -> tuple[int, ...]:
    """Kill the processes of one user that hold a lease's lock. Returns the holders of other users."""
    others = []
    with suppress(FileNotFoundError):
        descriptor = leases.path(name).open_file(os.O_RDONLY, linked=True)
        try:
            for pid in locks.holders(descriptor):
                with suppress(OSError):  # it has ended
                    process = os.pidfd_open(pid)
                    try:
                        if Path(f"/proc/{pid}").stat().st_uid != uid:
                            others.append(pid)
                        elif pid in locks.holders(descriptor):  # still: the number was not given to a new process
                            signal.pidfd_send_signal(process, signal.SIGKILL)
                    finally:
                        os.close(process)
        finally:
            os.close(descriptor)
    return tuple(others)


def _end_of_takeover(store: JobStore, folder: JobFolder) -> None:
    """Write the job's outcome; keep an outcome that was decided before. The caller holds the allocator lock."""
    record = folder.record()
    if record.state.ended:
        return
    reason = f"cancelled by {myself()}: the job's owner, {user_name(record.owner_uid)}, has no account"
    if record.state is State.QUEUED:
        request = CancelRequest("cancel", by=myself(), asked_s=clock.now_s(), reason=reason)
        end_queued_job(store, record, request, now_s=clock.now_s())
        return
    if record.state is not State.STOPPING:
        record = folder.move(State.STOPPING, outcome=State.CANCELLED, reason=reason, code=1)
    record = finish(store, record, now_s=clock.now_s())
    _tell(folder, record)


def _tell(folder: JobFolder, record: JobRecord) -> None:
    with suppress(FileNotFoundError, StateError):  # the job has its end all the same
        EventLog(folder.events, clock=time.time).emit("state", state=record.state.value, reason=record.reason)
