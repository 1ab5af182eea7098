"""The state of one pass: what it knows, and what it has decided so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpurun.quantities.counts import count
from gpurun.scheduler.book import Book
from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.index import Index
from gpurun.scheduler.keeping import Hold, Keeping
from gpurun.scheduler.model import (
    ENDLESS,
    Decisions,
    Gang,
    Kept,
    Placement,
    Preemption,
    Reason,
    Refusal,
    Running,
    Snapshot,
    Wait,
)
from gpurun.scheduler.policy import Policy
from gpurun.scheduler.room import Room
from gpurun.scheduler.servers import refuse, with_servers


@dataclass
class Arranged:
    """What a caller with many passes over one inventory keeps between them.

    Attributes:
        index: must agree with the snapshot's running gangs; `schedule` adds its starts to it.
        capacity: of the snapshot's inventory.
    """

    index: Index
    capacity: Capacity


class PassState:
    """What one pass knows and has decided. `schedule` drives it; `starting` and `waiting` decide with it.

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
