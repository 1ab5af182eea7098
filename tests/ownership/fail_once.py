"""A call of one process fails once, and the process lives on: in the ownership world, for each call in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ownership_checks as checks
import ownership_files as files
from greenlet import getcurrent, greenlet
from ownership_world import Head, World
from simulated_supervisor import Crashed

from gpurun.cli.printing import disk_problem, shortage
from gpurun.errors import GpurunError
from gpurun.failing import Calls
from gpurun.head import spawn, waiter
from gpurun.head.spawn import cancel
from gpurun.head.submit import submit_jobs
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec, Retry
from gpurun.jobs.store import JobStore
from gpurun.state.hosts import Cordon, Cordons

ROUNDS = 400
MOST_CALLS = 1_000_000
SPECS = (
    JobSpec(name="n", image="i", gpus=4, command=("true",), max_restarts=3, retry=Retry(1)),
    JobSpec(name="n", image="i", gpus=2, command=("true",), max_restarts=3),
)


@dataclass(frozen=True)
class Outcome:
    """How a run went. `failed`: the call that failed; "" if the process made fewer calls, by `left`."""

    failed: str
    left: int
    violations: tuple[str, ...]
    history: tuple[str, ...]


class Waiter:
    """A waiter as a process that pauses wherever others can act; it is among the world's supervisors."""

    job = None
    wish = ""

    def __init__(self, world: World, head: Head, uid: int) -> None:
        self.world, self.head, self.uid, self.name = world, head, uid, "waiter"
        self.descriptor = head.waiters.pop(uid)
        self.descriptors = {files.opened(self.descriptor)}
        self.agents: list[Any] = []
        self.clock = world.new_clock()
        self.busy = self._is_killed = False
        self._work = greenlet(self._main)

    def step(self) -> bool:
        self._work.parent = getcurrent()
        self._work.switch()
        return not self._work.dead

    def pause(self) -> None:
        if self._is_killed:
            raise Crashed
        if getcurrent() is self._work:
            self._work.parent.switch()

    def kill(self) -> None:
        self._is_killed = True
        if self._work and getcurrent() is not self._work:
            self._work.parent = getcurrent()
            with suppress(Crashed):
                self._work.throw(Crashed)

    def _main(self, *_: object) -> None:
        try:
            waiter.Waiter(self.head.home, {}).hold(self.descriptor)
        except Exception as error:  # noqa: BLE001 (whatever ends it)
            self.world.broken(f"the waiter ends: {error!r}")


def calls_of(role: str) -> int:
    """Return how many calls the first process of a role makes if none fails."""
    return MOST_CALLS - run(role, MOST_CALLS).left


def caught(role: str, place: str) -> bool:
    """Return whether some run breaks a promise in which a call fails that the function `place` makes."""
    seen: list[str] = []
    run(role, MOST_CALLS, seen.append)
    return any(run(role, number).violations for number, at in enumerate(seen, 1) if place in at)


def run(role: str, number: int, on_call: Callable[[str], object] | None = None) -> Outcome:
    """Let the `number`-th call of the first process of a role fail, then let everything come to its end.

    Args:
        role: ``waiter``, ``supervisor``, or a command of `COMMANDS`.
        on_call: gets the place of each call.
    """
    with World() as world:
        world.calm = True
        head = world.heads[0]
        uid = head.users[0]
        calls = Calls(head.home, number, on_call)
        calls.counts = False
        with calls.installed():
            run_ = Run(world, head, uid, calls, role)
            run_.begin()
            run_.come_to_the_end()
        return Outcome(calls.failed, calls.left, tuple(world.violations), tuple(world.history))


class Run:
    """One run. Its methods are the commands, too."""

    def __init__(self, world: World, head: Head, uid: int, calls: Calls, role: str) -> None:
        self.world, self.head, self.uid, self.calls, self.role = world, head, uid, calls, role
        self.target: object = None

    def begin(self) -> None:
        if self.role == "submit":
            self._fail("submit")
            return
        self._do("queue", self._queue)
        if self.role not in ("recover", "drain"):
            self._do("ensure", lambda: spawn.Head(self.head.home, {}).ensure_waiter())
        if self.role in COMMANDS:
            self._fail(self.role)

    def _do(self, what: str, do: Callable[[], object]) -> None:
        self.world.command(self.head, self.uid, what, do)

    def _queue(self) -> None:
        JobStore(self.head.home).create_many(SPECS, inventory=Path(self._inventory.source), now_s=self.world.now_s)

    @property
    def _inventory(self) -> Any:
        return load_inventory(self.world.root / "cluster" / "inventory.yaml")

    def _fail(self, name: str) -> None:
        """Run a command in which a call fails. If it says so, a person types the next command."""
        problems: list[Exception] = []

        def counted() -> None:
            self.calls.counts = True
            try:
                COMMANDS[name](self)
            except GpurunError as error:
                problems.append(error)
            except OSError as error:
                problems.append(error)
                if disk_problem(error) is None and shortage(error) is None:
                    self.world.broken(f"{name} ends with a traceback: {error!r}")
            finally:
                self.calls.counts = False

        self._do(name, counted)
        for problem in problems:
            self.world.note(f"  {name}: {problem}")
        if problems:
            self._do("resume", lambda: waiter.Waiter(self.head.home, {}).resume())

    def submit(self) -> None:
        submit_jobs(SPECS, self._inventory, self.head.home, {})

    def recover(self) -> None:
        waiter.Waiter(self.head.home, {}).resume()

    def cancel(self) -> None:
        first = JobStore(self.head.home).get(min(JobStore(self.head.home).live_ids()))
        cancel(first, by="test", reason="", environ={})

    def drain(self) -> None:
        with Cordons(self.head.home).changing() as cordons:
            cordons["m1"] = Cordon("draining", "test", self.world.now_s, "why not")
        spawn.Head(self.head.home, {}).run_pass(now_s=self.world.now_s)
        spawn.Head(self.head.home, {}).ensure_waiter()

    def come_to_the_end(self) -> None:
        world = self.world
        for _ in range(ROUNDS):
            world.now_s += 1.0
            self._adopt_waiters()
            for one in list(world.supervisors):
                self._advance(one)
            checks.after_step(world)
            if world.violations or self._is_over():
                break
        for job in JobStore(self.head.home).ids():
            record = JobStore(self.head.home).get(job).record()
            wanted = (State.SUCCEEDED, State.CANCELLED) if self.role == "cancel" else (State.SUCCEEDED,)
            if record.state not in wanted or record.restarts:
                world.broken(f"{job} is {record.state.value}: {record.reason}; restarts {record.restarts}")
        world.expire_agents()
        self._do("resume", lambda: waiter.Waiter(self.head.home, {}).resume())  # removes marks of jobs that have ended
        checks.at_the_end(world)

    def _adopt_waiters(self) -> None:
        for uid in list(self.head.waiters):
            self.world.supervisors.append(Waiter(self.world, self.head, uid))

    def _advance(self, one: Any) -> None:
        if one not in self.world.supervisors:
            return
        is_waiter = isinstance(one, Waiter)
        if self.target is None and self.role == ("waiter" if is_waiter else "supervisor"):
            self.target = one
        if one.job is not None and one.job.record.state is State.RUNNING:
            one.wish = "end"
        self.calls.counts = one is self.target
        try:
            self.world.advance(one)
        finally:
            self.calls.counts = False

    def _is_over(self) -> bool:
        return not self.world.supervisors and not self.head.waiters and not JobStore(self.head.home).live_ids()


COMMANDS: dict[str, Callable[[Run], object]] = {
    "submit": Run.submit, "recover": Run.recover, "cancel": Run.cancel, "drain": Run.drain,
}  # fmt: skip
