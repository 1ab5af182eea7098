"""GPUs that a pass keeps from some gangs: those kept over passes, and the reservation of the first gang that waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpurun.scheduler.index import Index, Masks
from gpurun.scheduler.model import Gang, Kept, Placement, Running


@dataclass(frozen=True)
class Reservation:
    """GPUs for the first gang that waits for room, at its expected start.

    Attributes:
        at_s: when it starts if every running gang uses its whole time limit.
    """

    gang: str
    at_s: float
    placement: Placement
    masks: Masks

    def outlasted_by(self, gang: Gang, now_s: float) -> bool:
        """True if a gang that starts now may still run at the reserved time."""
        return now_s + gang.longest_s > self.at_s


class Keeping:
    """Takes kept GPUs out of the index, and puts every one back in `undo`.

    Attributes:
        kept: gang → the GPUs kept for it after this pass.
        reservation: at most one, made during the pass.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.kept: dict[str, Kept] = {}
        self.reservation: Reservation | None = None
        self._held: dict[str, Masks] = {}
        self._reserved: Masks = ()

    def keep_again(self, queue: Iterable[Gang], running: Iterable[Running]) -> None:
        """Keep what earlier passes kept, except what no longer helps the gang.

        That is a placement on a host that is lost or gone, and one for which gangs should stop that have not been
        told to: this pass decides again whom to stop.
        """
        going_on: dict[int, int] = {}
        for run in running:
            for n, mask in () if run.stopping else self.index.masks(run.placement):
                going_on[n] = going_on.get(n, 0) | mask
        for gang in queue:
            kept = gang.kept
            if kept is None or not self.index.usable(kept.placement):
                continue
            blocked = any(going_on.get(n, 0) & mask for n, mask in self.index.masks(kept.placement))
            if kept.why == "patience" or not blocked:
                self.keep(gang.id, kept)

    def keep(self, gang: str, kept: Kept) -> None:
        """Keep a placement's GPUs, free now or later, for a gang."""
        self.kept[gang] = kept
        self._held[gang] = self.index.hold(self.index.masks(kept.placement))

    def drop(self, gang: str) -> Kept | None:
        """Release what is kept for a gang. Returns it, None if there was nothing."""
        self.index.give(self._held.pop(gang, ()))
        return self.kept.pop(gang, None)

    def reserve(self, reservation: Reservation) -> None:
        """Keep the reservation's GPUs from here on."""
        self.reservation = reservation
        self.close()

    @property
    def reserved_placement(self) -> dict[str, Placement]:
        """The reservation as `Decisions.reserved` has it."""
        kept = self.reservation
        return {} if kept is None else {kept.gang: kept.placement}

    def open(self) -> None:
        """Let the next gang use reserved GPUs: it ends before they are needed."""
        self.index.give(self._reserved)
        self._reserved = ()

    def close(self) -> None:
        """Keep what is free of the reserved GPUs."""
        if self.reservation is not None:
            self._reserved = [*self._reserved, *self.index.hold(self.reservation.masks)]

    def undo(self) -> None:
        """Leave in the index only what really is in use."""
        self.open()
        for masks in self._held.values():
            self.index.give(masks)
        self._held.clear()
