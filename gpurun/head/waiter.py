"""``python -m gpurun.head.waiter``: one small process per user with queued jobs.

No process runs anything as another user, or writes in another user's folder. A pass looks at all users' jobs, but
grants only those of the user who runs it. When something changes, the other users' waiters run passes of their own. The
waiter is also the timer for changes by time alone: time limits of others, the end of `locality_wait`, a lost host's
return. The lock that it holds shows that it lives. It exits when its user has nothing queued, or the state directory is
gone for good. No error ends it: it says what failed in its log, and tries again.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpurun import faults
from gpurun.errors import OUTLIVED, GpurunError, UnsafeState
from gpurun.head import children
from gpurun.head.looks import WaiterLooks
from gpurun.head.spawn import adopt_orphans, ensure_waiter, run_pass_and_start
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.refusals import next_try_s
from gpurun.leases.store import LeaseStore
from gpurun.leases.waiters import waiter_lives
from gpurun.state import clock, lock
from gpurun.state.cordons import cordons_file
from gpurun.state.machines import outs_stamp
from gpurun.state.path import StatePath
from gpurun.state.presence import Presence
from gpurun.state.shared import enter

if TYPE_CHECKING:
    from gpurun.leases.allocate import Pass

Answer = TypeVar("Answer")

LATE = ("gpurun.leases.allocate", "gpurun.inventory.validate", "gpurun.inventory.hostset")
"""What functions import when they need it: `gpurun.head.loading` imports it at the start."""
TICK_S = 0.5
PASS_EVERY_S = 15.0
AGAIN_FIRST_S = 1.0
"""After a look at the queue that failed; then twice as long each time, at most `PASS_EVERY_S`."""


def resume(home: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Replace this user's dead supervisors, and look after queued jobs without a waiter. Returns the ids of adopted
    jobs.

    Every command does this when it starts. It is quick if there is nothing to do.
    """
    adopted = adopt_orphans(home, environ)
    if not waiter_lives(home, os.getuid()) and is_needed(home, os.getuid()):
        run_pass_and_start(home, now_s=clock.now_s(), environ=environ)
        ensure_waiter(home, environ)
    return adopted


def is_needed(home: Path, uid: int) -> bool:
    """Return whether that user needs a waiter: a job is queued, or has GPUs and no supervisor has begun with it."""
    leases = LeaseStore(home)
    mine = [record for record in JobStore(home).live_records() if record.owner_uid == uid]
    return any(
        record.state is State.QUEUED or (record.state is State.GRANTED and not leases.is_alive(record.id))
        for record in mine
    )


def wait_for_queue(home: Path, environ: Mapping[str, str], here: Presence | None = None) -> None:
    """Run passes after every change, and from time to time, until this user needs no waiter, or the state directory is
    gone.
    """
    here = here or Presence(home)
    seen: tuple[float, ...] = ()
    seen_outs: frozenset[str] = frozenset()
    looks = WaiterLooks(home, environ)
    next_pass_s, again_s = 0.0, AGAIN_FIRST_S
    while True:
        faults.point()
        try:
            here.check()
            now, outs = _stamps(home), outs_stamp(home)
            if (now, outs) != (seen, seen_outs) or time.monotonic() >= next_pass_s:
                if not is_needed(home, os.getuid()):
                    here.check()  # nothing is queued in a directory that is away
                    return
                due_s = _look(home, environ, looks)
                seen, seen_outs = _stamps(home), outs
                next_pass_s, again_s = time.monotonic() + due_s, AGAIN_FIRST_S
            looks.start_if_due()
        except Exception as error:  # noqa: BLE001 (also a defect must not leave the queue alone)
            if here.is_gone():
                return
            _say(error)
            time.sleep(again_s)
            again_s = min(2 * again_s, PASS_EVERY_S)
        time.sleep(TICK_S)


def _look(home: Path, environ: Mapping[str, str], looks: WaiterLooks) -> float:
    """Adopt orphans, run a pass and plan the next look at hosts. Returns the seconds until the next pass, unless
    something changes.
    """
    adopt_orphans(home, environ)
    done = run_pass_and_start(home, now_s=clock.now_s(), environ=environ)
    looks.plan({path: seen.inventory for path, seen in done.snapshots.items()})
    return min(_due_s(done), _try_in_s(home))


def _say(error: Exception) -> None:
    """Print an error into this waiter's log."""
    with suppress(OSError):  # its disk is full
        if isinstance(error, (GpurunError, OSError)):
            print(error, file=sys.stderr, flush=True)  # noqa: T201
        else:
            traceback.print_exception(error)


def _at_last(do: Callable[[], Answer]) -> Answer:
    """Do something that must not fail, again and again until it succeeds.

    Raises:
        UnsafeState, FileNotFoundError: the state directory does not protect its users, or is gone.
    """
    again_s = AGAIN_FIRST_S
    while True:
        try:
            return do()
        except (UnsafeState, FileNotFoundError):
            raise
        except OUTLIVED as error:
            _say(error)
        time.sleep(again_s)
        again_s = min(2 * again_s, PASS_EVERY_S)


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
    here = Presence(home, lambda: descriptor)
    while True:
        wait_for_queue(home, environ, here)
        faults.point()
        _at_last(lambda: lock.release(descriptor))
        faults.point()
        if here.is_gone() or not _at_last(lambda: _begins_again(home, descriptor, here)):
            return


def _begins_again(home: Path, descriptor: int, here: Presence) -> bool:
    """Return whether this process is the waiter once more, because it is needed and no other has begun."""
    uid = os.getuid()
    needed = is_needed(home, uid)
    here.check()
    return needed and not waiter_lives(home, uid) and lock.try_take(descriptor)


def main(argv: list[str]) -> int:
    """Hold the inherited lock until this user's queue is empty."""
    faults.arm("waiter")
    descriptor = int(argv[0])
    os.set_inheritable(descriptor, False)
    children.live_on()
    home = Path(os.environ["GPURUN_HOME"])
    _at_last(lambda: enter(home))
    hold(home, descriptor, os.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
