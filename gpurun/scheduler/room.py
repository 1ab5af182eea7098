"""What fits now: free GPUs, without those that are held for other gangs."""

from __future__ import annotations

from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.index import Index
from gpurun.scheduler.keeping import Keeping
from gpurun.scheduler.model import Gang, Placement


class Room:
    """Places gangs during one pass, and remembers what found no room.

    It assumes that a larger gang of the same shape is no easier to place.
    """

    def __init__(self, index: Index, capacity: Capacity, keeping: Keeping) -> None:
        self.index, self.capacity, self.keeping = index, capacity, keeping
        self._shapes: dict[str, int] = {}  # by gang
        self._too_large: dict[tuple[int, tuple[str, ...]], int] = {}  # the smallest gang that found no room
        self._fits_beside: dict[int, int] = {}  # by shape: the largest gang that only timed holds keep out

    def shape(self, gang: Gang) -> int:
        """The gang's `Capacity.shape`, looked up once in a pass."""
        shape = self._shapes.get(gang.id)
        if shape is None:
            shape = self._shapes[gang.id] = self.capacity.shape(gang)
        return shape

    def place(self, gang: Gang) -> Placement | None:
        """Where the gang goes now, None if nowhere. GPUs held for others count only if it ends in time."""
        return self._place(gang, self.keeping.against(gang))

    def largest(self, gang: Gang, most: int) -> Placement | None:
        """Where the gang goes with the most GPUs that fit: `most`, or fewer if it is elastic."""
        placement = self.place(gang.sized(most))
        low, high = gang.least // gang.step, most // gang.step - 1
        if placement is not None or gang.min_gpus is None or low > high:
            return placement
        placement = self.place(gang.sized(low * gang.step))
        while placement is not None and low < high:
            middle = (low + high + 1) // 2
            found = self.place(gang.sized(middle * gang.step))
            low, high, placement = (middle, high, found) if found is not None else (low, middle - 1, placement)
        return placement

    def fits_without_timed_holds(self, gang: Gang) -> bool:
        """Returns True if the gang would fit but for GPUs that are held for others until a known time."""
        if not self.keeping.against(gang):
            return False
        shape = self.shape(gang)
        if gang.least <= self._fits_beside.get(shape, 0):
            return True
        if self._place(gang.smallest, ()) is None:
            return False
        self._fits_beside[shape] = gang.least
        return True

    def take(self, placement: Placement) -> None:
        """Mark a placement's GPUs as used."""
        self.keeping.open(())
        self.index.take(self.index.masks(placement))
        self.keeping.close()
        self._fits_beside.clear()

    def forget(self) -> None:
        """Forget which gangs found no room, because GPUs have become free or are no longer kept for a gang."""
        self._too_large.clear()

    def _place(self, gang: Gang, against: tuple[str, ...]) -> Placement | None:
        if gang.gpus % gang.step:
            return None
        key = (self.shape(gang), against)
        if gang.gpus >= self._too_large.get(key, gang.gpus + 1):
            return None
        self.keeping.open(against)
        placement = self._nearest(gang)
        self.keeping.close()
        if placement is None:
            self._too_large[key] = gang.gpus
        return placement

    def _nearest(self, gang: Gang) -> Placement | None:
        placement = None
        if gang.waits_to_be_near:
            placement = self.capacity.place(self.index, gang, gang.constraints.prefer)
        return placement or self.capacity.place(self.index, gang)
