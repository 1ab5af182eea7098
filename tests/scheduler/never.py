"""What must never happen, whatever meets: checked after each pass of a random world.

The checks share no state with the pass. What a gang could have they ask by other passes: with the gang alone in the
queue, or on an emptier cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from gpurun.jobs.spec import Placement
from gpurun.scheduler.explain import explain
from gpurun.scheduler.model import Decisions, Gang, Policy, Reason, Running, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.scheduler.placement import serves

Gpus = set[tuple[str, int]]
Taken = Mapping[str, tuple[int, ...]]

MOST_LOOKED_AT = 3
"""Waiting gangs that are tried alone after one pass; after the last pass all are."""

MOST_EXPLAINED = 20
"""In longer queues nothing is explained: it tries up to 64 passes, which was most of the time of a long life."""


class Broken(AssertionError):
    """A pass broke a promise."""


def gpus_of(placements: Iterable[Placement]) -> Gpus:
    return {(grant.host, gpu) for placement in placements for grant in placement.grants for gpu in grant.gpus}


@dataclass(frozen=True)
class Seen:
    """A pass and its answer.

    Attributes:
        taken: GPUs that others hold, without those that are kept for jobs that no pass may start.
    """

    snapshot: Snapshot
    taken: Taken
    decisions: Decisions
    policy: Policy

    @property
    def now_s(self) -> float:
        return self.snapshot.now_s

    @property
    def running(self) -> tuple[Running, ...]:
        """The gangs that hold GPUs after the pass."""
        stopped = {preemption.victim for preemption in self.decisions.preempts}
        runs = (replace(run, stopping=True) if run.gang.id in stopped else run for run in self.snapshot.running)
        return (*runs, *(Running(gang, placement, self.now_s) for gang, placement in self.decisions.starts))

    @property
    def waiting(self) -> list[Gang]:
        return [gang for gang in self.snapshot.queue if gang.id in self.decisions.waits]

    def is_stopping(self) -> bool:
        return any(run.stopping for run in self.running)

    def overdue_s(self, gang: Gang) -> float:
        """When its patience ends."""
        return max(gang.submitted_s + _patience_s(self, gang), gang.near_until_s)

    def starts_alone(self, gang: Gang, **changes: object) -> bool:
        """Returns True if it would start if it were the only gang in the queue."""
        queue = (gang.but(kept=None),)
        seen = replace(self.snapshot, **{"running": self.running, "queue": queue, "taken": self.taken, **changes})
        return bool(schedule(seen, self.policy).starts)

    def blocks_for_good(self, run: Running, gang: Gang) -> bool:
        """Returns True if a gang of another pool goes on though the gang has waited for its end for long enough."""
        if run.gang.wants.pool == gang.wants.pool or run.gang.wants.time_limit_s is not None or run.stopping:
            return False
        return self.now_s >= max(self.overdue_s(gang), run.granted_s) + self.policy.patience_s

    def could_start_if_others_ended(self, gang: Gang, taken: Taken | None = None) -> bool:
        """Returns True if the usable hosts could hold it, though some gangs of other pools go on and on."""
        stay = tuple(run for run in self.running if self.blocks_for_good(run, gang))
        if taken is None:
            taken = self.taken if self.now_s >= self.overdue_s(gang) + self.policy.patience_s else {}
        return self.starts_alone(_easy(gang), running=stay, taken=taken, inventory=self.without_pools)

    @property
    def without_pools(self) -> object:
        return replace(self.snapshot.inventory, pools=())


def _easy(gang: Gang) -> Gang:
    """The gang without a pool, and content with any racks."""
    return gang.wanting(pool=None, constraints=replace(gang.wants.constraints, locality_wait_s=0.0))


def _patience_s(seen: Seen, gang: Gang) -> float:
    """By docs/scheduler.md."""
    hosts = seen.snapshot.inventory.hosts
    if gang.least <= max(host.gpus for host in hosts):
        return seen.policy.patience_s
    capacity: dict[str, int] = {}
    for host in hosts:
        kind = host.generation, host.gpu_model, host.gpu_memory_mib
        if host.name not in seen.snapshot.unusable and serves(kind, gang.wants.constraints):
            capacity[host.generation] = capacity.get(host.generation, 0) + host.gpus
    most = max(capacity.values(), default=0)
    share = min(1.0, gang.least / most) if most else 1.0
    return seen.policy.patience_s * min(1.0, (2 * share) ** 4)


# one pass


def check_pass(seen: Seen, *, all_waiting: bool = False) -> None:
    """Raises Broken if the answer of one pass breaks a promise."""
    _each_gang_has_one_answer(seen)
    _no_gpu_twice(seen)
    _only_what_is_usable(seen)
    _what_is_kept_will_be_used(seen)
    _what_is_left_to_a_gang_can_be_used_by_it(seen)
    _nothing_idles_for_nothing(seen, None if all_waiting else MOST_LOOKED_AT)


def _each_gang_has_one_answer(seen: Seen) -> None:
    found = seen.decisions
    answered = [gang.id for gang, _ in found.starts] + list(found.waits) + list(found.never)
    if sorted(answered) != sorted(gang.id for gang in seen.snapshot.queue):
        raise Broken(f"answers for {sorted(answered)}")


def _no_gpu_twice(seen: Seen) -> None:
    used: Gpus = set()
    for run in seen.running:
        mine = gpus_of([run.placement])
        if mine & used or len(mine) != sum(len(grant.gpus) for grant in run.placement.grants):
            raise Broken(f"{run.gang.id} has GPUs of others")
        used |= mine
    held: Gpus = set()
    kept = [kept.placement for kept in seen.decisions.kept.values() if kept.why == "patience"]
    for placement in (*kept, *seen.decisions.reserved.values()):
        mine = gpus_of([placement])
        if mine & held:
            raise Broken("GPUs are held for two gangs")
        held |= mine
    owed = [gpus_of([kept.placement]) for kept in seen.decisions.kept.values() if kept.why == "preemption"]
    reserved = gpus_of(seen.decisions.reserved.values())
    if any(mine & reserved for mine in owed) or len(set().union(*owed)) != sum(map(len, owed)):
        raise Broken("GPUs for which gangs were stopped are held for two gangs")


def _only_what_is_usable(seen: Seen) -> None:
    hosts = seen.snapshot.inventory.by_name
    by_id = {gang.id: gang for gang in seen.snapshot.queue}
    for gang, placement in seen.decisions.starts:
        asked = by_id[gang.id]
        if set(placement.hosts) & set(seen.snapshot.unusable):
            raise Broken(f"{gang.id} starts on a host that is out of use")
        if any(gpu >= hosts[host].gpus for host, gpu in gpus_of([placement])):
            raise Broken(f"{gang.id} gets a GPU that is not there")
        if not asked.least <= placement.gpus <= asked.gpus:
            raise Broken(f"{gang.id} gets {placement.gpus} GPUs")


def _what_is_kept_will_be_used(seen: Seen) -> None:
    """Kept GPUs become free, and then the gang starts."""
    users = {gpu: run for run in seen.running for gpu in gpus_of([run.placement])}
    taken = {(host, gpu) for host, gpus in seen.taken.items() for gpu in gpus}
    by_id = {gang.id: gang for gang in seen.snapshot.queue}
    owed = gpus_of(kept.placement for kept in seen.decisions.kept.values() if kept.why == "preemption")
    for name, kept in seen.decisions.kept.items():
        gang, mine = by_id[name], gpus_of([kept.placement])
        if set(kept.placement.hosts) & set(seen.snapshot.unusable) or not has_servers(seen, gang):
            raise Broken(f"idle for nothing: GPUs are kept for {name}, which needs hosts that are out of use")
        lacking = [users[gpu] for gpu in mine if gpu in users]
        others = mine & taken - set(users)
        if kept.why == "preemption":
            if not seen.is_stopping():
                raise Broken(f"idle for nothing: all that {name} had gangs stopped for is kept, and it does not start")
            continue
        if not lacking and not others and not mine & owed:
            raise Broken(f"idle for nothing: all GPUs kept for {name} are free, and it does not start")
        if any(seen.blocks_for_good(run, gang) for run in lacking):
            raise Broken(f"idle for nothing: GPUs are kept for {name} beside those of an endless gang of another pool")
        if others and seen.now_s >= seen.overdue_s(gang) + seen.policy.patience_s:
            raise Broken(f"idle for nothing: GPUs are kept for {name} beside some that others hold")


def has_servers(seen: Seen, gang: Gang) -> bool:
    hosts = seen.snapshot.inventory.by_name
    number, names = gang.wants.servers
    return not number or any(
        name not in seen.snapshot.unusable and not hosts[name].gpus for name in names if name in hosts
    )


def _what_is_left_to_a_gang_can_be_used_by_it(seen: Seen) -> None:
    """What a pool has left may be for the gang that has waited longest, if that gang could have all that it needs."""
    by_id = {gang.id: gang for gang in seen.waiting}
    started = {gang.id for gang, _ in seen.decisions.starts}
    told = {wait.behind for wait in seen.decisions.waits.values() if "has waited longest" in wait.message}
    for name in told - started:
        gang = by_id.get(name or "")
        if gang is None or seen.now_s < seen.overdue_s(gang):
            raise Broken(f"what a pool has left is for {name}, which is no gang that has waited for long")
        if not seen.could_start_if_others_ended(gang):
            raise Broken(f"idle for nothing: what a pool has left is for {name}, which cannot have its hosts")


def _nothing_idles_for_nothing(seen: Seen, most: int | None) -> None:
    """If a gang that waits would start alone, then something is held for another gang, and rightly."""
    found = seen.decisions
    if found.starts or found.preempts:
        return  # more is known after the next event, and one is near: nothing to say yet
    is_held = bool(found.kept or found.reserved) or any("waited longest" in w.message for w in found.waits.values())
    looked_at: dict[object, Gang] = {}
    for gang in seen.waiting:
        looked_at.setdefault(
            (gang.wants.constraints, gang.gpus, gang.wants.pool, gang.avoid, found.waits[gang.id].reason), gang
        )
    for gang in islice(looked_at.values(), most):
        if not is_held and seen.starts_alone(gang):
            raise Broken(f"stuck: {gang.id} would start if it were alone, and nothing is held for anybody")


# what is said


def check_words(seen: Seen, most: int = 2) -> None:
    """Raises Broken if what is said to a gang that waits is not true."""
    for gang in seen.waiting[:most]:
        _is_true(seen, gang)
        _is_what_holds_it(seen, gang)
        if len(seen.snapshot.queue) > MOST_EXPLAINED:
            continue
        said = explain(seen.decisions, seen.snapshot, gang.id, seen.policy)
        if said.state != "waits" or not said.message:
            raise Broken(f"nothing is said to {gang.id}")
        for change in said.changes:
            out = {name for name, why in seen.snapshot.unusable.items() if why.startswith("out: ")}
            if change.what == "uncordon" and out & set(change.value.split(",")):
                raise Broken(f"{gang.id} is told to uncordon hosts that are out")
        if said.expected_start_s is None and ("nobody knows" in said.unknown_because or not said.unknown_because):
            raise Broken(f"{gang.id} is told that nobody knows")
        if said.expected_start_s is not None and said.expected_start_s < seen.now_s - 1e-6:
            raise Broken(f"{gang.id} is expected in the past")


def _is_true(seen: Seen, gang: Gang) -> None:
    wait, found = seen.decisions.waits[gang.id], seen.decisions
    started = {gang.id for gang, _ in found.starts}
    if wait.reason is Reason.RESERVED and wait.behind not in {*found.kept, *found.reserved, *started}:
        raise Broken(f"{gang.id} is told to wait for {wait.behind}, for which nothing is held")
    if wait.reason is Reason.HOSTS and seen.starts_alone(
        _easy(gang), running=(), taken={}, inventory=seen.without_pools
    ):
        raise Broken(f"{gang.id} is told that hosts are missing, but the usable ones could hold it")
    if wait.reason is Reason.NO_ROOM and not found.preempts:
        held = [kept.placement for name, kept in found.kept.items() if name != gang.id]
        held += [other.kept.placement for other in seen.snapshot.queue if other.kept and other.id != gang.id]
        held += [placement for name, placement in found.reserved.items() if name != gang.id]
        if seen.starts_alone(gang, taken=_with(seen, held)):
            raise Broken(f"{gang.id} is told that there is no room, but it fits")


def _is_what_holds_it(seen: Seen, gang: Gang) -> None:
    """Without the cause that is named, the gang starts, or another cause is named."""
    before, wait = seen.snapshot, seen.decisions.waits[gang.id]
    others = tuple(other for other in before.queue if other.id not in (wait.behind, gang.id))
    near = gang.wanting(constraints=replace(gang.wants.constraints, locality_wait_s=0.0))
    if wait.reason is Reason.KEPT:
        if gang.id not in seen.decisions.kept:
            raise Broken(f"{gang.id} is told that GPUs are kept for it, and none are")
        return
    if wait.behind is not None and any(other.id == wait.behind for other in before.queue):
        changed = replace(before, queue=(*others, gang))
    else:
        changed = {
            Reason.HOSTS: replace(before, unusable={}),
            Reason.LOCALITY: replace(before, queue=(*others, near)),
            Reason.POOL: replace(before, inventory=seen.without_pools),
        }.get(wait.reason, replace(before, running=(), taken={}, queue=(gang.but(kept=None),)))
    then = schedule(changed, seen.policy).waits.get(gang.id)
    if then is not None and (then.reason, then.behind) == (wait.reason, wait.behind):
        raise Broken(f"{gang.id} is told {wait.message!r}; without that it waits for the same")


def _with(seen: Seen, held: Collection[Placement]) -> dict[str, tuple[int, ...]]:
    taken = {host: set(gpus) for host, gpus in seen.taken.items()}
    used = gpus_of(run.placement for run in seen.running)
    for host, gpu in gpus_of(held) - used:
        taken.setdefault(host, set()).add(gpu)
    return {host: tuple(sorted(gpus)) for host, gpus in taken.items()}
