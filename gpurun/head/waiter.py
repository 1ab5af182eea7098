"""``python -m gpurun.head.waiter``: one small process per user with queued jobs.

No process runs anything as another user, or writes in another user's folder. A pass looks at all users' jobs, but
grants only those of the user who runs it. When something changes, the other users' waiters run passes of their own. The
waiter is also the timer for changes by time alone: time limits of others, the end of `locality_wait`, a lost host's
return. The lock that it holds shows that it lives. It exits when its user has nothing queued, or the state directory is
gone for good. No error ends it: it says what failed in its log, and tries again.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpurun import faults
from gpurun.errors import OUTLIVED, BadInput, GpurunError, UnsafeState
from gpurun.head import children
from gpurun.head.looks import WaiterLooks
from gpurun.head.spawn import Head
from gpurun.jobs.record import State
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import next_try_s
from gpurun.leases.look import WaiterLocks
from gpurun.leases.store import LeaseStore
from gpurun.state import clock, locks
from gpurun.state.clock import Presence
from gpurun.state.hosts import Cordons, Machines
from gpurun.state.paths import StatePath, only_root_s
from gpurun.state.sharing import StateDirectory

if TYPE_CHECKING:
    from gpurun.leases.allocate import Pass


Answer = TypeVar("Answer")

LATE = ("gpurun.leases.allocate", "gpurun.inventory.validate", "gpurun.inventory.hostset")
"""What functions import when they need it: `gpurun.head.loading` imports it at the start."""
TICK_S = 0.5
PASS_EVERY_S = 15.0
AGAIN_FIRST_S = 1.0
"""After a look at the queue that failed; then twice as long each time, at most `PASS_EVERY_S`."""


@dataclass(frozen=True)
class Waiter:
    """This user's waiter.

    Attributes:
        environ: the environment of processes that it starts.
    """

    home: Path
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def _head(self) -> Head:
        return Head(self.home, self.environ)

    def resume(self) -> tuple[str, ...]:
        """Replace this user's dead supervisors, and look after queued jobs without a waiter. Returns the ids of adopted
        jobs.

        Every command does this when it starts. It is quick if there is nothing to do.
        """
        adopted = self._head.adopt_orphans()
        if not WaiterLocks(self.home).lives(os.getuid()) and self.is_needed(os.getuid()):
            self._head.run_pass(now_s=clock.now_s())
            self._head.ensure_waiter()
        return adopted

    def is_needed(self, uid: int) -> bool:
        """Return whether that user needs a waiter: a job is queued, or has GPUs and no supervisor has begun with it."""
        leases = LeaseStore(self.home)
        mine = [record for record in JobStore(self.home).live_records() if record.owner_uid == uid]
        return any(
            record.state is State.QUEUED or (record.state is State.GRANTED and not leases.is_alive(record.id))
            for record in mine
        )

    def wait_for_queue(self, here: Presence | None = None) -> None:
        """Run passes after every change, and from time to time, until this user needs no waiter, or the state directory
        is gone.
        """
        here = here or Presence(self.home)
        seen: tuple[float, ...] = ()
        seen_outs: frozenset[str] = frozenset()
        looks = WaiterLooks(self.home, self.environ)
        next_pass_s, again_s = 0.0, AGAIN_FIRST_S
        while True:
            faults.point()
            try:
                here.check()
                now, outs = self._stamps(), Machines(self.home).outs_stamp()
                if (now, outs) != (seen, seen_outs) or time.monotonic() >= next_pass_s:
                    if not self.is_needed(os.getuid()):
                        here.check()  # nothing is queued in a directory that is away
                        return
                    due_s = self._look(looks)
                    seen, seen_outs = self._stamps(), outs
                    next_pass_s, again_s = time.monotonic() + due_s, AGAIN_FIRST_S
                looks.start_if_due()
            except Exception as error:  # noqa: BLE001 (also a defect must not leave the queue alone)
                if here.is_gone():
                    return
                _say(error)
                time.sleep(again_s)
                again_s = min(2 * again_s, PASS_EVERY_S)
            time.sleep(TICK_S)

    def _look(self, looks: WaiterLooks) -> float:
        """Adopt orphans, run a pass and plan the next look at hosts. Returns the seconds until the next pass, unless
        something changes.
        """
        self._head.adopt_orphans()
        done = self._head.run_pass(now_s=clock.now_s())
        looks.plan({path: seen.inventory for path, seen in done.snapshots.items()})
        return min(_due_s(done), self._try_in_s())

    def _try_in_s(self) -> float:
        """Return the seconds until one of this user's jobs may restart after a failure or after a host refused it."""
        now_s, uid = clock.now_s(), os.getuid()
        records = JobStore(self.home).live_records()
        mine = [record for record in records if record.owner_uid == uid and record.state is State.QUEUED]
        restarts = [record.restart.at_s for record in mine if record.restart and record.waits_for_restart(now_s)]
        refused = next_try_s(mine, uid, now_s)
        return min([*restarts, *([refused] if refused is not None else [])], default=now_s + PASS_EVERY_S) - now_s

    def _stamps(self) -> tuple[float, ...]:
        """Return when leases, jobs and cordons last changed."""
        top = StatePath(self.home)
        return tuple(_changed_s(path) for path in (top / "leases", top / "live", Cordons(self.home).file()))

    def hold(self, descriptor: int) -> None:
        """Be the waiter until this user has nothing queued and another waiter may begin.

        If a job is queued between the last look at the queue and the release of the lock, the submit sees a live waiter
        and starts none. So this function looks at the queue once more after the release.
        """
        here = Presence(self.home, lambda: descriptor)
        while True:
            self.wait_for_queue(here)
            faults.point()
            _at_last(lambda: locks.release_lock(descriptor))
            faults.point()
            if here.is_gone() or not _at_last(lambda: self._begins_again(descriptor, here)):
                return

    def _begins_again(self, descriptor: int, here: Presence) -> bool:
        """Return whether this process is the waiter once more, because it is needed and no other has begun."""
        uid = os.getuid()
        needed = self.is_needed(uid)
        here.check()
        return needed and not WaiterLocks(self.home).lives(uid) and locks.try_take(descriptor)


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


def _changed_s(path: StatePath) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def main(argv: list[str]) -> int:
    """Hold the inherited lock until this user's queue is empty."""
    faults.arm_fault("waiter")
    descriptor = int(argv[0])
    os.set_inheritable(descriptor, False)
    children.live_on()
    home = Path(os.environ["GPURUN_HOME"])
    _at_last(lambda: StateDirectory(home).enter())
    Waiter(home).hold(descriptor)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# Write systemd units, or crontab lines, that run ``gpurun recover`` at boot and every minute.


NAME = "gpurun-recover"
KEPT_VARIABLES = ("GPURUN_HOME", "GPURUN_INVENTORY", "XDG_STATE_HOME", "DOCKER_HOST", "PATH")
"""What `gpurun recover`, and the supervisors that it starts, must find as in the shell that installed it."""


@dataclass(frozen=True)
class Recovery:
    """The command to run, and its environment.

    Attributes:
        everybody: use the system's manager for all users, instead of the user's own.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    everybody: bool

    def units(self) -> Mapping[str, str]:
        """Return file name → text, for systemd.unit(5).

        ``KillMode=process``: the supervisors that the unit starts must outlive it. ``Persistent`` makes up for minutes
        in which the machine slept or was off (systemd.timer(5)).

        Raises:
            BadInput: a value cannot be written in a unit.
        """
        environment = "".join(f"Environment={_quoted(f'{key}={value}')}\n" for key, value in self.environ.items())
        command = " ".join(_quoted(word, dollar="$$") for word in self.argv)
        online = "After=network-online.target docker.service\nWants=network-online.target\n" if self.everybody else ""
        service = (
            f"[Unit]\nDescription=gpurun: recover jobs after a crash\n{online}\n"
            f"[Service]\nType=oneshot\nKillMode=process\n{environment}ExecStart={command}\n"
        )
        timer = (
            "[Unit]\nDescription=gpurun: recover jobs after a crash, every minute\n\n"
            "[Timer]\nOnBootSec=15s\nOnCalendar=minutely\nAccuracySec=5s\nPersistent=true\n\n"
            "[Install]\nWantedBy=timers.target\n"
        )
        return {f"{NAME}.service": service, f"{NAME}.timer": timer}

    def crontab(self) -> str:
        """Return the same as lines of crontab(5), in which a percent sign ends the command."""
        _refuse_controls(*self.environ.values(), *self.argv)
        words = [*(f"{key}={shlex.quote(value)}" for key, value in self.environ.items()), shlex.join(self.argv)]
        command = " ".join(words).replace("%", r"\%") + " >/dev/null 2>&1"
        return f"@reboot {command}\n* * * * * {command}\n"


def kept(environ: Mapping[str, str], home: str) -> Mapping[str, str]:
    """Return the relevant part of an environment, with the current state directory."""
    return {key: value for key, value in {**environ, "GPURUN_HOME": home}.items() if key in KEPT_VARIABLES and value}


def _quoted(text: str, *, dollar: str = "$") -> str:
    """Return one word in the syntax of systemd.syntax(7) and systemd.service(5)."""
    _refuse_controls(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar)
    return f'"{escaped}"'


def _refuse_controls(*texts: str) -> None:
    for text in texts:
        if not text.isprintable():
            raise BadInput(
                f"a systemd unit or crontab cannot contain {text!r}",
                hint="use a path that has only printable characters",
            )


# Root's `gpurun recover` in a shared state directory: recover every user's jobs, as that user.


KEPT = ("PATH", "LANG", "GPURUN_HOME", "DOCKER_HOST")
"""Of root's environment. Where the head's Docker is holds for every user; all else is the user's own."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Recovered:
    """What a recovery did for a user.

    Attributes:
        adopted: jobs that have a supervisor again, or the fence of a host that was lost.
        waiter: the user's waiter was started.
        problem: what failed; "" if nothing.
    """

    user: str
    adopted: tuple[str, ...] = ()
    waiter: bool = False
    problem: str = ""


def owners(home: Path) -> tuple[int, ...]:
    """Return the users, without root, with jobs that have not ended or that still hold GPUs."""
    found = {record.owner_uid for record in JobStore(home).live_records()}
    found |= {lease.owner_uid for lease in LeaseStore(home).read_all().leases}  # lost ones, too
    return tuple(sorted(found - {0}))


def recover_as(uid: int, home: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> Recovered:
    """Run ``gpurun recover`` as another user, with that user's groups and home."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return Recovered(
            f"uid {uid}",
            problem=f"uid {uid} has no account any more, so gpurun cannot start the processes that supervise its jobs",
        )
    own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "GPURUN_HOME": str(home)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpurun", "recover", "--json", *options],
            check=False, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,  # no terminal of root's, into which it could type
            timeout=TIMEOUT_S,
            env={**{key: environ[key] for key in KEPT if key in environ}, **_python_path(environ), **own}, cwd="/",
            user=uid, group=user.pw_gid, extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Recovered(user.pw_name, problem=f"{user.pw_name}: {error}")
    adopted, waiter = _restarted(done.stdout)
    problem = f"{user.pw_name}: {done.stderr.strip()}" if done.returncode else ""
    return Recovered(user.pw_name, adopted, waiter, problem)


def _restarted(printed: str) -> tuple[tuple[str, ...], bool]:
    """Return the jobs and the waiter that the user's command says it has restarted."""
    try:
        said = json.loads(printed)
        return tuple(map(str, said["adopted"])), said["waiter"] is True
    except (ValueError, TypeError, KeyError, RecursionError):  # it failed before, and its stderr says why
        return (), False


def _python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the folders of ``PYTHONPATH`` that only root can write. The owner of any other could run code as every
    user.
    """
    kept = only_root_s(environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": kept} if kept else {}
