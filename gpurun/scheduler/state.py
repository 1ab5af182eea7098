"""The state of one pass: when GPUs become free, for whom they are kept, and which gangs stop for others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gpurun.jobs.record import Kept
from gpurun.jobs.spec import Placement
from gpurun.quantities import count
from gpurun.scheduler.model import (
    ENDLESS,
    Decisions,
    Gang,
    Policy,
    Preemption,
    Reason,
    Refusal,
    Running,
    Snapshot,
    Wait,
    refuse,
    with_servers,
)
from gpurun.scheduler.placement import Capacity, Index, Masks, Try
from gpurun.scheduler.pools import Book

# GPUs that a pass holds for one gang against others: those kept over passes, and one reservation.


@dataclass(frozen=True)
class Hold:
    """GPUs that are held for one gang.

    Attributes:
        free_s: when all of them are expected to be free. Gangs that end before may use them until then. ENDLESS:
            unknown, so no other gang may use them.
        kept: what the caller stores; None for a reservation, which is for this pass only.
    """

    gang: Gang
    placement: Placement
    masks: Masks
    free_s: float
    kept: Kept | None = None

    @property
    def is_owed(self) -> bool:
        """Returns True if gangs were stopped for it."""
        return self.kept is not None and self.kept.why == "preemption"

    @property
    def has_patience(self) -> bool:
        """Returns True if it is kept because others overtook the gang for long enough."""
        return self.kept is not None and self.kept.why == "patience"

    def outlasted_by(self, gang: Gang, now_s: float) -> bool:
        """Returns True if a gang that starts now may still run when these GPUs are wanted."""
        return self.free_s == ENDLESS or now_s + gang.longest_s > self.free_s


class Keeping:
    """Removes held GPUs from the index. `undo` restores them.

    Attributes:
        holds: gang → what is held for it.
    """

    def __init__(self, index: Index, now_s: float) -> None:
        self.index, self.now_s = index, now_s
        self.holds: dict[str, Hold] = {}
        self._taken: dict[str, Masks] = {}
        self._timed: list[Hold] = []
        self._against: dict[float, tuple[str, ...]] = {}  # gangs' longest_s → for whom GPUs are held against them

    @property
    def reservation(self) -> Hold | None:
        """The one hold that is not kept over passes."""
        return next((hold for hold in self.holds.values() if hold.kept is None), None)

    @property
    def has_patience(self) -> bool:
        """Returns True if GPUs are kept for a gang because others overtook it for long enough."""
        return any(hold.has_patience for hold in self.holds.values())

    def possible_again(
        self, waiting: Iterable[Gang], running: Sequence[Running], taken: Masks
    ) -> Iterator[tuple[Gang, Kept]]:
        """Yield what earlier passes kept and this one may keep, too, the oldest gang first. The caller may `keep` it.
        GPUs for which gangs were stopped come first: another gang may wait for what they are used for.

        Left out are: a placement on a lost or missing host; one with GPUs that another holds now or that are kept for
        another gang; one for which gangs should stop that were not told yet. This pass decides those again.
        """
        going_on = _union(self.index.masks(run.placement) for run in running if not run.stopping)
        promised = {"preemption": _union([taken]), "patience": _union([taken])}
        kepts = [(gang, gang.kept) for gang in waiting if gang.kept is not None]
        for gang, kept in sorted(kepts, key=lambda kept: (kept[1].why != "preemption", kept[0].age)):
            if not self.index.usable(kept.placement):
                continue
            masks = self.index.masks(kept.placement)
            if _overlap(promised[kept.why], masks) or (kept.why == "preemption" and _overlap(going_on, masks)):
                continue
            yield gang, kept
            if gang.id in self.holds:
                promised[kept.why] = _union((list(promised[kept.why].items()), masks))

    def keep(self, gang: Gang, kept: Kept, running: Iterable[Running]) -> None:
        """Hold GPUs, free now or later, for a gang, in this pass and in those that follow."""
        masks = self.index.masks(kept.placement)
        self.hold(Hold(gang, kept.placement, masks, self._free_s(gang, kept, masks, running), kept))

    def hold(self, hold: Hold) -> None:
        """Hold GPUs for a gang from here on."""
        self.holds[hold.gang.id] = hold
        self._taken[hold.gang.id] = self.index.hold(hold.masks)
        if hold.free_s != ENDLESS:
            self._timed.append(hold)
            self._against.clear()

    def drop(self, gang: str) -> Hold | None:
        """Release what is held for a gang. Returns it, None if there was nothing."""
        self.index.give(self._taken.pop(gang, ()))
        self._timed = [hold for hold in self._timed if hold.gang.id != gang]
        self._against.clear()
        return self.holds.pop(gang, None)

    def hold_again(self) -> None:
        """Hold what is free now of GPUs that were held for two gangs: the one for which gangs were stopped had them."""
        for name, hold in self.holds.items():
            self._taken[name] = [*self._taken.get(name, ()), *self.index.hold(hold.masks)]

    def owed_to_others(self, gang: Gang) -> list[Hold]:
        """What other gangs have had gangs stopped for."""
        return [hold for hold in self.holds.values() if hold.is_owed and hold.gang.id != gang.id]

    def against(self, gang: Gang) -> tuple[str, ...]:
        """Return the gangs for which GPUs are held that this gang may not use, among holds with a known time."""
        if not self._timed:
            return ()
        known = self._against.get(gang.longest_s)
        if known is None:
            known = tuple([hold.gang.id for hold in self._timed if hold.outlasted_by(gang, self.now_s)])
            self._against[gang.longest_s] = known
        return known

    def open(self, against: tuple[str, ...]) -> None:
        """Let a gang use the GPUs of all holds whose time is known, except these."""
        for hold in self._timed:
            if hold.gang.id not in against:
                self.index.give(self._taken.pop(hold.gang.id, ()))

    def close(self) -> None:
        """End `open`: hold what is still free."""
        for hold in self._timed:
            if hold.gang.id not in self._taken:
                self._taken[hold.gang.id] = self.index.hold(hold.masks)

    def not_for_others(self, gang: Gang) -> Callable[[Masks], Masks]:
        """Return a function that removes GPUs that are held for another gang."""
        others = _union(hold.masks for hold in self.holds.values() if hold.gang.id != gang.id)
        if not others:
            return lambda masks: masks
        return lambda masks: [(n, mask & ~others.get(n, 0)) for n, mask in masks]

    def undo(self) -> None:
        """Leave in the index only what is really in use."""
        for masks in self._taken.values():
            self.index.give(masks)
        self._taken.clear()

    def _free_s(self, gang: Gang, kept: Kept, masks: Masks, running: Iterable[Running]) -> float:
        if kept.why == "preemption":
            return ENDLESS
        wanted = {n: mask & ~self.index.free[n] for n, mask in masks}
        first = [hold.gang.longest_s for hold in self.owed_to_others(gang) if _overlap(wanted, hold.masks)]
        free_s = self.now_s + max(first, default=0.0)
        for run in running:
            used = self.index.masks(run.placement)
            if _overlap(wanted, used):
                free_s = max(free_s, run.free_s(self.now_s))
                wanted = {n: mask & ~dict(used).get(n, 0) for n, mask in wanted.items()}
        return ENDLESS if any(wanted.values()) else free_s  # other users of GPUs have no known end


def _union(many: Iterable[Masks]) -> dict[int, int]:
    union: dict[int, int] = {}
    for masks in many:
        for n, mask in masks:
            union[n] = union.get(n, 0) | mask
    return union


def _overlap(one: Mapping[int, int], masks: Masks) -> bool:
    return any(one.get(n, 0) & mask for n, mask in masks)


# What fits now: free GPUs, without those that are held for other gangs.


class Room:
    """Places gangs during one pass.

    Args:
        attempt: where a gang would start now.
        possible: where it fits.
    """

    def __init__(self, index: Index, keeping: Keeping, attempt: Try, possible: Try) -> None:
        self.index, self.keeping, self._attempt, self._possible = index, keeping, attempt, possible

    def place(self, gang: Gang) -> Placement | None:
        """Where the gang goes now, None if nowhere. GPUs held for others count only if it ends in time."""
        return self._place(gang, self.keeping.against(gang), self._attempt)

    def anywhere(self, gang: Gang) -> Placement | None:
        """Where the gang fits now with the fewest GPUs that it needs, also where it declines to start."""
        return self._place(gang.smallest, self.keeping.against(gang), self._possible)

    def largest(self, gang: Gang, most: int) -> Placement | None:
        """Where the gang goes with the most GPUs that fit: `most`, or fewer if it is elastic."""
        placement = self.place(gang.sized(most))
        low, high = gang.least // gang.step, most // gang.step - 1
        if placement is not None or gang.wants.min_gpus is None or low > high:
            return placement
        placement = self.place(gang.sized(low * gang.step))
        while placement is not None and low < high:
            middle = (low + high + 1) // 2
            found = self.place(gang.sized(middle * gang.step))
            low, high, placement = (middle, high, found) if found is not None else (low, middle - 1, placement)
        return placement

    def fits_without_timed_holds(self, gang: Gang) -> bool:
        """Returns True if the gang would fit but for GPUs that are held for others until a known time."""
        return bool(self.keeping.against(gang)) and self._place(gang.smallest, (), self._attempt) is not None

    def take(self, placement: Placement) -> None:
        """Mark a placement's GPUs as used."""
        self.keeping.open(())
        self.index.take(self.index.masks(placement))
        self.keeping.close()

    def _place(self, gang: Gang, against: tuple[str, ...], attempt: Try) -> Placement | None:
        if gang.gpus % gang.step:
            return None
        self.keeping.open(against)
        placement = attempt(self.index, gang)
        self.keeping.close()
        return placement


# Compute when GPUs become free, and when a gang that does not fit now will fit.


def carried_out(snapshot: Snapshot, decisions: Decisions) -> Snapshot:
    """Return the snapshot after the decisions. A stopped gang is not in the queue again."""
    started = {gang.id for gang, _ in decisions.starts}
    stopped = {preemption.victim for preemption in decisions.preempts}
    running = [
        replace(run, stopping=True, told_s=snapshot.now_s) if run.gang.id in stopped and not run.stopping else run
        for run in snapshot.running
    ]
    running += [Running(gang, placement, snapshot.now_s) for gang, placement in decisions.starts]
    queue = tuple(_with_kept(gang, decisions.kept.get(gang.id)) for gang in snapshot.queue if gang.id not in started)
    return replace(snapshot, running=tuple(running), queue=queue)


def _with_kept(gang: Gang, kept: Kept | None) -> Gang:
    return gang if gang.kept == kept else gang.but(kept=kept)


@dataclass(frozen=True)
class Release:
    """GPUs that become free at a time: an end by time limit, or a guess. `gang` breaks ties."""

    at_s: float
    gang: str
    masks: Masks


def first_fit(index: Index, gang: Gang, releases: Sequence[Release], attempt: Try) -> tuple[float, Placement] | None:
    """Return the earliest release after which the gang fits, and its placement; None if there is none.

    Leaves the index as it was. A gang that fits after some releases fits after more, so the search is binary.
    """
    ordered = sorted(releases, key=lambda release: (release.at_s, release.gang))
    if index.total_free + sum(mask.bit_count() for r in ordered for _, mask in r.masks) < gang.gpus:
        return None
    given: list[Masks] = []

    def after(number: int) -> Placement | None:
        while len(given) < number:
            masks = [(n, mask & ~index.free[n]) for n, mask in ordered[len(given)].masks]
            index.give(masks)
            given.append(masks)
        while len(given) > number:
            index.take(given.pop())
        return attempt(index, gang)

    low, high = 1, len(ordered)
    best = after(high) if ordered else None
    if best is not None:
        while low < high:
            middle = (low + high) // 2
            found = after(middle)
            low, high, best = (low, middle, found) if found is not None else (middle + 1, high, best)
    while given:
        index.take(given.pop())
    return None if best is None else (ordered[low - 1].at_s, best)


@dataclass
class Arranged:
    """What a caller with many passes over one inventory keeps between them.

    Attributes:
        index: must agree with the snapshot's running gangs; `passes` adds its starts to it.
        capacity: of the snapshot's inventory.
    """

    index: Index
    capacity: Capacity


class PassState:
    """What one pass knows and has decided. `passes` drives it, and decides with it.

    Attributes:
        running: gangs that hold GPUs, those that this pass has started included.
        book: of the pools; None where there are none.
        room: what fits now.
        keeping: GPUs held for one gang against the others.
        first_blocked: the first gang that waits for room.
        has_freed: GPUs that were kept for a gang may be free now for gangs that the pass has looked at before.
        overdue: gangs that wait for GPUs and whose patience is over.
        oldest: the oldest gang of the queue whose patience is over, once somebody has asked.
        lenders: running gangs that may be stopped for others.
        wakes: times at which time alone may change a decision.
        wishes: gang → a number that is equal for waiting gangs that want the same.
        patience: of the large gangs seen so far, by wish; see `waiting.patience_of`.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, arranged: Arranged) -> None:
        self.snapshot, self.policy, self.now_s = snapshot, policy, snapshot.now_s
        self.index, self.capacity = arranged.index, arranged.capacity
        self.keeping = Keeping(self.index, self.now_s)
        self.room = Room(self.index, self.keeping, self.place, self.capacity.place)
        self.running = list(snapshot.running)
        self.book = Book(snapshot, self.index.capacity) if snapshot.inventory.pools else None
        self.starts: list[tuple[Gang, Placement]] = []
        self.preempts: list[Preemption] = []
        self.waits: dict[str, Wait] = {}
        self.never: dict[str, Refusal] = {}
        self.first_blocked: str | None = None
        self.has_freed = False
        self.overdue: list[Gang] = []
        self.oldest: Gang | None = None
        self.lenders: list[Running] = []
        self.wakes: list[float] = []
        self.wishes = _wishes(snapshot.queue)
        self.patience: dict[int, float] = {}
        self._alike: dict[
            Hashable, tuple[tuple[float, str], Wait, float | None]
        ] = {}  # since something became easier to get
        self._usable: Index | None = None
        self._suffices: dict[Hashable, bool] = {}
        self._indexes: dict[Hashable, Index] = {}
        self._staying: dict[str | None, Mapping[str, Running]] = {}

    def start(self, gang: Gang, placement: Placement, hold: Hold | None = None) -> None:
        """Start a gang.

        Args:
            hold: what was kept for it.
        """
        self.has_freed |= hold is not None and hold.placement.grants != placement.grants
        gang = gang.sized(placement.gpus)
        self.waits.pop(gang.id, None)
        self.room.take(placement)
        if gang.wants.roles is not None:
            placement = with_servers(gang, placement, self.snapshot, self.running)
        self.starts.append((gang, placement))
        self.running.append(Running(gang, placement, self.now_s))
        self._alike.clear()
        if self.book is not None:
            self.book.start(gang)

    def wait(self, gang: Gang, reason: Reason, message: str, **more: Any) -> Wait:
        """Note why a gang waits."""
        wait = self.waits[gang.id] = Wait(reason, message, starts_before=len(self.starts), **more)
        return wait

    def keep(self, gang: Gang, kept: Kept) -> None:
        """Keep GPUs for a gang from this pass on, and note that it waits for them."""
        self._hold(gang, kept)
        free_s = self.keeping.holds[gang.id].free_s
        message = f"gpurun keeps GPUs of {some_hosts(kept.placement)} for the job as each GPU becomes free"
        self.wait(gang, Reason.KEPT, message, expected_start_s=None if free_s == ENDLESS else free_s)

    def keep_again(self, gangs: list[Gang], helps: Callable[[Gang, Kept], bool]) -> None:
        """Keep what earlier passes kept, if it still helps, before any gang is considered."""
        taken = self.index.masks_of(self.snapshot.taken)
        for gang, kept in self.keeping.possible_again(gangs, self.running, taken) if gangs else ():
            if helps(gang, kept):
                self._hold(gang, kept)

    def _hold(self, gang: Gang, kept: Kept) -> None:
        self.keeping.keep(gang, kept, self.running)
        if self.book is not None:
            self.book.keep(gang.sized(kept.placement.gpus), is_owed=kept.why == "preemption")

    def release(self, gang: Gang) -> Hold | None:
        """Let a gang use what is kept for it. Returns what that was."""
        if gang.id not in self.keeping.holds:
            return None
        self._alike.clear()
        hold = self.keeping.drop(gang.id)
        if self.book is not None and hold is not None:
            self.book.withdraw(gang.sized(hold.placement.gpus))
        return hold

    def drop_reservation(self, hold: Hold) -> None:
        """Let others use what was reserved, also gangs that the pass has looked at before."""
        self._alike.clear()  # another reservation for the same gang has another place and time
        self.keeping.drop(hold.gang.id)
        self.has_freed = True

    def waits_like_another(self, gang: Gang) -> bool:
        """True, and the same wait, if a gang just like it found no room: most of a long queue.

        Since then others have only got more. An older gang may be left more of its pool's room, so it is looked at.
        """
        if gang.id in self.keeping.holds:
            return False
        found = self._alike.get(self._kind(gang))
        if found is None or (gang.age < found[0] and self.book is not None):
            return False
        _, self.waits[gang.id], patience_s = found
        if patience_s is not None:
            self.note_patience(gang, patience_s)
        return True

    def share_wait(self, gang: Gang, wait: Wait, patience_s: float | None = None) -> None:
        """Gangs just like this one may wait for the same reason.

        Args:
            patience_s: for how long each of them may be overtaken; None if no hosts are kept for such gangs.
        """
        self._alike[self._kind(gang)] = gang.age, wait, patience_s

    def note_patience(self, gang: Gang, patience_s: float) -> None:
        """Note that a gang waits for room. It is overdue now, or a pass looks at it again when its patience ends."""
        ends_s = max(gang.submitted_s + patience_s, gang.near_until_s)
        if ends_s <= self.now_s:
            self.overdue.append(gang)
        else:
            self.wakes.append(ends_s)

    def _kind(self, gang: Gang) -> Hashable:
        """Equal for gangs that differ only in age, and that end in time for the same reservations."""
        standing = None if self.book is None else self.book.standing.get(gang.id)
        return self.wishes[gang.id], self.keeping.against(gang), standing, self.is_choosy(gang)

    @property
    def may_keep(self) -> bool:
        """Returns True if hosts may be kept for a gang whose patience is over: for one gang at a time."""
        return not self.keeping.has_patience

    def could_ever(self, gang: Gang) -> bool:
        """False, and the refusal, if the inventory could never hold the gang."""
        if self.capacity.could_hold(gang):
            return True
        self.never[gang.id] = self.capacity.refuse(self.index, gang)
        return False

    def hosts_suffice(self, gang: Gang) -> bool:
        """Returns True if the gang would fit if every GPU of the hosts that are usable now were free."""
        unusable = self.snapshot.unusable
        if not unusable:
            return True
        key = self.wishes[gang.id]
        known = self._suffices.get(key)
        if known is None:
            if self._usable is None:
                self._usable = Index(Snapshot(self.snapshot.inventory, unusable=unusable))
            has_servers = refuse(gang, self.snapshot) is None
            fits = has_servers and self.capacity.place(self._usable, gang.smallest) is not None
            known = self._suffices[key] = fits
        return known

    def may_have_its_hosts(self, gang: Gang, overdue_s: float) -> bool:
        """Returns True if the gang would fit if all gangs ended but those that are `staying`.

        Args:
            overdue_s: when its patience ended.
        """
        staying, is_taken = self.staying(gang, overdue_s), self.gives_up_taken(overdue_s)
        if not staying and not is_taken:
            return True
        key = (self.wishes[gang.id], bool(staying), is_taken)
        known = self._suffices.get(key)
        if known is None:
            known = self._suffices[key] = (
                self.capacity.place(self._left(gang, staying, is_taken), gang.smallest) is not None
            )
        return known

    def _left(self, gang: Gang, staying: Mapping[str, Running], is_taken: bool) -> Index:
        """The usable hosts without the GPUs of gangs that stay, and perhaps without those that others hold."""
        key = (gang.wants.pool if staying else None, bool(staying), is_taken)
        if key not in self._indexes:
            taken = self.snapshot.taken if is_taken else {}
            empty = replace(self.snapshot, running=tuple(staying.values()), queue=(), taken=taken)
            self._indexes[key] = Index(empty)
        return self._indexes[key]

    def staying(self, gang: Gang, overdue_s: float) -> Mapping[str, Running]:
        """The gangs on whose GPUs nothing is kept any more for this one: they have no time limit, are of other pools,
        and have gone on for `Policy.patience_s` while it waited with its patience over.
        """
        if self.book is None or not self._is_long_since(overdue_s):
            return {}
        found = self._staying.get(gang.wants.pool)
        if found is None:
            found = self._staying[gang.wants.pool] = {
                run.gang.id: run
                for run in self.running
                if run.gang.wants.pool != gang.wants.pool
                and run.gang.wants.time_limit_s is None
                and not run.stopping
                and self._is_long_since(run.granted_s)
            }
        return found

    def gives_up_taken(self, overdue_s: float) -> bool:
        """Returns True if nothing is kept any more on GPUs that others than gangs hold: nobody knows until when."""
        return bool(self.snapshot.taken) and self._is_long_since(overdue_s)

    def _is_long_since(self, since_s: float) -> bool:
        ends_s = since_s + self.policy.patience_s
        if ends_s > self.now_s:
            self.wakes.append(ends_s)
        return ends_s <= self.now_s

    def is_choosy(self, gang: Gang) -> bool:
        """Returns True if the gang still waits for one rack or host rather than start on more.

        If more are kept for it, its wait was over before: the clock was set back, and it starts on what is kept.
        """
        if gang.near_until_s <= self.now_s:
            return False
        kept = None if gang.kept is None else gang.kept.placement
        return kept is None or len(kept.racks if gang.wants.constraints.prefer == "rack" else kept.hosts) == 1

    def place(self, index: Index, gang: Gang) -> Placement | None:
        """Where the gang would start on an index now: it declines more racks or hosts while it waits for one."""
        return self.capacity.place(index, gang, gang.wants.constraints.prefer if self.is_choosy(gang) else None)

    def stop(self, victims: tuple[Running, ...], taker: Gang) -> None:
        """Tell gangs to stop for another one."""
        self._alike.clear()
        self._staying.clear()
        self._indexes.clear()
        self._suffices.clear()
        self.oldest = None
        for run in victims:
            if self.book is not None:
                self.book.stop(run.gang)
            lender, entitled = named_pool(run.gang.wants.pool), f"{taker.id} of {named_pool(taker.wants.pool)}"
            message = f"{lender} returns GPUs that it borrowed: {entitled} is entitled to them"
            self.preempts.append(Preemption(run.gang.id, taker.id, message))
        self.running = [replace(run, stopping=True) if run in victims else run for run in self.running]

    def decisions(self, order: list[Gang]) -> Decisions:
        """The answer, once every gang has been considered."""
        holds = self.keeping.holds
        return Decisions(
            starts=tuple(self.starts),
            preempts=tuple(self.preempts),
            kept={gang: hold.kept for gang, hold in holds.items() if hold.kept is not None},
            reserved={gang: hold.placement for gang, hold in holds.items() if hold.kept is None},
            waits=self.waits,
            never=self.never,
            order=tuple(gang.id for gang in order),
            entitlements=self.book.entitlements if self.book is not None else {},
            wake_s=min((at_s for at_s in self.wakes if at_s > self.now_s), default=None),
        )


def _wishes(gangs: Iterable[Gang]) -> dict[str, int]:
    """Gang → a number, equal for gangs that differ only in age, history, priority and time limit.

    The gangs of a long queue share few `Wants`, and one object is known by its identity, which costs less than to
    compare. The gangs keep these objects, and so their identities, for as long as the pass lasts.
    """
    numbers: dict[Hashable, int] = {}
    wanted: dict[int, int] = {}
    found = {}
    for gang in gangs:
        wants = gang.wants
        same = wanted.get(id(wants))
        if same is None:
            servers = wants.roles.ps_hosts and wants.servers if wants.roles else ()
            asked = wants.constraints, wants.min_gpus, wants.pool, wants.preemptible, servers
            same = wanted[id(wants)] = numbers.setdefault(asked, len(numbers))
        found[gang.id] = numbers.setdefault((same, gang.gpus, gang.avoid), len(numbers))
    return found


def some_hosts(placement: Placement) -> str:
    """A placement's hosts in a few words."""
    names = placement.hosts
    return names[0] if len(names) == 1 else f"{names[0]} and {count(len(names) - 1, 'more host')}"


def named_pool(pool: str | None) -> str:
    """Whose GPUs a gang uses, for people."""
    return "the pool of jobs without a pool" if pool is None else f"pool {pool}"


# Preemption: decide which gangs to stop so that a gang gets the GPUs to which it is entitled.


Rule = Callable[[Sequence[Running]], bool]

MAX_TRIES = 128
"""Pairs of victims tried one by one before victims are added up by cost."""


def cost(running: Running, now_s: float) -> tuple[int, float, float, str]:
    """Return how bad it is to stop a gang: lowest priority first, then the newest, then the least work lost."""
    saved = running.granted_s if running.checkpoint_s is None else max(running.checkpoint_s, running.granted_s)
    return (running.gang.wants.priority, -running.granted_s, running.gang.gpus * (now_s - saved), running.gang.id)


class Hunt:
    """The search for the gangs to stop for one gang. Leaves the index as it was.

    Args:
        lenders: running gangs that may be stopped, each with the GPUs that the gang may have of them.
        attempt: places the gang.
        fair: returns whether these may be stopped together.
        enough: returns whether the gang's pools would let it start without these.
    """

    def __init__(
        self,
        index: Index,
        gang: Gang,
        lenders: Sequence[tuple[Running, Masks]],
        now_s: float,
        attempt: Try,
        fair: Rule,
        enough: Rule,
    ) -> None:
        self.index, self.gang, self.attempt, self.fair, self.enough = index, gang, attempt, fair, enough
        self.ranked = sorted((running for running, _ in lenders), key=lambda running: cost(running, now_s))
        self._masks = {running.gang.id: masks for running, masks in lenders}

    def victims(self) -> tuple[tuple[Running, ...], Placement] | None:
        """Return the fewest and cheapest gangs to stop, and the gang's placement then; None if nothing helps."""
        if self._without(self.ranked) is None:
            return None
        singles = ((running,) for running in self.ranked)
        pairs = (pair for pair, _ in zip(combinations(self.ranked, 2), range(MAX_TRIES), strict=False))
        for few in (*singles, *pairs):
            placement = self._without(few) if self.fair(few) else None
            if placement is not None:
                return few, placement
        return self._many(self.ranked) or self._many(self._fairly())

    def _many(self, ranked: Sequence[Running]) -> tuple[tuple[Running, ...], Placement] | None:
        """The cheapest that are enough; of them, those on whose GPUs the gang would run and that are needed."""
        enough = self._first_enough(ranked)
        placement = self._without(enough)
        if placement is None:
            return None
        wanted = dict(self.index.masks(placement))
        hit = [run for run in enough if any(wanted.get(n, 0) & mask for n, mask in self._masks[run.gang.id])]
        chosen = tuple(self._pruned(hit if self.enough(hit) else enough))
        found = self._without(chosen)
        return (chosen, found) if found is not None and self.fair(chosen) else None

    def _fairly(self) -> list[Running]:
        taken: list[Running] = []
        for run in self.ranked:
            if self.fair([*taken, run]):
                taken.append(run)
        return taken

    def _first_enough(self, ranked: Sequence[Running]) -> Sequence[Running]:
        low, high = 1, len(ranked)
        while low < high:
            middle = (low + high) // 2
            if self._without(ranked[:middle]) is not None:
                high = middle
            else:
                low = middle + 1
        return ranked[:low]

    def _pruned(self, victims: Sequence[Running]) -> Sequence[Running]:
        """Spare victims that need not be stopped, the most expensive first."""
        kept = list(victims)
        for running in reversed(victims):
            fewer = [other for other in kept if other is not running]
            if self._without(fewer) is not None:
                kept = fewer
        return kept

    def _without(self, victims: Sequence[Running]) -> Placement | None:
        if not self.enough(victims):
            return None
        given = []
        for running in victims:
            masks = [(n, mask & ~self.index.free[n]) for n, mask in self._masks[running.gang.id]]
            self.index.give(masks)
            given.append(masks)
        placement = self.attempt(self.index, self.gang)
        for masks in given:
            self.index.take(masks)
        return placement
