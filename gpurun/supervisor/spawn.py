"""Starting supervisors: detached processes that inherit their lease's lock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gpurun import faults
from gpurun.errors import StateError
from gpurun.jobs.states import State
from gpurun.jobs.store import JobRecord, JobStore, finish
from gpurun.leases.allocate import Pass, run_pass
from gpurun.leases.store import Lease, LeaseLock, LeaseStore, allocator_lock


def run_pass_and_start(home: Path, *, now_s: float, environ: Mapping[str, str]) -> Pass:
    """Run a pass and start the supervisor of every job of this user that it granted.

    Raises:
        StateError: as `run_pass`.
    """
    done = run_pass(home, now_s=now_s)
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
    adopted = []
    for lease, lock in LeaseStore(home).take_orphans(os.getuid()):
        start_supervisor(home, lease, lock, environ)
        adopted.append(lease.job)
    finish_interrupted(home)
    return tuple(adopted)


def finish_interrupted(home: Path) -> None:
    """Give their outcome to this user's jobs that hold nothing any more, and whose supervisor died before saying so.

    A lease is removed only after the fence, so such a job is over; or a person has discarded its lease.
    """
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
                if record.state is not State.STOPPING:
                    reason = "its lease is gone: discarded, or removed by hand"
                    record = folder.move(State.STOPPING, outcome=State.FAILED, reason=reason, code=StateError.exit_code)
                finish(store, record, now_s=time.time())


def _is_over(record: JobRecord, leases: LeaseStore) -> bool:
    if record.owner_uid != os.getuid():
        return False
    if record.state.ended or record.state is State.QUEUED:
        return record.state.ended
    return not leases.path(record.id).exists()  # a damaged lease, or a lost one without its proper name, is one too


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
