"""Episodes: a number of random steps, then everything is repaired and must end. A seed replays one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import ownership_checks as checks
import ownership_files as files
import ownership_steps as steps
from ownership_steps import Step
from ownership_world import Head, World

from gpurun.head import spawn, waiter
from gpurun.jobs.record import CancelRequest
from gpurun.jobs.store import JobStore
from gpurun.leases.store import LeaseStore

STEPS = 250
ROUNDS = 120
Broken = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Episode:
    """How an episode went.

    Attributes:
        taken: steps until the first broken promise; all of them if there was none.
    """

    violations: tuple[str, ...]
    history: tuple[str, ...]
    taken: int


def run(plan: Sequence[Step], *, broken: Broken = nullcontext, to_the_end: bool = True) -> Episode:
    """Take steps until a promise is broken; if none is, end everything and look again."""
    taken = 0
    with broken(), World() as world:
        for taken, step in enumerate(plan, 1):
            world.note(f"[{taken}] {step.kind}")
            steps.take(world, step)
            if world.violations:
                break
        else:
            if to_the_end:
                end_everything(world)
        return Episode(tuple(world.violations), tuple(world.history), taken)


def end_everything(world: World) -> None:
    """Faults stop, people repair what they damaged and cancel every job: then nothing may be held by anybody."""
    world.note("--- the end")
    _repair_everything(world)
    for _ in range(ROUNDS):
        world.now_s += 70.0
        world.expire_agents()
        for head in world.heads:
            _cancel_everything(world, head)
        _clean_hosts(world)
        for supervisor in list(world.supervisors):
            if supervisor in world.supervisors:
                world.advance(supervisor)
        checks.after_step(world)
        if world.violations:
            return
        if _is_over(world):
            break
    _clean_hosts(world)  # of jobs that have just ended
    checks.at_the_end(world)


def _repair_everything(world: World) -> None:
    world.calm = True
    files.mend_inventories(world.root)
    for machine in world.machines.values():
        machine.up, machine.cut_from = True, set()
    while world.damages:
        steps.repair(world, world.damages.pop())
    for head in world.heads:  # no job stands behind these: `gpurun recover` cannot help
        files.remove(head.home / "leases" / steps.PHANTOM)


def _cancel_everything(world: World, head: Head) -> None:
    for error in LeaseStore(head.home).read_all().damaged:
        steps.throw_away(world, head, Path(error.where or ""))
    for uid in head.users:
        world.command(head, uid, "cancel", lambda uid=uid: _cancel_all(world, head, uid))


def steps_until_caught(broken: Broken, *, seed: int, most: int) -> int | None:
    """Take steps, one episode after the other, until a broken build breaks a promise; None if it does not."""
    taken, number = 0, 0
    while taken < most:
        plan = steps.draw(1_000_000 * seed + number, min(STEPS, most - taken))
        episode = run(plan, broken=broken, to_the_end=False)
        taken, number = taken + episode.taken, number + 1
        if episode.violations:
            return taken
    return None


def _cancel_all(world: World, head: Head, uid: int) -> None:
    store = JobStore(head.home)
    store.sweep(now_s=world.wall_s)
    for job in store.live_ids():
        if steps.owner(head, job) == uid:
            store.get(job).ask_to_cancel(CancelRequest("cancel", "test", world.wall_s))
            spawn.Head(head.home, {}).end_queued(store.get(job), now_s=world.wall_s)
    waiter.Waiter(head.home, {}).resume()


def _clean_hosts(world: World) -> None:
    """Who threw a lease away, both names of it, removes by hand what is left on the hosts."""
    live = {job for head in world.heads for job in JobStore(head.home).live_ids()}
    for machine in world.machines.values():
        for ident, box in list(machine.boxes.items()):
            if box.labels["gpurun.job"] in world.excused - live:
                del machine.boxes[ident]


def _is_over(world: World) -> bool:
    return not world.supervisors and not any(
        JobStore(head.home).live_ids() or checks.leases_of(head.home) for head in world.heads
    )


def shrunk(plan: Sequence[Step], *, broken: Broken = nullcontext, runs: int = 400) -> list[Step]:
    """Fewer steps that still break a promise: ever smaller pieces are left out."""
    episode = run(plan, broken=broken, to_the_end=False)
    to_the_end = not episode.violations  # else what was broken shows before the end
    found, piece = list(plan[: episode.taken]), max(1, len(plan) // 2)
    while runs > 0:
        at, before = 0, len(found)
        while at < len(found) and runs > 0:
            fewer = [*found[:at], *found[at + piece :]]
            runs -= 1
            if run(fewer, broken=broken, to_the_end=to_the_end).violations:
                found = fewer
            else:
                at += piece
        if piece == 1 and len(found) == before:
            break
        piece = max(1, piece // 2)
    return found


def told(seed: int, plan: Sequence[Step], *, broken: Broken = nullcontext) -> str:
    """The history of a failing episode, for people."""
    episode = run(plan, broken=broken)
    return "\n".join((f"seed {seed}, {len(plan)} steps", *episode.history))
