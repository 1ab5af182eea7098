"""One history after the other: the real `life.live` and `watch.watch` on a simulated gang. A seed replays one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import gang_stand_ins as stand_ins
import gang_stop
from gang_checks import JudgedWorld, Stuck
from gang_head import Head
from gang_plan import Plan, draw
from gang_world import Killed

from gpurun.jobs.record import State
from gpurun.state.boot import HeadBoot
from gpurun.supervisor import health, life, stop, watch
from gpurun.supervisor import stop as cordoning
from gpurun.supervisor.outputs import outputs
from gpurun.supervisor.verdict.ends import Reached

END_OF_TIME_S = 8000.0
MOST_ATTEMPTS = 12
MOST_WAIT_S = 1000.0
Broken = Callable[[], AbstractContextManager[object]]


class Episode(NamedTuple):
    """How a history went. `ends`: the outcome of each attempt."""

    violations: tuple[str, ...]
    history: tuple[str, ...]
    ends: tuple[tuple[int, State], ...]


class _Clock:
    """Stands for `time` in the modules under test: the clock of the history that runs."""

    world: JudgedWorld

    def monotonic(self) -> float:
        return self.world.now_s

    def sleep(self, for_s: float) -> None:
        self.world.sleep(for_s)


CLOCK = _Clock()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def simulated() -> Iterator[None]:
    """The real life of a job, with the simulation's eyes, hands and clock."""
    real_stopping = life._stopping

    def stopping(job: Head, end: Any) -> State:
        job.world.judge(end)
        return real_stopping(job, end)

    steps = MappingProxyType({State.RUNNING: life.watch, State.STOPPING: life.stop})
    nothing = SimpleNamespace(sync_file=lambda _: None, sync_folder=lambda _: None)
    with ExitStack() as stack:
        for context in (
            replaced(
                watch, time=CLOCK, Watchers=stand_ins.Watchers, HangWatch=stand_ins.HangWatch,
                HealthWatch=stand_ins.HealthWatch, CheckpointWatch=stand_ins.Idle, Members=stand_ins.Members,
                OutputsWatch=stand_ins.Idle, StarterWatch=stand_ins.Idle, MeetingWatch=stand_ins.Idle,
                SlowWatch=stand_ins.Idle,
                _others_answer=stand_ins.others_answer,
                last_lines=lambda *_, **__: CLOCK.world.head.log_copy.lines,
            ),
            replaced(health, time=CLOCK),
            replaced(
                stop, furthest=lambda _: Reached(), new_checkpoint=lambda *_: CLOCK.world.checkpoint_written(),
                time=CLOCK, durable=nothing, AllocatorLock=gang_stop.AllocatorLock, finish=gang_stop.finish,
            ),
            replaced(cordoning, Cordons=gang_stop.Cordons),
            replaced(outputs, list_outputs=gang_stop.list_outputs, time=CLOCK),
            replaced(
                life, time=CLOCK, durable=nothing, STEPS=steps, _stopping=stopping, furthest=lambda _: Reached()
            ),
        ):  # fmt: skip
            stack.enter_context(context)
        yield


def run(plan: Plan) -> Episode:
    """One history, to its end. Within `simulated`."""
    world = CLOCK.world = JudgedWorld(plan)
    world.note(f"history {plan.seed}: {plan}")
    attempts = 0
    while not world.record.state.ended and not world.violations and world.now_s < END_OF_TIME_S:
        if world.record.state is State.QUEUED:
            attempts += 1
            if attempts > MOST_ATTEMPTS:
                break
            _wait(world)
            world.begin()
        _supervise(world)
    if not world.violations:
        world.at_the_end()
    return Episode(tuple(world.violations), tuple(world.history), tuple(world.ends))


def _wait(world: JudgedWorld) -> None:
    """The job is queued until a pass may start it. The head's clock may be set meanwhile."""
    step_s = next((event.value for event in world.plan.events if event.kind == "clock"), 0.0)
    due_s = world.now_s + 1.0
    while not _may_start(world) or world.now_s < due_s:
        world.sleep(1.0)
        if step_s and world.chance("clock while it waits") < 0.3:
            world.wall_ahead_s, step_s = world.wall_ahead_s + step_s, 0.0
        if world.now_s > due_s + MOST_WAIT_S:
            world.broken("the job waits for its start for longer than it may")
            return


def _may_start(world: JudgedWorld) -> bool:
    restart = world.record.on(HeadBoot("boot", world.wall_ahead_s)).restart
    return restart is None or restart.is_due(world.wall_s)


def _supervise(world: JudgedWorld) -> None:
    """A supervisor carries the job until its attempt is over or it is killed; then another adopts it."""
    world.head = head = Head(world)
    world.disturb()
    try:
        life.live(head)
        world.head = None
    except Stuck:
        world.head = None
    except Killed as killed:
        world.note("the supervisor is killed")
        world.sleep(float(killed.args[0]))
        world.note("a command adopts the job")


def shrunk(plan: Plan) -> Plan:
    """Fewer events that still break a promise: they are left out one by one."""
    at = 0
    while at < len(plan.events):
        fewer = plan._replace(events=(*plan.events[:at], *plan.events[at + 1 :]))
        if run(fewer).violations:
            plan = fewer
        else:
            at += 1
    return plan


def told(plan: Plan) -> str:
    """A history for people. Indented lines are events of the plan."""
    events = "\n".join(f"    {event}" for event in plan.events)
    return "\n".join((f"seed {plan.seed}, shrunk to {len(plan.events)} events:", events, *run(plan).history))


def caught_after(broken: Broken, *, first: int, most: int) -> int | None:
    """How many histories it takes until a broken build breaks a promise; None if it does not."""
    with simulated(), broken():
        for number in range(most):
            if run(draw(first + number)).violations:
                return number + 1
    return None
