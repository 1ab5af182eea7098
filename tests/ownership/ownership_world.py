"""The world that steps act on: machines, state directories, users, inventories, and the processes that live.

Files are real, below one temporary folder. Processes are not: supervisors are greenlets, waiters are held locks, and a
command is a call. Users are real where the test runs as root: each action has the effective uid of its user.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ownership_checks as checks
import ownership_files as files
from simulated_hosts import Agents, Machine
from simulated_supervisor import Crashed, Supervisor, real_supervisors

from gpurun import faults
from gpurun.errors import GpurunError
from gpurun.head import submit
from gpurun.inventory import read as loading
from gpurun.state import clock, filesystem
from gpurun.state.boot import ClockReading
from gpurun.state.clock import HeadClock
from gpurun.state.paths import StatePath
from gpurun.state.sharing import StateDirectory, append_only
from gpurun.supervisor import job, stop

START_S = 1_700_000_000.0
MACHINES = ("m1", "m2", "m3", "m4", "m5", "m9")
BY_ADDRESS = {"10.0.0.1": "m1", "10.0.0.2": "m2"}
"""Addresses that only DNS, and the machine itself, know to be a machine of another name."""
MEMBERS = (2001, 2002)
LONER = 2003


class Head:
    """A state directory and its users."""

    def __init__(self, name: str, home: Path, users: tuple[int, ...]) -> None:
        self.name, self.home, self.users = name, home, users
        self.waiters: dict[int, int] = {}


class World:
    """One episode's world. A context manager: it is the only one while it is open.

    Attributes:
        history: what happened, for people.
        violations: promises that were broken.
        damages: what was damaged and not yet repaired.
        excused: jobs whose claims may stay: a person threw their lease away.
        rewritten: (head, job) of jobs whose record a person has damaged.
        decided: (head, job, attempt) → the end that was decided.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = folder or Path(tempfile.mkdtemp(prefix="gpurun-ownership-", dir=base))
        self.root.chmod(0o755)
        self.now_s = START_S
        self.wall_ahead_s = 0.0
        self.numbers = itertools.count()
        self.dice = random.Random(0)
        self.calm = False
        self.machines = {name: Machine(name, world=self) for name in MACHINES}
        self.supervisors: list[Supervisor] = []
        self.history: list[str] = []
        self.violations: list[str] = []
        self.damages: list[files.Damage] = []
        self.excused: set[str] = set()
        self.rewritten: set[tuple[str, str]] = set()
        self.decided: dict[tuple[str, str, int], object] = {}
        self.forged: set[tuple[str, str]] = set()
        self.crash_in = 0
        self.acting: Any = None
        self.interleave: Callable[[], None] = lambda: None
        self._inside = False
        self._parsed: dict[Any, Any] = {}

    # -- its parts

    @property
    def wall_s(self) -> float:
        """The heads' wall clock, which people and time servers set."""
        return self.now_s + self.wall_ahead_s

    def new_clock(self) -> HeadClock:
        """The clock of a process that starts now."""
        return HeadClock(lambda: ClockReading("boot", self.now_s, self.wall_s), is_synchronised=lambda: True)

    def at(self, address: str) -> Machine | None:
        """The machine that an address leads to."""
        name = address.rstrip(".").lower()
        return self.machines.get(BY_ADDRESS.get(name, name))

    def chance(self, share: float) -> bool:
        return not self.calm and self.dice.random() < share

    def note(self, text: str) -> None:
        self.history.append(text)

    def broken(self, text: str) -> None:
        """A promise is broken."""
        self.history.append(f"!!! {text}")
        self.violations.append(text)

    def point(self) -> None:
        """Where a process can be killed."""
        if self.crash_in and not self._inside:
            self.crash_in -= 1
            if not self.crash_in:
                raise Crashed

    def sleep(self, _for_s: float) -> None:
        """Stands for `time.sleep`: time passes because others act."""
        if self.acting is not None:
            self.acting.pause()
        else:
            self.now_s += 1.0

    def between(self) -> None:
        """Let others act between two steps of one operation on a machine."""
        if not self._inside and self.chance(0.15):
            self._inside = True
            kept, euid, dice, crash_in = self.acting, os.geteuid(), self.dice, self.crash_in
            try:
                become(0 if checks.ROOT else euid)
                self.interleave()
            finally:
                self.acting, self.dice, self.crash_in, self._inside = kept, dice, crash_in, False
                become(euid)

    # -- processes

    @contextmanager
    def user(self, uid: int, process: Any = None) -> Iterator[None]:
        """What is done inside is done by this user, in one process; afterwards its descriptors are closed."""
        before = files.descriptors_below(self.root)
        self.acting, others = process, clock._of_process
        clock._of_process = process.clock if process else self.new_clock()
        try:
            become(uid)
            yield
        finally:
            become(0 if checks.ROOT else uid)
            self.acting, clock._of_process = None, others
            self._settle(process, before)

    def _settle(self, process: Any, before: set[files.Opened]) -> None:
        """Close what the process left open, unless it lives on with it."""
        now = files.descriptors_below(self.root)
        mine = ((now - before) | (now & process.descriptors if process else set())) - self._kept_by_others(process)
        if process in self.supervisors:
            process.descriptors = mine
        else:
            for each in mine:
                os.close(each.descriptor)

    def _kept_by_others(self, process: Any) -> set[files.Opened]:
        kept = {files.opened(descriptor) for head in self.heads for descriptor in head.waiters.values()}
        for other in self.supervisors:
            if other is not process:
                kept |= other.descriptors
        return kept

    def kill(self, supervisor: Supervisor) -> None:
        """Its lock is free, its agents end."""
        self.supervisors.remove(supervisor)
        supervisor.kill()
        for agents in supervisor.agents:
            agents.close()
        for each in supervisor.descriptors & files.descriptors_below(self.root):
            os.close(each.descriptor)

    def kill_waiter(self, head: Head, uid: int) -> None:
        os.close(head.waiters.pop(uid))

    def expire_agents(self) -> None:
        """An agent whose supervisor is gone notices it once the network carries again."""
        alive = {agents.ident for one in self.supervisors for agents in one.agents}
        for machine in self.machines.values():
            if machine.up:
                machine.signs = {sign for sign in machine.signs if sign[0] in alive}

    def advance(self, supervisor: Supervisor) -> None:
        """One step of a supervisor, which may be its last."""
        supervisor.busy = True
        try:
            with self.user(supervisor.uid, supervisor):
                try:
                    lives = supervisor.step()
                except Crashed:
                    self.note(f"supervisor {supervisor.name} is killed within a step")
                    lives = False
        finally:
            self.crash_in, supervisor.busy = 0, False
        if not lives and supervisor in self.supervisors:
            self.kill(supervisor)

    def command(self, head: Head, uid: int, what: str, do: Callable[[], object]) -> object:
        """Run a command as a user; an error that people can meet ends it."""
        with self.user(uid):
            try:
                return do()
            except GpurunError as error:
                self.note(f"  {what}: {type(error).__name__}: {error}")
            except Crashed:
                self.note(f"  {what} is killed")
            finally:
                self.crash_in = 0
        return None

    def _popen(self, argv: list[str], *, env: dict[str, str], pass_fds: list[int], **_: Any) -> object:
        """In the place of `subprocess.Popen`: what a process would inherit is kept under another number."""
        head = next(head for head in self.heads if str(head.home) == env["GPURUN_HOME"])
        descriptor = os.dup(pass_fds[0])
        if argv[2] == "gpurun.head.waiter":
            head.waiters[os.geteuid()] = descriptor
        else:
            made = Supervisor(self, head, os.geteuid(), argv[3], descriptor)
            self.supervisors.append(made)
        return SimpleNamespace(pid=0)

    def _agents(self, inventory: Any, hosts: Any) -> Agents:
        made = Agents(self, self.acting.head.name, inventory, hosts)
        self.acting.agents.append(made)
        return made

    def _parse(self, data: bytes, source: Path, *, shown_as: str | None = None) -> Any:
        """The same bytes are parsed once."""
        key = (data, source, shown_as)
        if key not in self._parsed:
            try:
                self._parsed[key] = (PARSE(data, source, shown_as=shown_as), None)
            except GpurunError as error:
                self._parsed[key] = (None, error)
        inventory, error = self._parsed[key]
        if error is not None:
            raise error
        return inventory

    # -- begin and end

    def __enter__(self) -> World:
        self.cluster = files.make_inventories(self.root)
        users = (*MEMBERS,) if checks.ROOT else (os.getuid(),)
        self.heads = [Head("a", self.root / "a", users), Head("b", self.root / "b", (LONER,) if checks.ROOT else users)]
        for head in self.heads:
            if len(head.users) > 1:
                StateDirectory(head.home).make_shared(os.getgid())
            else:
                head.home.mkdir(mode=0o755)
                if checks.ROOT:
                    os.chown(head.home, head.users[0], -1)
            (head.home / "locks.json").write_bytes(stamp_of_locks(self.root))
        self._undo = Replacements()
        environ = {**os.environ, "XDG_CACHE_HOME": str(self.root / "cache")}
        self._undo.replace(os, "environ", environ)
        tokens = random.Random(7)
        replace = self._undo.replace
        replace(subprocess, "Popen", self._popen)
        replace(faults, "point", self.point)
        replace(time, "time", lambda: self.wall_s)
        replace(clock, "_of_process", self.new_clock())
        replace(time, "monotonic", lambda: self.now_s)
        replace(time, "sleep", self.sleep)
        replace(os, "getuid", os.geteuid)
        replace(__import__("secrets"), "token_hex", lambda count=16: tokens.randbytes(count).hex())
        replace(loading, "parse_inventory", self._parse)
        replace(submit, "Engine", lambda _: SimpleNamespace(image=lambda _: SimpleNamespace(id="sha256:1")))
        replace(job, "Links", self._agents)
        replace(stop, "Links", self._agents)
        real_supervisors(self, replace)
        checks.watch_grants(self, replace)
        return self

    def __exit__(self, *_: object) -> None:
        become(0 if checks.ROOT else os.geteuid())
        for supervisor in list(self.supervisors):
            self.kill(supervisor)
        for head in self.heads:
            for uid in list(head.waiters):
                self.kill_waiter(head, uid)
        self._undo.all()
        for head in self.heads:
            append_only(StatePath(head.home) / "audit.jsonl", on=False)  # else it cannot be removed
        shutil.rmtree(self.root)


class Replacements:
    """Attributes that are something else for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def all(self) -> None:
        while self._before:
            setattr(*self._before.pop())


PARSE = loading.parse_inventory
_STAMPS: dict[int, bytes] = {}


def stamp_of_locks(folder: Path) -> bytes:
    """What the check of a file system's locks leaves; it is made once, and not in every episode."""
    device = folder.stat().st_dev
    if device not in _STAMPS:
        filesystem.check_locks(folder)
        _STAMPS[device] = (folder / "locks.json").read_bytes()
    return _STAMPS[device]


def become(uid: int) -> None:
    """Have the effective uid of a user, where this process may."""
    if checks.ROOT and os.geteuid() != uid:
        os.seteuid(0)
        os.seteuid(uid)
