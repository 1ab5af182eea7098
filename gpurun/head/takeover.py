"""Root ends jobs whose owner no longer has an account.

No supervisor can run as such an owner. So root's `gpurun cancel` turns each of the job's leases into a lost lease of
root's, and ends the job. The keeper of a lost lease kills the containers, fences the hosts, and frees the GPUs. An
inventory can run commands. So gpurun uses only the inventory that root names, never the owner's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.head.spawn import start_all
from gpurun.inventory.model import SSH_PORT, Host, Inventory
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore, end_queued_job, finish
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.lease import Lease, machines_of, places_of
from gpurun.leases.store import WAY_OUT, LeaseLock, LeaseStore
from gpurun.state import audit, clock, lock
from gpurun.state.people import has_account, myself, user_name
from gpurun.state.trusted import not_only_root_s

KILL_S = 10.0
"""How long root waits for the lock of a lease after it has killed the lease's supervisor."""
POLL_S = 0.05


def ownerless_jobs(home: Path) -> dict[int, tuple[str, ...]]:
    """Return, for each uid without an account, the jobs that have not ended or still hold GPUs."""
    found = {(record.owner_uid, record.id) for record in JobStore(home).live_records()}
    found |= {(lease.owner_uid, lease.job) for lease in LeaseStore(home).read_all().leases}
    jobs: dict[int, tuple[str, ...]] = {}
    for uid, job in sorted(found):
        if not has_account(uid):
            jobs[uid] = (*jobs.get(uid, ()), job)
    return jobs


def held_by(home: Path, job: str) -> tuple[str, ...]:
    """Return the hosts on which a job's leases hold GPUs, including lost leases."""
    leases = LeaseStore(home).read_all().leases
    return tuple(dict.fromkeys(grant.host for lease in leases if lease.job == job for grant in lease.grants))


def take_over(home: Path, folder: JobFolder, inventory: Inventory, environ: Mapping[str, str]) -> None:
    """End a job whose owner has no account, and start the fence of its hosts. Idempotent.

    Kills a live supervisor, so the gang gets no grace period. Outputs stay on the hosts.

    Raises:
        BadInput: other users than root can change the inventory, or it lacks a machine that the job holds.
        StateError: another process keeps a lease locked, or a lease is damaged.
    """
    check_inventory(inventory)
    leases = LeaseStore(home)
    record = folder.record()
    leases.restore(record.id)
    try:
        leases.read(record.id)
    except StateError as error:
        error.hint = error.hint or WAY_OUT
        raise
    mine = [each for each in leases.read_all().leases if each.job == record.id and each.owner_uid == record.owner_uid]
    wanted = [(lease, lost_lease(lease, inventory)) for lease in mine]  # before anything is changed
    taken: list[tuple[Lease, LeaseLock]] = []
    for lease, lost in wanted:
        held = _take_lock(leases, lease)
        if held is None:
            continue
        with allocator_lock(home):
            taken.append((lost, leases.hand_over(held, lost)))
        audit.note(
            home, "take over", job=lease.job, owner=user_name(lease.owner_uid), inventory=inventory.source,
            hosts=[grant.host for grant in lost.grants],
        )  # fmt: skip
    with allocator_lock(home):
        _end(JobStore(home), folder)
    start_all(home, taken, environ)


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
            for pid in lock.holders(descriptor):
                with suppress(OSError):  # it has ended
                    process = os.pidfd_open(pid)
                    try:
                        if Path(f"/proc/{pid}").stat().st_uid != uid:
                            others.append(pid)
                        elif pid in lock.holders(descriptor):  # still: the number was not given to a new process
                            signal.pidfd_send_signal(process, signal.SIGKILL)
                    finally:
                        os.close(process)
        finally:
            os.close(descriptor)
    return tuple(others)


def _end(store: JobStore, folder: JobFolder) -> None:
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
