"""What becomes of a gang that does not fit: stop borrowers for it, reserve, keep hosts, or just wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpurun.scheduler.book import BORROWING, Book
from gpurun.scheduler.capacity import Capacity, share_of
from gpurun.scheduler.consolidate import try_consolidated
from gpurun.scheduler.future import Release, first_fit
from gpurun.scheduler.index import Index
from gpurun.scheduler.keeping import Keeping, Reservation
from gpurun.scheduler.model import ENDLESS, Gang, Kept, Placement, Preemption, Reason, Refusal, Running, Snapshot, Wait
from gpurun.scheduler.placement import try_place
from gpurun.scheduler.policy import Policy
from gpurun.scheduler.preempt import Hunt


@dataclass
class Arranged:
    """What a caller with many passes over one inventory keeps between them.

    Attributes:
        index: must agree with the snapshot's running gangs; `schedule` adds its starts to it.
        capacity: of the snapshot's inventory.
    """

    index: Index
    capacity: Capacity


def attempt_of(policy: Policy) -> Callable[..., Placement | None]:
    """How a policy places one gang."""
    return try_consolidated if policy.consolidate else try_place


class Waiting:
    """The state of one pass, and what it does for gangs that do not fit."""

    def __init__(self, snapshot: Snapshot, policy: Policy, arranged: Arranged) -> None:
        self.policy, self.now = policy, snapshot.now_s
        self.index, self.capacity = arranged.index, arranged.capacity
        self.running = list(snapshot.running)
        self.attempt = attempt_of(policy)
        pools = policy.pools and snapshot.inventory.pools
        self.book = Book(snapshot, self.index.capacity) if pools else None
        self.keeping = Keeping(self.index)
        self.starts: list[tuple[Gang, Placement]] = []
        self.preempts: list[Preemption] = []
        self.waits: dict[str, Wait] = {}
        self.never: dict[str, Refusal] = {}
        self.first_blocked: str | None = None
        self.wakes: list[float] = []
        self.lenders = self._find_lenders()
        self.too_large: dict[tuple[object, ...], int] = {}  # by shape: the smallest gang that found no room
        self.too_late: dict[tuple[object, ...], int] = {}  # the same beside the reservation
        self.would_fit: dict[tuple[object, ...], int] = {}  # the largest that only the reservation keeps out
        self.no_room: dict[tuple[object, ...], tuple[float, Wait]] = {}  # by shape and size, since the last start

    def _place(self, gang: Gang, *, late: bool) -> Placement | None:
        """Where a gang would go now; `late`: it must leave the reserved GPUs alone."""
        bounds, shape = (self.too_late if late else self.too_large), shape_of(gang)
        if gang.gpus >= bounds.get(shape, gang.gpus + 1):
            return None
        if not late:
            self.keeping.open()
        placement = self._best(gang)
        self.keeping.close()
        if placement is None:
            bounds[shape] = gang.gpus
        return placement

    def _best(self, gang: Gang) -> Placement | None:
        placement = None
        if self._prefers_near(gang):
            placement = self.attempt(self.index, gang, locality=gang.constraints.prefer)
        if placement is None:
            placement = self.attempt(self.index, gang)
        if placement is None and gang.avoid and not self.capacity.could_avoid(gang):
            placement = self.attempt(self.index, gang, avoid=False)
        return placement

    def _prefers_near(self, gang: Gang) -> bool:
        wants = gang.constraints
        return wants.locality_wait_s > 0 and wants.prefer != "any" and wants.locality == "any"

    def _could_ever(self, gang: Gang) -> bool:
        if self.capacity.could_hold(gang if gang.min_gpus is None else replace(gang, gpus=gang.least)):
            return True
        self.never[gang.id] = self.capacity.refuse(self.index, gang)
        return False

    def _blocked(self, gang: Gang) -> None:
        if self._preempt_for(gang) or self._beside_reserved(gang):
            return
        if self.first_blocked is None:
            self.first_blocked = gang.id
            if not self.policy.strict and self._reserve_for(gang):
                return
        left = self._patience_left(gang)
        if left <= 0 and self._keep_hosts_for(gang):
            return
        self.wakes.append(self.now + left)
        message = self.capacity.refuse(self.index, gang).message
        wait = self.waits[gang.id] = Wait(Reason.NO_ROOM, message, starts_before=len(self.starts))
        self.no_room[(*shape_of(gang), gang.gpus)] = gang.submitted_s, wait

    @property
    def _may_keep_hosts(self) -> bool:
        return not (
            self.policy.strict
            or any(kept.why == "patience" for kept in self.keeping.kept.values())
            or self.keeping.reservation is not None
        )

    def _beside_reserved(self, gang: Gang) -> bool:
        """True, and a wait, if only the reservation keeps the gang from starting."""
        reservation, shape = self.keeping.reservation, shape_of(gang)
        if reservation is None:
            return False
        if gang.gpus > self.would_fit.get(shape, 0):
            if self._place(gang, late=False) is None:
                return False
            self.would_fit[shape] = gang.gpus
        message = f"would fit, but could delay the start of {reservation.gang}"
        self._wait(gang, Reason.RESERVED, message, behind=reservation.gang, until_s=None)
        return True

    def _reserve_for(self, gang: Gang) -> bool:
        """EASY: reserve at the earliest time at which the gang fits if the others use their whole time limits."""
        ends = [(self._ends_s(running), running) for running in self.running]
        releases = [
            Release(at_s, run.gang.id, self.index.masks(run.placement)) for at_s, run in ends if at_s != ENDLESS
        ]
        found = first_fit(self.index, gang, releases, self._attempt)
        if found is None:
            return False
        at_s, placement = found
        self.keeping.reserve(Reservation(gang.id, at_s, placement, self.index.masks(placement)))
        message = f"{gang.gpus} GPUs wanted; {_hosts(placement)} are reserved for when time limits end"
        self._wait(gang, Reason.NO_ROOM, message, expected_start_s=at_s)
        return True

    def _keep_hosts_for(self, gang: Gang) -> bool:
        """After its patience: keep the hosts that are likely to be free soonest. For one gang at a time.

        How long a gang still runs is guessed as long as it has run, as durations are heavy-tailed.
        """
        if not self._may_keep_hosts:
            return False
        releases = [
            Release(min(2 * self.now - run.granted_s, self._ends_s(run)), run.gang.id, self.index.masks(run.placement))
            for run in self.running
        ]
        found = first_fit(self.index, gang, releases, self._attempt)
        if found is None:
            return False
        self._keep(gang, Kept(found[1], "patience"))
        return True

    def _keep(self, gang: Gang, kept: Kept) -> None:
        masks = dict(self.index.masks(kept.placement))
        ends = [self.now]
        for run in self.running:
            if any(masks.get(n, 0) & mask for n, mask in self.index.masks(run.placement)):
                ends.append(self._ends_s(run))
        self.keeping.keep(gang.id, kept)
        message = f"{_hosts(kept.placement)} are kept for it and come free one after the other"
        self._wait(gang, Reason.KEPT, message, expected_start_s=None if max(ends) == ENDLESS else max(ends))

    def _preempt_for(self, gang: Gang) -> bool:
        """Stop gangs that run on borrowed GPUs, if this one is entitled to them."""
        if self.book is None or not self.lenders or self.book.standing[gang.id] == BORROWING:
            return False
        book = self.book
        hunt = Hunt(
            self.index,
            gang,
            self.lenders,
            self.now,
            self._attempt,
            fair=lambda runs: book.may_take([run.gang for run in runs]),
            enough=lambda runs: book.passes_without(gang, [run.gang for run in runs]),
        )
        found = hunt.victims()
        if found is None:
            return False
        victims, placement = found
        for run in victims:
            book.stop(run.gang)
            message = (
                f"pool {run.gang.pool} gives back what it borrowed: {gang.id} of pool {gang.pool} is entitled to it"
            )
            self.preempts.append(Preemption(run.gang.id, gang.id, message))
        self.lenders = [run for run in self.lenders if run not in victims and book.lends(run.gang)]
        self.running = [replace(run, stopping=True) if run in victims else run for run in self.running]
        self.book.start(gang)
        self._keep(gang, Kept(placement, "preemption"))
        return True

    def _find_lenders(self) -> list[Running]:
        if self.book is None:
            return []
        least, book = self.policy.min_run_s, self.book
        borrowing = [run for run in self.running if not run.stopping and book.lends(run.gang)]
        self.wakes += [run.granted_s + least for run in borrowing]
        return [run for run in borrowing if self.now - run.granted_s >= least]

    def _attempt(self, index: Index, gang: Gang) -> Placement | None:
        return self.attempt(index, gang)

    def _ends_s(self, run: Running) -> float:
        return run.free_s(self.now)

    def _patience_left(self, gang: Gang) -> float:
        """Seconds for which the gang may still be overtaken; see `Policy.patience_s`."""
        patience = self.policy.patience_s
        if gang.gpus > self.index.height:
            patience *= min(1.0, (2 * share_of(self.index.lanes(gang.constraints), gang.gpus)) ** 4)
        return gang.submitted_s + patience - self.now

    def _wait(self, gang: Gang, reason: Reason, message: str, **more: Any) -> None:
        self.waits[gang.id] = Wait(reason, message, starts_before=len(self.starts), **more)


def shape_of(gang: Gang) -> tuple[object, ...]:
    """Gangs of one shape differ only in size: if one finds no room, no larger one does."""
    return (id(gang.constraints), gang.avoid)


def _hosts(placement: Placement) -> str:
    names = placement.hosts
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
