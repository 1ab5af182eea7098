"""What must hold after every step, judged from the files and the machines, not from the functions under test."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import ownership_files as files

from gpurun.jobs.record import JobRecord, State
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseStore
from gpurun.node.claim_rules import Claimant
from gpurun.node.job import claims
from gpurun.state.clock import HeadClock
from gpurun.state.sharing import Identity

ROOT = os.geteuid() == 0
"""Only root can act as several users."""
Gpu = tuple[str, int]
"""Machine, as the lease knows it, and index."""
AUDITOR = Claimant("j-0000a0d1", 1, "a" * 16, "auditor", 0, "nowhere")


def gpus_of(lease: Lease) -> list[Gpu]:
    return [(lease.machines.get(grant.host, f"{grant.host}:22"), gpu) for grant in lease.grants for gpu in grant.gpus]


def leases_of(home: Path) -> dict[str, Lease]:
    """Every lease that must count: each readable file, and each one that still has its second name."""
    found, folder = {}, f"{home}/leases"
    files_there = _names(folder)
    for name in files_there:
        lease = _decoded(f"{folder}/{name}", Lease)
        if lease is not None and name in (f"{lease.name}.json", f"{lease.job}.json"):
            found[name.removesuffix(".json")] = lease
    for job in _names(f"{home}/live"):
        lease = None if f"{job}.json" in files_there else _by_second_name(f"{home}/jobs/{job}", job)
        if lease is not None:
            found[job] = lease
    return found


def is_leased(home: Path, job: str, *, lost: bool) -> bool:
    """Whether anything still says which GPUs a job has now, or which it could not be fenced on."""
    return any(lease.job == job and lease.lost == lost for lease in leases_of(home).values())


def _by_second_name(folder: str, job: str) -> Lease | None:
    """The second name counts while the job is not known to be over or back in the queue."""
    lease = _decoded(f"{folder}/lease.json", Lease)
    if lease is None or lease.job != job or lease.lost:
        return None
    record = _decoded(f"{folder}/state.json", JobRecord)
    return lease if record is None or record.state.holds_gpus else None


def record_of(home: Path, job: str) -> JobRecord | None:
    return _decoded(f"{home}/jobs/{job}/state.json", JobRecord)


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def _decoded(path: str, kind: Any) -> Any:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return decoded(os.read(descriptor, 1 << 20), kind)
    except OSError:  # a folder
        return None
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def watch_grants(world: Any, replace: Callable[[Any, str, Any], None]) -> None:
    """Judge every grant and every growth in the moment in which it succeeds."""
    for name in ("grant", "grow"):
        replace(LeaseStore, name, _judged(world, LeaseStore.__dict__[name], lease_at=0 if name == "grant" else 1))


def _judged(world: Any, real: Any, lease_at: int) -> Any:
    def judged(store: LeaseStore, *arguments: Any) -> Any:
        lease: Lease = arguments[lease_at]
        home = store.folder.home
        before = leases_of(home)
        kept = set() if lease.lost else _refused(home, lease, world.new_clock())  # a lost lease only fences
        result = real(store, *arguments)
        _judge(world, home, lease, before, kept)
        return result

    return judged


def _judge(world: Any, home: Path, lease: Lease, before: Mapping[str, Lease], refused: set[tuple[str, int]]) -> None:
    mine, others = before.get(lease.name), {name: one for name, one in before.items() if name != lease.name}
    wanted = gpus_of(lease)
    new = set(wanted).difference(gpus_of(mine) if mine is not None else ())  # a person may copy what a gang has
    for gpu, count in Counter(wanted).items():
        if count > 1:
            world.broken(f"{lease.name} was granted {gpu} {count} times")
    for name, other in others.items():
        if both := new.intersection(gpus_of(other)):
            world.broken(f"{lease.name} was granted {sorted(both)}, which {name} holds")
    if hit := refused & {(grant.host, gpu) for grant in lease.grants for gpu in grant.gpus}:
        world.broken(f"{lease.name} was granted {sorted(hit)}, which a host refused to this user a moment ago")
    _judge_pool(world, home, lease, others)


def _refused(home: Path, lease: Lease, clock: HeadClock) -> set[tuple[str, int]]:
    """The GPUs that hosts refused to queued jobs of the lease's owner, as long as that counts."""
    found = set()
    for job in _names(f"{home}/live"):
        record = record_of(home, job)
        if record is None or record.owner_uid != lease.owner_uid or record.state.value != "QUEUED":
            continue
        if (
            os.path.realpath(record.inventory) == lease.inventory
            and (home / "jobs" / job).stat().st_uid == record.owner_uid
        ):
            for refusal in record.on(clock.boot).refusals:
                if 0.0 < refusal.until_s - clock() <= 60.0:
                    found |= {(refusal.host, gpu) for gpu in refusal.holder.gpus}
    return found


LIMITS = {"p": 4, "q": 6}


def _judge_pool(world: Any, home: Path, lease: Lease, before: Mapping[str, Lease]) -> None:
    """A pool's limit holds for all who use one inventory file, whatever they call it."""
    if lease.lost or not lease.inventory.startswith(f"{world.root}/cluster/"):
        return
    if files.content(Path(lease.inventory)) != files.PLAIN.encode():
        return
    record = record_of(home, lease.job)
    pool = record.pool if record is not None else None
    if pool is None:
        return
    used = len(gpus_of(lease))
    for other in before.values():
        theirs = record_of(home, other.job)
        if not other.lost and os.path.realpath(other.inventory) == os.path.realpath(lease.inventory):
            used += len(gpus_of(other)) if theirs is not None and theirs.pool == pool else 0
    if used > LIMITS[pool]:
        world.broken(f"{lease.name} brings pool {pool} to {used} GPUs of {LIMITS[pool]}")


def after_step(world: Any) -> None:
    """No GPU in two running containers, and none in two leases of one state directory. A decided end stays."""
    for machine in world.machines.values():
        for index, boxes in machine.used().items():
            if len(boxes) > 1:
                world.broken(f"GPU {index} of {machine.name} is used by {' and '.join(boxes)}")
    for head in world.heads:
        holders: dict[Gpu, str] = {}
        for name, lease in leases_of(head.home).items():
            if (head.name, name) in world.forged or lease.job in world.excused:
                continue
            for gpu in gpus_of(lease):
                other = holders.setdefault(gpu, name)
                if other != name:
                    world.broken(f"{gpu} is in the leases {other} and {name} of head {head.name}")
        _see_ends(world, head)


def _see_ends(world: Any, head: Any) -> None:
    """An end that is decided stays: only a cancel may come instead of another attempt."""
    for job in _names(f"{head.home}/jobs"):
        record = None if (head.name, job) in world.rewritten else record_of(head.home, job)
        if record is None or not (record.state is State.STOPPING or record.state.ended):
            continue
        end = record.state if record.state.ended else record.outcome
        before = world.decided.setdefault((head.name, job, record.attempt), end)
        if before != end and (before is not State.QUEUED or end is not State.CANCELLED):
            world.broken(f"attempt {record.attempt} of {job} was to end {before}, and ends {end}")


def at_the_end(world: Any) -> None:
    """Everything has ended and been repaired: nothing is held by anybody."""
    states = {head.name: _decoded(f"{head.home}/identity.json", Identity) for head in world.heads}
    known = {identity.id for identity in states.values() if identity is not None}
    for head in world.heads:
        for name in _names(f"{head.home}/leases"):
            world.broken(f"at the end, lease {name} of head {head.name} is there")
        for job in _names(f"{head.home}/live"):
            record = record_of(head.home, job)
            world.broken(f"at the end, {job} of head {head.name} is {record.state.value if record else 'damaged'}")
    for machine in world.machines.values():
        for ident, box in machine.boxes.items():
            world.broken(f"at the end, container {ident} of {box.labels['gpurun.job']} is {box.status}")
        for volume in machine.look().volumes:
            who = volume.claimant
            if who.state in known and who.job not in world.excused:
                world.broken(f"at the end, {who.job} of {who.state} claims {volume.name}")
        cards = [(index, machine.uuid(index)) for index in range(2)]
        if refused := claims.take(machine, AUDITOR, cards):
            world.broken(f"at the end, nobody can have {[one.card for one in refused]}: {refused[0].why}")


def explained(world: Any, head: Any, looked: Any) -> None:
    """Every job that a pass leaves in the queue has a reason for people."""
    from gpurun.scheduler.explain import explain

    for path, decisions in looked.decisions.items():
        for job in decisions.order:
            if not str(explain(decisions, looked.snapshots[path], job)):
                world.broken(f"{job} of head {head.name} waits and nobody can say why")
