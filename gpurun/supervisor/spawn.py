"""Starting supervisors: detached processes that inherit their lease's lock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gpurun import faults
from gpurun.jobs import audit
from gpurun.jobs.states import State
from gpurun.jobs.store import JobRecord, JobStore, finish
from gpurun.leases.allocate import Pass, run_pass
from gpurun.leases.allocator import PATIENCE_S, allocator_lock
from gpurun.leases.store import Lease, LeaseLock, LeaseStore


def run_pass_and_start(
    home: Path, *, now_s: float, environ: Mapping[str, str], patience_s: float | None = PATIENCE_S
) -> Pass:
    """Run a pass and start the supervisor of every job of this user that it granted.

    Raises:
        StateError: as `run_pass`.
    """
    done = run_pass(home, now_s=now_s, patience_s=patience_s)
    faults.point()
    for lease, lock in done.granted:
        start_supervisor(home, lease, lock, environ)
        faults.point()
    return done


def adopt_orphans(home: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Start a supervisor for every lease of this user that none holds; their jobs' ids. Idempotent and quick.

    A supervisor that died is replaced by the next command that comes along. One that died between giving the GPUs
    back and writing the job's outcome left a job that stops without a lease: it is given its outcome here.
    """
    leases = LeaseStore(home)
    adopted = []
    for lease in leases.read_all().leases:
        if lease.owner_uid != os.getuid():
            continue
        lock = leases.try_lock(lease.name) or leases.try_lock(lease.job)
        if lock is not None and not lock.is_mine():
            lock.close()
        elif lock is not None:
            audit.note(home, "adopt", job=lease.job)
            start_supervisor(home, lease, leases.settle(lock, lease), environ)
            adopted.append(lease.job)
    _finish_interrupted(home)
    return tuple(adopted)


def _finish_interrupted(home: Path) -> None:
    store, leases = JobStore(home), LeaseStore(home)
    suspects = [record.id for record in store.records(lambda _: None, ids=store.live_ids()) if _is_over(record, leases)]
    if not suspects:
        return
    with allocator_lock(home):
        for job in suspects:
            folder = store.get(job)
            record = folder.record()
            if record.state.ended:
                store.retire(job)
            elif _is_over(record, leases):
                finish(store, record, now_s=time.time())


def _is_over(record: JobRecord, leases: LeaseStore) -> bool:
    if record.owner_uid != os.getuid():
        return False
    lease = leases.read(record.id) if record.state is State.STOPPING else None
    return record.state.ended or (record.state is State.STOPPING and (lease is None or lease.lost))


def start_supervisor(home: Path, lease: Lease, lock: LeaseLock, environ: Mapping[str, str]) -> None:
    """Start the supervisor of a leased job; the lock passes to it without a moment in between."""
    with (JobStore(home).get(lease.job).supervisor_log).open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "gpurun.supervisor", lock.path.stem, str(lock.descriptor)],
            env={**environ, "GPURUN_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock.descriptor],
            start_new_session=True,
            cwd="/",
        )
    lock.close()
