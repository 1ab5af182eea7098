"""``python -m gpurun.head.waiter``: one small process per user with queued jobs.

No process runs anything as another user, or writes in another user's folder. A pass looks at all users' jobs, but
grants only those of the user who runs it. When something changes, the other users' waiters run passes of their own. The
waiter is also the timer for changes by time alone: time limits of others, the end of `locality_wait`, a lost host's
return. The lock that it holds shows that it lives. It exits when its user has nothing queued.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun import faults
from gpurun.errors import GpurunError
from gpurun.head.spawn import adopt_orphans, run_pass_and_start
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.refusals import next_try_s
from gpurun.leases.waiters import take_waiter_lock, waiter_lives
from gpurun.state import clock, lock
from gpurun.state.cordons import cordons_file
from gpurun.state.path import StatePath
from gpurun.state.shared import enter

if TYPE_CHECKING:
    from gpurun.leases.allocate import Pass

TICK_S = 0.5
PASS_EVERY_S = 15.0


def ensure_waiter(home: Path, environ: Mapping[str, str]) -> None:
    """Start this user's waiter unless it lives. It inherits its lock, so the lock is never free in between."""
    taken = take_waiter_lock(home)
    if taken is None:
        return  # it looks at the queue once more after it has released the lock
    descriptor, path = taken
    try:
        faults.point()
        log = path.open_file(os.O_WRONLY | os.O_APPEND)  # another open file: what a child keeps open holds no lock
        try:
            subprocess.Popen(
                [sys.executable, "-m", "gpurun.head.waiter", str(descriptor)],
                env={**environ, "GPURUN_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(log)
        faults.point()
    finally:
        os.close(descriptor)


def resume(home: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Replace this user's dead supervisors, and look after queued jobs without a waiter. Returns the ids of adopted
    jobs.

    Every command does this when it starts. It is quick if there is nothing to do.
    """
    adopted = adopt_orphans(home, environ)
    if not waiter_lives(home, os.getuid()) and has_queued(home, os.getuid()):
        run_pass_and_start(home, now_s=clock.now_s(), environ=environ)
        ensure_waiter(home, environ)
    return adopted


def has_queued(home: Path, uid: int) -> bool:
    """Return whether that user has a queued job."""
    records = JobStore(home).live_records()
    return any(record.owner_uid == uid and record.state is State.QUEUED for record in records)


def wait_for_queue(home: Path, environ: Mapping[str, str]) -> None:
    """Run passes after every change, and from time to time, until this user has nothing queued."""
    seen: tuple[float, ...] = ()
    next_pass_s = 0.0
    while True:
        faults.point()
        now = _stamps(home)
        if now != seen or time.monotonic() >= next_pass_s:
            if not has_queued(home, os.getuid()):
                return
            due_s = PASS_EVERY_S
            try:
                adopt_orphans(home, environ)
                due_s = _due_s(run_pass_and_start(home, now_s=clock.now_s(), environ=environ))
            except GpurunError as error:
                print(error, file=sys.stderr, flush=True)  # noqa: T201 (its log)
            seen, next_pass_s = _stamps(home), time.monotonic() + min(due_s, _try_in_s(home))
        time.sleep(TICK_S)


def _due_s(done: Pass) -> float:
    """Return the seconds until time alone may change a decision, at most `PASS_EVERY_S`."""
    wakes = [answer.wake_s - clock.now_s() for answer in done.decisions.values() if answer.wake_s is not None]
    return max(0.0, min([PASS_EVERY_S, *wakes]))


def _try_in_s(home: Path) -> float:
    """Return the seconds until one of this user's jobs may restart after a failure or after a host refused it."""
    now_s, uid = clock.now_s(), os.getuid()
    records = JobStore(home).live_records()
    mine = [record for record in records if record.owner_uid == uid and record.state is State.QUEUED]
    restarts = [record.restart.at_s for record in mine if record.restart and record.waits_for_restart(now_s)]
    refused = next_try_s(mine, uid, now_s)
    return min([*restarts, *([refused] if refused is not None else [])], default=now_s + PASS_EVERY_S) - now_s


def _stamps(home: Path) -> tuple[float, ...]:
    """Return when leases, jobs and cordons last changed."""
    top = StatePath(home)
    return tuple(_changed_s(path) for path in (top / "leases", top / "live", cordons_file(home)))


def _changed_s(path: StatePath) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def hold(home: Path, descriptor: int, environ: Mapping[str, str]) -> None:
    """Be the waiter until this user has nothing queued and another waiter may begin.

    If a job is queued between the last look at the queue and the release of the lock, the submit sees a live waiter and
    starts none. So this function looks at the queue once more after the release.
    """
    while True:
        wait_for_queue(home, environ)
        faults.point()
        lock.release(descriptor)
        faults.point()
        if not has_queued(home, os.getuid()) or waiter_lives(home, os.getuid()) or not lock.try_take(descriptor):
            return


def main(argv: list[str]) -> int:
    """Hold the inherited lock until this user's queue is empty."""
    faults.arm("waiter")
    descriptor = int(argv[0])
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    home = Path(os.environ["GPURUN_HOME"])
    enter(home)
    hold(home, descriptor, os.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
