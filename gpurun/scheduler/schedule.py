"""One pass: order the queue, place what fits, say why the rest waits.

docs/scheduler.md draws it. For each gang in order: does its pool allow it; does it fit; if not, may gangs on
borrowed GPUs be stopped for it; if not, the first one that waits for room is protected from those behind it: by a
reservation at its expected start where time limits give one, else, once it has been overtaken for long enough, by
hosts kept for it.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from gpurun.scheduler.book import BORROWING, Book
from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.index import Index
from gpurun.scheduler.model import ENDLESS, Decisions, Gang, Kept, Placement, Reason, Refusal, Running, Snapshot, Wait
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.waiting import Arranged, Waiting, attempt_of, shape_of


def arrange(snapshot: Snapshot, policy: Policy = DEFAULT) -> Arranged:
    """The snapshot's index, and its inventory's capacity under a policy."""
    return Arranged(Index(snapshot), Capacity(snapshot.inventory, attempt_of(policy)))


def schedule(snapshot: Snapshot, policy: Policy = DEFAULT, arranged: Arranged | None = None) -> Decisions:
    """Decide one pass. Commit all of the answer or none of it.

    Raises:
        BadInput: the pools contradict each other; the message names one.
    """
    one = Pass(snapshot, policy, arranged or arrange(snapshot, policy))
    one.keeping.keep_again(one.order, snapshot.running)
    for position, gang in enumerate(one.order):
        if policy.strict and one.first_blocked is not None:
            one.leave_waiting(one.order[position:])
            break
        one.consider(gang)
    one.keeping.undo()
    return one.decisions()


class Pass(Waiting):
    """One pass, gang by gang; `schedule` drives it."""

    def __init__(self, snapshot: Snapshot, policy: Policy, arranged: Arranged) -> None:
        super().__init__(snapshot, policy, arranged)
        self.order = _ordered(snapshot, policy, self.book)

    def leave_waiting(self, gangs: list[Gang]) -> None:
        """Say of the rest of a strict queue, once for all of it, that it waits."""
        message = f"waits behind {self.first_blocked}"
        wait = Wait(Reason.BEHIND, message, behind=self.first_blocked, starts_before=len(self.starts))
        for gang in gangs:
            if self._could_ever(gang):
                self.waits[gang.id] = wait

    def consider(self, gang: Gang) -> None:
        """Start a gang, refuse it, or say why it waits."""
        if self._as_hopeless_as_another(gang):
            return
        kept = self._drop_kept(gang) if gang.id in self.keeping.kept else None
        barred = self.book.gate(gang) if self.book is not None else None
        if isinstance(barred, Refusal):
            self.never[gang.id] = barred
        elif isinstance(barred, Wait):
            self._barred(gang, barred, kept)
        elif not (self._try_start(gang) or self._try_fewer(gang)) and gang.id not in self.waits:
            if kept is not None:
                self._keep(gang, kept)
            elif self._could_ever(gang):
                self._blocked(gang)

    def _barred(self, gang: Gang, wait: Wait, kept: Kept | None) -> None:
        """Its pool has no more for it: unless gangs of the pool's own that borrow make way."""
        if not self._could_ever(gang) or (kept is None and self._preempt_for(gang)):
            return
        if kept is not None:
            self.keeping.keep(gang.id, kept)
        self.waits[gang.id] = replace(wait, starts_before=len(self.starts))

    def decisions(self) -> Decisions:
        """The answer."""
        return Decisions(
            starts=tuple(self.starts),
            preempts=tuple(self.preempts),
            kept=self.keeping.kept,
            reserved=self.keeping.reserved_placement,
            waits=self.waits,
            never=self.never,
            order=tuple(gang.id for gang in self.order),
            entitlements=self.book.entitlements if self.book is not None else {},
            wake_s=min((at_s for at_s in self.wakes if at_s > self.now), default=None),
        )

    def _try_start(self, gang: Gang) -> bool:
        reservation = self.keeping.reservation
        late = reservation is not None and reservation.outlasted_by(gang, self.now)
        placement = self._place(gang, late=late)
        if placement is None or not self._near_enough(gang, placement):
            return False
        self.starts.append((gang, placement))
        self.running.append(Running(gang, placement, self.now))
        self.keeping.open()
        self.index.take(self.index.masks(placement))
        self.keeping.close()
        self.no_room.clear()
        self.would_fit.clear()
        if self.book is not None:
            self.book.start(gang)
        return True

    def _try_fewer(self, gang: Gang) -> bool:
        """Start an elastic gang with the most GPUs that fit; a larger gang is no easier to place."""
        step = gang.constraints.gpus_per_host or 1
        low, high = gang.least // step, (gang.gpus - 1) // step
        if gang.min_gpus is None or gang.id in self.waits or low > high or not self._fits_with(gang, low * step):
            return False
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits_with(gang, middle * step) else (low, middle - 1)
        return self._try_start(replace(gang, gpus=low * step))

    def _fits_with(self, gang: Gang, gpus: int) -> bool:
        reservation = self.keeping.reservation
        late = reservation is not None and reservation.outlasted_by(gang, self.now)
        return self._place(replace(gang, gpus=gpus), late=late) is not None

    def _near_enough(self, gang: Gang, placement: Placement) -> bool:
        """False, and a wait, if the gang still prefers to wait for something nearer than this."""
        prefer, until = gang.constraints.prefer, gang.submitted_s + gang.constraints.locality_wait_s
        spread = len(placement.racks) if prefer == "rack" else len(placement.grants)
        if not self._prefers_near(gang) or spread == 1 or self.now >= until:
            return True
        self.wakes.append(until)
        place = f"{len(placement.grants)} hosts in {len(placement.racks)} racks"
        self._wait(gang, Reason.LOCALITY, f"fits on {place}, but prefers one {prefer}", until_s=until)
        return False

    def _drop_kept(self, gang: Gang) -> Kept | None:
        self.too_large.clear()
        self.too_late.clear()
        self.no_room.clear()
        return self.keeping.drop(gang.id)

    def _as_hopeless_as_another(self, gang: Gang) -> bool:
        """True, and the same wait, if one just like it found no room and has no more patience: most of a long queue."""
        if self.book is not None or gang.id in self.keeping.kept or gang.min_gpus:
            return False
        submitted_s, wait = self.no_room.get((*shape_of(gang), gang.gpus), (ENDLESS, None))
        if wait is None or (gang.submitted_s < submitted_s and self._may_keep_hosts):
            return False
        self.waits[gang.id] = wait
        return True


def _ordered(snapshot: Snapshot, policy: Policy, book: Book | None) -> list[Gang]:
    if policy.order == "submission":
        return sorted(snapshot.queue, key=_by_submission)
    if policy.order == "duration":
        return sorted(snapshot.queue, key=_by_duration)
    if book is None:
        return sorted(snapshot.queue, key=_by_rank)
    standing = book.standing
    return sorted(snapshot.queue, key=lambda gang: (standing.get(gang.id, BORROWING), gang.rank))


_by_rank = attrgetter("rank")
_by_submission = attrgetter("submitted_s", "id")


def _by_duration(gang: Gang) -> tuple[float, float, str]:
    return (ENDLESS if gang.duration_s is None else gang.duration_s, gang.submitted_s, gang.id)
