"""The process behind one lease, as a rule a running job's: ``gpurun.supervisor LEASE LOCK_FD [adopts]``.

Started by `gpurun.head.spawn` with the lease's lock as an open descriptor; not meant to be typed. An older gpurun may
start it, so these arguments stay.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpurun import faults
from gpurun.errors import OUTLIVED, GpurunError, StateError, StateUnavailable, words_of
from gpurun.head import children
from gpurun.head.spawn import Head
from gpurun.history.store import JobHistory
from gpurun.jobs.record import State
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state import clock
from gpurun.state.clock import Presence
from gpurun.state.paths import may_pass
from gpurun.state.sharing import StateDirectory
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.life import live
from gpurun.supervisor.stop import keep_asking, lose_rest
from gpurun.supervisor.telling import tell_end

LATE = ("gpurun.remote.opening", "gpurun.inventory.validate", "cryptography.x509")
"""What functions import when they need it: `gpurun.head.loading` imports it at the start."""
AGAIN_FIRST_S, AGAIN_MOST_S = 1.0, 60.0
"""How long a supervisor waits for a state directory that cannot be used: first and at most."""


def main(argv: list[str]) -> int:
    """Run a lease to its end: a job's attempt, or the fence of lost hosts."""
    faults.arm_fault("supervisor")
    descriptor = int(argv[1])
    home = Path(os.environ["GPURUN_HOME"])
    os.set_inheritable(descriptor, False)
    children.live_on()
    try:
        carry(home, LeaseLock(descriptor, LeaseStore(home).path(argv[0])), adopts="adopts" in argv[2:])
    except GpurunError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    except Exception:  # noqa: BLE001 (a defect: the lease stays, `gpurun recover` takes over)
        traceback.print_exc()
        return 70
    return 0


def carry(home: Path, lock: LeaseLock, *, adopts: bool = False) -> None:
    """Carry a lease to its end. While the state directory cannot be used, or this machine is short of something, wait,
    then begin as a new supervisor would.

    Args:
        adopts: start the next orphan's supervisor first.

    Raises:
        StateError: the lease is gone or damaged, or the state directory is not safe.
        FileNotFoundError: the state directory is gone.
        OSError, RuntimeError: a defect.
    """
    pause_s, is_first = AGAIN_FIRST_S, True
    here = Presence(home, lambda: lock.descriptor)
    while True:
        begun_s = time.monotonic()
        try:
            here.check()
            StateDirectory(home).enter()
            name = lock.path.name.removesuffix(".json")
            lease = LeaseStore(home).read(name)
            here.check()  # a directory that is away has no leases
            if lease is None and is_first:
                raise StateError("the job's lease, the file that reserves its GPUs, does not exist", job=name)
            if lease is None:  # its GPUs are free; only what comes afterwards failed
                return
            if adopts and is_first:
                _start_next(home, lease.name)
            is_first = False
            _carry(home, lease, lock)
        except OUTLIVED as error:
            if not may_pass(error) and not here.is_away():
                raise
            _say(error)
        else:
            return
        if time.monotonic() - begun_s > AGAIN_MOST_S:
            pause_s = AGAIN_FIRST_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_MOST_S)


def _say(error: Exception) -> None:
    """Print an error into this supervisor's log."""
    with suppress(OSError):  # its disk is full
        print(words_of(error), file=sys.stderr, flush=True)  # noqa: T201


def _start_next(home: Path, name: str) -> None:
    """Start the next orphan's supervisor. A failure does not stop this one: the next command adopts that orphan."""
    try:
        Head(home).adopt_next(name)
    except OUTLIVED as error:
        with suppress(OSError):
            print(f"cannot adopt the next job: {error}", file=sys.stderr)  # noqa: T201


def _carry(home: Path, lease: Lease, lock: LeaseLock) -> None:
    rest = (lease, lock) if lease.lost else _carry_job(SupervisedJob(home, lease, lock))
    if rest is not None:
        keep_asking(home, *rest)
        _each(lambda: _run_pass(home))


def _carry_job(job: SupervisedJob) -> tuple[Lease, LeaseLock] | None:
    """Run a job to the end of its attempt; return what is left of the lease then.

    If somebody removed the lease or put it back and the attempt counts as ended, its hosts are fenced anyway.
    """
    if job.record.is_past(job.lease.attempt):
        return lose_rest(job.home, job.lease, job.lock)
    try:
        state = live(job)
    except StateUnavailable:
        raise
    except StateError:
        if not job.folder.record().is_past(job.lease.attempt):
            raise
        return lose_rest(job.home, job.lease, job.lock)
    finally:
        job.close()
    _each(
        lambda: _run_pass(job.home),
        lambda: Head(job.home).ensure_waiter() if state is State.QUEUED else None,
        lambda: JobHistory(job.home).collect(),  # else the next command that shows the history does
        lambda: tell_end(job),
    )
    return job.lost


def _run_pass(home: Path) -> None:
    """Let others have the GPUs that are free now. If it fails, their waiters do so."""
    Head(home).run_pass(now_s=clock.now_s(), patience_s=None)


def _each(*steps: Callable[[], object]) -> None:
    """Do each of these steps, also if another one fails: somebody's damaged lease costs nobody a message."""
    for step in steps:
        try:
            step()
        except OUTLIVED as error:
            _say(error)
        except Exception:  # noqa: BLE001 (a defect of one step is none of the others)
            traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
