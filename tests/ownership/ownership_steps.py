"""What can happen in one step. Each step draws its choices from its own seed, so that steps can be left out."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any
from unittest import mock

import ownership_checks as checks
import ownership_files as files
from ownership_world import Head, World

from gpurun.cli import recover as recover_command
from gpurun.errors import GpurunError
from gpurun.head import spawn, waiter
from gpurun.head.submit import submit_jobs
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Constraints, Grant, JobSpec, Retry
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease
from gpurun.leases.look import look
from gpurun.leases.occupancy import View
from gpurun.leases.store import LeaseStore
from gpurun.state import durable
from gpurun.state.hosts import Cordon, Cordons

Act = Callable[[World, random.Random], None]
ACTS: dict[str, tuple[int, Act]] = {}
MOST_CALLS = 20
"""How many hosts a supervisor may ask in one step."""
PHANTOM = "j-deadbeef.json"
"""The lease of a job that never was."""
ODD_LABELS = ({}, {"gpurun.job": "x\n"}, {"gpurun.claim": "1", "gpurun.state": "?"})


@dataclass(frozen=True)
class Step:
    """One step of an episode."""

    kind: str
    seed: int


def act(weight: int) -> Callable[[Act], Act]:
    def keep(function: Act) -> Act:
        ACTS[function.__name__] = (weight, function)
        return function

    return keep


def draw(seed: int, count: int) -> list[Step]:
    """The steps of an episode."""
    dice = random.Random(seed)
    kinds = dice.choices(list(ACTS), [weight for weight, _ in ACTS.values()], k=count)
    return [Step(kind, dice.randrange(1 << 30)) for kind in kinds]


def take(world: World, step: Step) -> None:
    """Take one step, then see whether everything still holds."""
    dice = random.Random(step.seed)
    world.dice = random.Random(step.seed + 1)
    world.interleave = lambda: advance(world, world.dice)
    world.now_s += 1.0
    ACTS[step.kind][1](world, dice)
    checks.after_step(world)


# -- what people and processes do


@act(130)
def advance(world: World, dice: random.Random) -> None:
    """A supervisor goes on."""
    free = [one for one in world.supervisors if one is not world.acting and not one.busy]
    if free:
        one = dice.choice(free)
        for _ in range(dice.randint(1, MOST_CALLS)):
            if one in world.supervisors:
                world.advance(one)


@act(14)
def submit(world: World, dice: random.Random) -> None:
    head, uid = someone(world, dice)
    if len(JobStore(head.home).live_ids()) > 7:
        return
    spec, spelled = wanted(world, dice)
    world.note(f"{uid}@{head.name} submits {spec.gpus} GPUs{' elastic' if spec.min_gpus else ''} on {spelled}")

    def do() -> None:
        maybe_crash(world, dice, 30)
        done = submit_jobs([spec], load_inventory(spelled), head.home, {})
        (folder,) = done.folders
        world.note(f"  {folder.id} is {folder.record().state.value}")
        if done.problem is not None:
            raise done.problem

    world.command(head, uid, "submit", do)


@act(9)
def rush(world: World, dice: random.Random) -> None:
    """Several jobs wait, on several inventories, when a pass comes."""
    head, uid = someone(world, dice)
    if len(JobStore(head.home).live_ids()) > 6:
        return

    def do() -> None:
        for _ in range(4):
            spec, spelled = wanted(world, dice)
            folder = JobStore(head.home).create(
                spec, inventory=Path(load_inventory(spelled).source), now_s=world.wall_s
            )
            world.note(f"{uid}@{head.name} queues {folder.id}: {spec.gpus} GPUs on {spelled}")
        spawn.Head(head.home, {}).run_pass(now_s=world.wall_s)

    world.command(head, uid, "rush", do)


def wanted(world: World, dice: random.Random) -> tuple[JobSpec, Path]:
    """What somebody wants, and how that person calls the inventory."""
    gpus = dice.choice((1, 1, 2, 2, 3, 4, 4, 6))
    spelled = world.root / dice.choice(files.SPELLINGS)
    spec = JobSpec(
        name="n", image="i", gpus=gpus, command=("true",), max_restarts=3, priority=dice.choice((0, 0, 0, 5)),
        min_gpus=dice.choice((None, None, 1)), preemptible=dice.random() < 0.4,
        pool=dice.choice((None, None, "p", "q")) if "inventory" in str(spelled) or "link" in str(spelled) else None,
        constraints=Constraints(locality=dice.choice(("any", "any", "rack"))),
        retry=Retry(3, only_with_progress=False, wait_s=30.0) if gpus in (1, 4) else None,
    )  # fmt: skip
    return spec, spelled


@act(14)
def waiter_looks(world: World, dice: random.Random) -> None:
    """A waiter adopts, runs a pass, and ends when nothing is queued."""
    heads = [(head, uid) for head in world.heads for uid in head.waiters]
    if not heads:
        return
    head, uid = dice.choice(heads)
    lives = True

    def do() -> None:
        nonlocal lives
        lives = False
        maybe_crash(world, dice, 20)
        if not waiter.Waiter(head.home).is_needed(uid):
            return
        try:
            spawn.Head(head.home, {}).adopt_orphans()
            spawn.Head(head.home, {}).run_pass(now_s=world.wall_s)
        except GpurunError as error:
            world.note(f"  waiter {uid}@{head.name}: {error}")
        lives = True

    world.command(head, uid, "waiter", do)
    if not lives:
        world.kill_waiter(head, uid)


@act(5)
def gang_ends(world: World, dice: random.Random) -> None:
    wish(world, dice, ("end", "end", "fail"))


@act(6)
def gang_changes(world: World, dice: random.Random) -> None:
    wish(world, dice, ("grow", "grow", "lose"))


def wish(world: World, dice: random.Random, wishes: tuple[str, ...]) -> None:
    running = [one for one in world.supervisors if one.job and one.job.record.state is State.RUNNING]
    if running:
        one = dice.choice(running)
        one.wish = dice.choice(wishes)
        world.note(f"{one.name} shall {one.wish}")


@act(4)
def cancel(world: World, dice: random.Random) -> None:
    head, uid = someone(world, dice)
    store = JobStore(head.home)
    mine = [job for job in store.live_ids() if owner(head, job) == uid]
    if not mine:
        return
    job = dice.choice(mine)
    world.note(f"{uid}@{head.name} cancels {job}")

    def do() -> None:
        maybe_crash(world, dice, 12)
        store.get(job).ask_to_cancel(CancelRequest("cancel", "test", world.wall_s))
        spawn.Head(head.home, {}).end_queued(store.get(job), now_s=world.wall_s)

    world.command(head, uid, "cancel", do)


@act(6)
def recover(world: World, dice: random.Random) -> None:
    head, uid = someone(world, dice)
    world.note(f"{uid}@{head.name} recovers")

    def do() -> None:
        maybe_crash(world, dice, 20)
        world.note(f"  adopted {waiter.Waiter(head.home, {}).resume()}")

    world.command(head, uid, "recover", do)


@act(3)
def ask_why(world: World, dice: random.Random) -> None:
    head, uid = someone(world, dice)
    world.command(
        head,
        uid,
        "why",
        lambda: checks.explained(world, head, Allocator(head.home).run_pass(now_s=world.wall_s, commit=False)),
    )


@act(7)
def a_pass_decides_wrongly(world: World, dice: random.Random) -> None:
    """A defect of the scheduler's: it does not see what lost gangs, and gangs of other inventories, hold."""
    head, uid = someone(world, dice)
    world.note(f"{uid}@{head.name} runs a pass that does not see what is taken")
    seen = View.snapshot
    with mock.patch.object(View, "snapshot", lambda *args: changed(seen(*args), taken={})):
        world.command(head, uid, "pass", lambda: spawn.Head(head.home, {}).run_pass(now_s=world.wall_s))


@act(6)
def time_passes(world: World, dice: random.Random) -> None:
    world.now_s += dice.choice((5.0, 20.0, 70.0, 400.0))
    world.expire_agents()


@act(3)
def the_wall_clock_is_set(world: World, dice: random.Random) -> None:
    """By a person, or by a time server. Processes that live on have not asked for the time since they began."""
    world.wall_ahead_s += dice.choice((-1, 1)) * dice.choice((1.0, 3600.0, 25 * 3600.0, 3652 * 86400.0))
    world.note(f"the wall clock is {world.wall_ahead_s:+.0f} s ahead")


@act(3)
def cordon(world: World, dice: random.Random) -> None:
    head, uid = someone(world, dice)

    def do() -> None:
        with Cordons(head.home).changing() as cordons:
            host = dice.choice([*cordons, *cordons, "m1", "m2", "m3", "m4", "m5", "x1"])
            if cordons.pop(host, None) is None:
                ends = dice.choice((None, world.wall_s + 60.0))
                drained = Cordon("draining", "test", world.wall_s, "why not", until_s=ends)
                cordons[host] = dice.choice((Cordon("cordoned", "test", world.wall_s, "why not"), drained))

    world.command(head, uid, "cordon", do)


# -- what breaks


@act(4)
def supervisor_killed(world: World, dice: random.Random) -> None:
    free = [one for one in world.supervisors if not one.busy]
    if free:
        one = dice.choice(free)
        world.note(f"supervisor {one.name} is killed")
        world.kill(one)


@act(4)
def supervisor_killed_within_a_step(world: World, dice: random.Random) -> None:
    world.crash_in = dice.randint(1, 12)
    advance(world, dice)
    world.crash_in = 0


@act(1)
def waiter_killed(world: World, dice: random.Random) -> None:
    for head in world.heads:
        for uid in list(head.waiters):
            if dice.random() < 0.5:
                world.kill_waiter(head, uid)


@act(5)
def network(world: World, dice: random.Random) -> None:
    machine = world.machines[dice.choice(list(world.machines))]
    match dice.randrange(5):
        case 0:
            machine.cut_from = {dice.choice("ab")}
        case 1:
            machine.up = False
        case 2:
            machine.reboot()
            machine.up = True
        case _:
            for one in world.machines.values():
                one.cut_from, one.up = set(), True
    world.note(f"{machine.name}: up={machine.up}, cut from {sorted(machine.cut_from)}")


@act(2)
def claim_damaged(world: World, dice: random.Random) -> None:
    """A person prunes volumes, writes labels, or removes a container."""
    machine = world.machines[dice.choice(list(world.machines))]
    what = dice.randrange(4)
    if what == 0:
        machine.volumes.clear()
    elif what == 1 and machine.volumes:
        machine.volumes[dice.choice(sorted(machine.volumes))] = dict(dice.choice(ODD_LABELS))
    elif what == 2 and machine.boxes:
        del machine.boxes[dice.choice(sorted(machine.boxes))]
    elif what == 3:
        machine.volumes.setdefault(f"gpurun-gpu-{machine.uuid(0)}", {"gpurun.job": "j-0000ffff"})
    world.note(f"{machine.name}: claims or containers are changed by hand ({what})")


@act(8)
def inventory_edited(world: World, dice: random.Random) -> None:
    world.note(files.edit_inventory(world.root, dice))


@act(6)
def hosts_change_places(world: World, dice: random.Random) -> None:
    """The hosts of the inventory that most people use get each other's addresses, or their own again."""
    path = world.root / "cluster" / "inventory.yaml"
    if path.is_file() and not path.is_symlink():
        what = dice.choice(("shifted", "m1 and m3 swap", "none"))
        files.replace(path, files.EDITS[what](files.PLAIN).encode())
        world.note(f"inventory.yaml: {what}")


@act(4)
def inventory_repaired(world: World, dice: random.Random) -> None:
    files.reset_inventories(world.root)
    world.note("the inventories are what they were")


@act(5)
def file_damaged(world: World, dice: random.Random) -> None:
    """Somebody damages a file of their own."""
    head, uid = someone(world, dice)
    path = victim(head, uid, dice)
    if path is not None:
        damaged(world, uid, path, lambda: files.damage(path, dice))


def damaged(world: World, uid: int, path: Path, do: Callable[[], files.Damage]) -> None:
    with world.user(uid):
        found = do()
    found.uid = uid
    for earlier in [one for one in world.damages if one.path == path and one.after == found.before]:
        found.before = earlier.before
        world.damages.remove(earlier)
    world.damages.append(found)
    world.note(f"{path.relative_to(world.root)}: {found.how}")
    job = path.parent.name if path.parent.name.startswith("j-") else path.name[:10]
    lost = ".lost" in path.name
    for head in world.heads:
        if head.home in path.parents and job.startswith("j-") and not checks.is_leased(head.home, job, lost=lost):
            world.excused.add(job)
        if head.home in path.parents and path.name == "state.json":
            world.rewritten.add((head.name, job))


@act(3)
def lease_removed(world: World, dice: random.Random) -> None:
    """A person removes a lease file, its second name, or both."""
    head, uid = someone(world, dice)
    leases = [path for path in listed(head.home / "leases") if path.lstat().st_uid in (uid, os.geteuid())]
    if not leases:
        return
    path = dice.choice(leases)
    job, uid = path.name[:10], path.lstat().st_uid
    names = dice.choice(([path], [path], [second(head, job)], [path, second(head, job)]))
    for one in names:
        if os.path.lexists(one):
            damaged(world, uid, one, lambda one=one: removal(one))
    if ".lost" in path.name:
        world.excused.add(job)


@act(2)
def lease_forged(world: World, dice: random.Random) -> None:
    """A person copies a lease under another name, changes its GPUs, or invents one."""
    head, uid = someone(world, dice)
    leases = checks.leases_of(head.home)
    mine = [
        name
        for name, lease in leases.items()
        if lease.owner_uid == uid and (head.home / "leases" / f"{name}.json").is_file()
    ]
    if not mine:
        return
    name = dice.choice(mine)
    path, lease = head.home / "leases" / f"{name}.json", leases[name]
    what = dice.choice(("copy", "copy of its own job", "other GPUs", "other GPUs in place", "phantom", "same again"))
    target, forged = path, lease
    if what == "copy":
        target = path.with_name(f"j-{dice.randrange(1 << 32):08x}.json")
    elif what == "copy of its own job":
        target = path.with_name(f"{lease.job}.{lease.attempt}.lost.json")
        forged = changed(lease, lost=dice.random() < 0.5)
    elif what == "phantom":
        target = path.with_name(PHANTOM)
        forged = changed(lease, job="j-deadbeef", lost=False)
    elif what.startswith("other"):
        grants = tuple(Grant(grant.host, (dice.randrange(2),)) for grant in lease.grants)
        forged = changed(lease, grants=grants)
    if target != path and os.path.lexists(target):
        return

    def do() -> files.Damage:
        before = files.content(target)
        if what.endswith("in place"):
            target.write_bytes(encoded(forged))
        else:
            files.replace(target, encoded(forged))
        return files.Damage(target, before, files.content(target), f"forged: {what} of {name}")

    damaged(world, uid, target, do)
    world.forged.add((head.name, target.name.removesuffix(".json")))
    if what != "same again":
        world.excused.add(lease.job)
    see_that_it_is_reported(world, head, uid)


def see_that_it_is_reported(world: World, head: Head, uid: int) -> None:
    """Where leases overlap now, whoever looks is told."""
    problems: list[Any] = []
    world.command(
        head, uid, "look", lambda: look(head.home, now_s=world.wall_s, on_problem=problems.append, despite_damage=True)
    )
    holders: dict[Any, Any] = {}
    for lease in checks.leases_of(head.home).values():
        for gpu in checks.gpus_of(lease):
            other = holders.setdefault(gpu, lease)
            if other.job != lease.job and not any(re.search(f"{other.job}|{lease.job}", str(one)) for one in problems):
                world.broken(f"{gpu} is in two leases, and nobody is told")


@act(3)
def something_repaired(world: World, dice: random.Random) -> None:
    if world.damages:
        repair(world, world.damages.pop(dice.randrange(len(world.damages))))


def repair(world: World, damage: files.Damage) -> None:
    if is_worth_a_repair(world, damage) and damage.repair():
        name = damage.path.name.removesuffix(".json")
        world.forged -= {(head.name, name) for head in world.heads if head.home in damage.path.parents}
        world.note(f"{damage.path.relative_to(world.root)} is repaired")


def is_worth_a_repair(world: World, damage: files.Damage) -> bool:
    """Nobody puts a lease back that is over, or whose GPUs others have by now."""
    if damage.before is None or not damage.path.name.startswith(("j-", "lease.json")):
        return True
    (head,) = (head for head in world.heads if head.home in damage.path.parents)
    job = damage.path.parent.name if damage.path.name == "lease.json" else damage.path.name[:10]
    lease, record = checks.decoded(damage.before, Lease), checks.record_of(head.home, job)
    if lease is None or record is None or record.attempt != lease.attempt or not record.state.holds_gpus or lease.lost:
        return False
    others = [one for one in checks.leases_of(head.home).values() if one.job != job]
    return set(checks.gpus_of(lease)).isdisjoint(gpu for other in others for gpu in checks.gpus_of(other))


@act(2)
def discard(world: World, dice: random.Random) -> None:
    """A person looks at the hosts, removes what runs there, and discards a damaged lease."""
    head, _ = someone(world, dice)
    damaged_now = LeaseStore(head.home).read_all().damaged
    if damaged_now:
        throw_away(world, head, Path(dice.choice(damaged_now).where or ""))


def throw_away(world: World, head: Head, path: Path) -> None:
    job = path.name[:10]
    for one in [one for one in world.supervisors if one.head is head and one.name.startswith(job) and not one.busy]:
        world.kill(one)
    for machine in world.machines.values():
        machine.boxes = {ident: box for ident, box in machine.boxes.items() if box.labels["gpurun.job"] != job}
    world.excused.add(job)
    world.note(f"{path.name} is discarded")
    admin = 0 if checks.ROOT else os.geteuid()
    world.command(head, admin, "discard", lambda: recover_command._discard(head.home, path.name))


# -- how


def someone(world: World, dice: random.Random) -> tuple[Head, int]:
    head = dice.choice(world.heads)
    return head, dice.choice(head.users)


def owner(head: Head, job: str) -> int | None:
    try:
        return (head.home / "jobs" / job).lstat().st_uid
    except FileNotFoundError:
        return None


def maybe_crash(world: World, dice: random.Random, most: int) -> None:
    if not world.calm and dice.random() < 0.15:
        world.crash_in = dice.randint(1, most)


def victim(head: Head, uid: int, dice: random.Random) -> Path | None:
    """A file that this user can damage."""
    jobs = [job for job in JobStore(head.home).live_ids() if owner(head, job) == uid]
    choices: list[Path] = []
    for job in jobs:
        folder = head.home / "jobs" / job
        choices += [folder / name for name in ("state.json", "spec.json", "cancel.json", "preempt.json", "lease.json")]
    choices += [path for path in listed(head.home / "leases") if path.lstat().st_uid == uid]
    if dice.random() < 0.2:
        choices = [Cordons(head.home).file().plain]
        if len(head.users) == 1 or not checks.ROOT:
            choices.append(head.home / "identity.json")
    return dice.choice(choices) if choices else None


def listed(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")] if folder.is_dir() else []


def second(head: Head, job: str) -> Path:
    return head.home / "jobs" / job / "lease.json"


def removal(path: Path) -> files.Damage:
    before = files.content(path)
    files.remove(path)
    return files.Damage(path, before, None, "removed")


def encoded(lease: Any) -> bytes:
    return durable._encoded(Path("x"), lease)
