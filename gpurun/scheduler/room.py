"""What fits now: free GPUs, without those that are held for other gangs."""

from __future__ import annotations

from gpurun.scheduler.capacity import Try
from gpurun.scheduler.index import Index
from gpurun.scheduler.keeping import Keeping
from gpurun.scheduler.model import Gang, Placement


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
