"""Starting supervisors: detached processes that inherit their lease's lock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Pass, run_pass
from gpurun.leases.store import Lease, LeaseLock, LeaseStore


def run_pass_and_start(home: Path, *, now_s: float, environ: Mapping[str, str]) -> Pass:
    """Run a pass and start the supervisor of every job of this user that it granted.

    Jobs of other users are granted too; their own waiters find the lease and start them: nobody runs anything as
    somebody else.

    Raises:
        StateError: as `run_pass`.
    """
    done = run_pass(home, now_s=now_s)
    for lease, lock in done.granted:
        if lease.owner_uid == os.getuid():
            start_supervisor(home, lease, lock, environ)
        else:
            lock.close()
    return done


def adopt_orphans(home: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Start a supervisor for every lease of this user that none holds; the jobs' ids. Idempotent and quick."""
    leases = LeaseStore(home)
    adopted = []
    for lease in leases.read_all().leases:
        if lease.owner_uid != os.getuid():
            continue
        lock = leases.try_lock(lease.name)
        if lock is not None:
            start_supervisor(home, lease, lock, environ)
            adopted.append(lease.job)
    return tuple(adopted)


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
