"""What must never happen, whatever meets: checked after each pass of a random world.

The checks share no state with the pass. What a gang could have they ask by other passes: with the gang alone in the
queue, or on an emptier cluster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from gpurun.scheduler.explain import explain
from gpurun.scheduler.index import serves
from gpurun.scheduler.model import Decisions, Gang, Kept, Placement, Reason, Running, Snapshot
from gpurun.scheduler.policy import Policy
from gpurun.scheduler.schedule import schedule

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
        if run.gang.pool == gang.pool or run.gang.time_limit_s is not None or run.stopping:
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
    return gang.but(pool=None, constraints=replace(gang.constraints, locality_wait_s=0.0))


def _patience_s(seen: Seen, gang: Gang) -> float:
    """By docs/scheduler.md."""
    hosts = seen.snapshot.inventory.hosts
    if gang.least <= max(host.gpus for host in hosts):
        return seen.policy.patience_s
    capacity: dict[str, int] = {}
    for host in hosts:
        kind = host.generation, host.gpu_model, host.gpu_memory_mib
        if host.name not in seen.snapshot.unusable and serves(kind, gang.constraints):
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
    """Kept GPUs come free, and then the gang starts."""
    users = {gpu: run for run in seen.running for gpu in gpus_of([run.placement])}
    taken = {(host, gpu) for host, gpus in seen.taken.items() for gpu in gpus}
    by_id = {gang.id: gang for gang in seen.snapshot.queue}
    owed = gpus_of(kept.placement for kept in seen.decisions.kept.values() if kept.why == "preemption")
    for name, kept in seen.decisions.kept.items():
        gang, mine = by_id[name], gpus_of([kept.placement])
        if set(kept.placement.hosts) & set(seen.snapshot.unusable) or not _has_servers(seen, gang):
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


def _has_servers(seen: Seen, gang: Gang) -> bool:
    hosts = seen.snapshot.inventory.by_name
    return not gang.servers or any(
        name not in seen.snapshot.unusable and not hosts[name].gpus for name in gang.server_hosts if name in hosts
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
        looked_at.setdefault((gang.constraints, gang.gpus, gang.pool, gang.avoid, found.waits[gang.id].reason), gang)
    for gang in islice(looked_at.values(), most):
        if not is_held and seen.starts_alone(gang):
            raise Broken(f"stuck: {gang.id} would start if it were alone, and nothing is held for anybody")


# what is said


def check_words(seen: Seen, most: int = 2) -> None:
    """Raises Broken if what is said to a gang that waits is not true."""
    for gang in seen.waiting[:most]:
        _is_true(seen, gang)
        if len(seen.snapshot.queue) > MOST_EXPLAINED:
            continue
        said = explain(seen.decisions, seen.snapshot, gang.id, seen.policy)
        if said.state != "waits" or not said.message:
            raise Broken(f"nothing is said to {gang.id}")
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


def _with(seen: Seen, held: Collection[Placement]) -> dict[str, tuple[int, ...]]:
    taken = {host: set(gpus) for host, gpus in seen.taken.items()}
    used = gpus_of(run.placement for run in seen.running)
    for host, gpu in gpus_of(held) - used:
        taken.setdefault(host, set()).add(gpu)
    return {host: tuple(sorted(gpus)) for host, gpus in taken.items()}


def _holders(seen: Seen, kept: Kept | None) -> set[str]:
    """The running gangs that use what is kept."""
    mine = set() if kept is None else gpus_of([kept.placement])
    return {run.gang.id for run in seen.running if mine & gpus_of([run.placement])}


# many passes


@dataclass
class Turn:
    """The oldest gang whose patience is over, since when it is, and whom it may wait for.

    Attributes:
        blockers: gangs that ran then, those for which gangs had been stopped, and those that used what was kept for it
            because their time limits ended before it was expected to start.
        given_up: endless gangs of other pools beside which nothing is kept for it any more: from then on it waits for
            the gangs on other hosts.
        expected_s: when it was last expected to start.
        soonest_s: the soonest that it was expected to start.
    """

    gang: str
    blockers: set[str]
    waits_for_pool: bool
    given_up: set[str]
    expected_s: float | None = None
    soonest_s: float = math.inf


@dataclass
class Watch:
    """Follows one history.

    Attributes:
        turn: of the gang that may have waited for too long.
        promised: GPUs for which gangs were stopped.
        held: for whom the last pass kept GPUs, and why.
    """

    policy: Policy
    turn: Turn | None = None
    usable: object = None
    promised: dict[str, Kept] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    speaks_every: int = 7
    _passes: int = 0

    def passed(self, snapshot: Snapshot, taken: Taken, decisions: Decisions) -> None:
        """Raises Broken if this pass broke a promise, or one that an earlier pass made."""
        seen = Seen(snapshot, taken, decisions, self.policy)
        check_pass(seen)
        self._no_kill_in_vain(seen)
        self._nobody_starves(seen)
        self.held = {name: kept.why for name, kept in decisions.kept.items()}
        self._passes += 1
        if self._passes % self.speaks_every == 0:
            check_words(seen)

    def end(self, snapshot: Snapshot, taken: Taken, decisions: Decisions) -> None:
        """Raises Broken if a gang waits for ever for nothing, now that nothing happens any more."""
        seen = Seen(snapshot, taken, decisions, self.policy)
        check_pass(seen, all_waiting=True)
        if not seen.running:
            for gang in seen.waiting:
                if seen.starts_alone(gang):
                    raise Broken(f"stuck: nothing runs, nothing will happen, and {gang.id} waits")

    def clock_was_set(self, by_s: float) -> None:
        """What counted by the clock counts anew."""
        self.turn = None

    def _no_kill_in_vain(self, seen: Seen) -> None:
        queue = {gang.id: gang for gang in seen.snapshot.queue}
        found = seen.decisions
        for taker in [name for name in self.promised if name not in queue]:
            del self.promised[taker]  # it starts no more, or no pass may start it
        for taker, kept in list(self.promised.items()):
            if taker in found.kept and found.kept[taker].why == "preemption":
                continue
            del self.promised[taker]
            hosts_left = set(kept.placement.hosts) & set(seen.snapshot.unusable) or not _has_servers(seen, queue[taker])
            if taker in found.waits and not hosts_left and not set(seen.snapshot.taken) & set(kept.placement.hosts):
                raise Broken(f"gangs were stopped for {taker}, and it declines their GPUs")
        for preemption in found.preempts:
            self.promised[preemption.taker] = found.kept[preemption.taker]

    def _nobody_starves(self, seen: Seen) -> None:
        """The oldest gang whose patience is over waits for no gang that has started since."""
        gang = self._oldest(seen)
        usable = (seen.snapshot.unusable, seen.taken)
        if gang is None:
            self.turn = None
            return
        waits_for_pool = seen.decisions.waits[gang.id].reason is Reason.POOL
        now, running = self.turn, {run.gang.id for run in seen.snapshot.running}
        had = {name: why for name, why in self.held.items() if name != gang.id}
        has = {name: kept.why for name, kept in seen.decisions.kept.items() if name != gang.id}
        runs = (*seen.snapshot.running, *seen.running)  # also those that this pass stops: it gave them up before
        given_up = {run.gang.id for run in runs if seen.blocks_for_good(run, gang)}
        if (
            now is None or now.gang != gang.id or usable != self.usable or given_up - now.given_up
            or (now.waits_for_pool and not waits_for_pool)
        ):  # fmt: skip
            self.turn = Turn(gang.id, {run.gang.id for run in seen.running} | {*has}, waits_for_pool, given_up)
        elif any(had[name] == "patience" for name in now.blockers & {*had}):
            # hosts were kept for a younger one when its turn began, so none could be kept for it until now
            now.blockers |= {run.gang.id for run in seen.running} | {*has}
        else:
            now.blockers &= {*running, *had, *has}
            ends = {started.id: seen.now_s + started.longest_s for started, _ in seen.decisions.starts}
            known_s = max(now.expected_s or 0.0, seen.decisions.waits[gang.id].expected_start_s or 0.0)
            now.blockers.update(job for job, end_s in ends.items() if end_s <= known_s)
            now.blockers.update(started.id for started, _ in seen.decisions.starts if started.age < gang.age)
            now.blockers.update(name for name, why in has.items() if why == "preemption")
            if (seen.decisions.waits[gang.id].expected_start_s or math.inf) < now.soonest_s:
                # hosts that will be free sooner are kept for it; this happens for ever sooner times only
                now.blockers.update(_holders(seen, seen.decisions.kept.get(gang.id)))
            if not now.blockers:
                raise Broken(f"starved: {gang.id} waits for gangs that started after its patience was over")
        self.usable = usable
        if self.turn is not None:
            self.turn.expected_s = expected_s = seen.decisions.waits[gang.id].expected_start_s
            self.turn.soonest_s = min(self.turn.soonest_s, math.inf if expected_s is None else expected_s)

    def _oldest(self, seen: Seen) -> Gang | None:
        """The oldest gang that waits though its patience is over, and that could run though some gangs never end.

        None while it waits for GPUs that others than gangs hold: nothing that a pass does would help it.
        """
        overdue = (gang for gang in seen.waiting if seen.overdue_s(gang) <= seen.now_s)
        for gang in sorted(overdue, key=lambda gang: (gang.submitted_s, gang.id)):
            if seen.could_start_if_others_ended(gang):
                return gang if seen.could_start_if_others_ended(gang, taken=seen.taken) else None
        return None
