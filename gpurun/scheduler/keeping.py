"""GPUs that a pass keeps from some gangs: claims, and the reservation of the first gang that waits for room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpurun.scheduler.index import Index, Masks
from gpurun.scheduler.model import Gang, Placement


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
        return gang.time_limit_s is None or now_s + gang.time_limit_s > self.at_s


class Keeping:
    """Takes kept GPUs out of the index, and puts every one back in `undo`.

    Attributes:
        claims: gang → the GPUs kept for it after this pass.
        reservation: at most one, made during the pass.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.claims: dict[str, Placement] = {}
        self.reservation: Reservation | None = None
        self._held: dict[str, Masks] = {}
        self._reserved: Masks = ()

    def claim_all(self, queue: Iterable[Gang]) -> None:
        """Keep what earlier passes promised. A claim with a host that cannot be used any more is dropped."""
        for gang in queue:
            if gang.claim is not None and self.index.usable(gang.claim):
                self.claim(gang.id, gang.claim)

    def claim(self, gang: str, placement: Placement) -> None:
        """Keep a placement's GPUs, free now or later, for a gang."""
        self.claims[gang] = placement
        self._held[gang] = self.index.hold(self.index.masks(placement))

    def drop(self, gang: str) -> Placement | None:
        """Let go of a gang's claim, if it has one."""
        self.index.give(self._held.pop(gang, ()))
        return self.claims.pop(gang, None)

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
