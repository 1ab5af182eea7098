"""``python -m gpurun.supervisor LEASE LOCK_FD [adopts]``: the process behind one lease, as a rule a running job's.

Started by `gpurun.head.spawn` with the lease's lock as an open descriptor; not meant to be typed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from gpurun import faults
from gpurun.errors import GpurunError, StateError
from gpurun.head.spawn import adopt_next, run_pass_and_start
from gpurun.head.waiter import ensure_waiter
from gpurun.history.collect import collect
from gpurun.jobs.states import State
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state import clock
from gpurun.state.shared import enter
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.life import live
from gpurun.supervisor.lost import keep_asking, lose_rest
from gpurun.supervisor.notifying import tell_end


def main(argv: list[str]) -> int:
    """Run a lease to its end: a job's attempt, or the fence of lost hosts."""
    faults.arm("supervisor")
    name, descriptor = argv[0], int(argv[1])
    home = Path(os.environ["GPURUN_HOME"])
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    leases = LeaseStore(home)
    try:
        enter(home)
        lease = leases.read(name)
        if lease is None:
            raise StateError("its lease is gone", job=name)
        if "adopts" in argv[2:]:
            _start_next(home, lease.name)
        _carry(home, lease, LeaseLock(descriptor, leases.path(name)))
    except GpurunError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    except Exception:  # noqa: BLE001 (a defect: the lease stays, `gpurun recover` takes over)
        traceback.print_exc()
        return 70
    return 0


def _start_next(home: Path, name: str) -> None:
    """Start the next orphan's supervisor. A failure does not stop this one: the next command adopts that orphan."""
    try:
        adopt_next(home, os.environ, name)
    except (GpurunError, OSError) as error:
        print(f"cannot adopt the next job: {error}", file=sys.stderr)  # noqa: T201


def _carry(home: Path, lease: Lease, lock: LeaseLock) -> None:
    rest = (lease, lock) if lease.lost else _carry_job(SupervisedJob(home, lease, lock))
    if rest is not None:
        keep_asking(home, *rest)
        run_pass_and_start(home, now_s=clock.now_s(), environ=os.environ, patience_s=None)


def _carry_job(job: SupervisedJob) -> tuple[Lease, LeaseLock] | None:
    """Run a job to the end of its attempt; return what is left of the lease then.

    If somebody removed the lease or put it back and the attempt counts as ended, its hosts are fenced anyway.
    """
    if job.record.is_past(job.lease.attempt):
        return lose_rest(job.home, job.lease, job.lock)
    try:
        state = live(job)
    except StateError:
        if not job.folder.record().is_past(job.lease.attempt):
            raise
        return lose_rest(job.home, job.lease, job.lock)
    job.links.close()
    with suppress(StateError):  # the next command that shows the history tries again
        collect(job.home)
    run_pass_and_start(job.home, now_s=clock.now_s(), environ=os.environ, patience_s=None)
    if state is State.QUEUED:
        ensure_waiter(job.home, os.environ)
    tell_end(job)
    return job.lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
