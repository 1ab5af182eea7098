"""How a pass places a gang, and whether and where the gang could ever run. Every part of a pass uses this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter

from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Constraints, Locality
from gpurun.quantities.counts import count
from gpurun.scheduler.index import Index, Lane, serves
from gpurun.scheduler.model import Gang, Placement, Reason, Refusal, Snapshot
from gpurun.scheduler.racks import Need, need_of

Try = Callable[[Index, Gang], Placement | None]
"""Where a gang fits on an index, which stays as it was; None if it does not fit."""

by_value = attrgetter(*(field.name for field in fields(Constraints)))
"""What is asked of hosts; equal for equal constraints, in whatever objects they are."""


class Capacity:
    """Placement on the inventory with every host usable and no gang running. Caches its answers.

    Args:
        attempt: how gangs are placed, such as `try_place`.
    """

    def __init__(self, inventory: Inventory, attempt: Callable[..., Placement | None]) -> None:
        self._empty = Index(Snapshot(inventory))
        self._attempt = attempt
        self._shapes: dict[tuple[object, ...], int] = {}
        self._holds: dict[tuple[int, int], bool] = {}
        self._avoids: dict[tuple[int, int], tuple[str, ...]] = {}

    def shape(self, gang: Gang) -> int:
        """Equal for gangs that ask the same of their hosts, by value."""
        key = gang.avoid, by_value(gang.wants.constraints)
        shape = self._shapes.get(key)
        return self._shapes.setdefault(key, len(self._shapes)) if shape is None else shape

    def place(self, index: Index, gang: Gang, locality: Locality | None = None) -> Placement | None:
        """Return the gang's placement on an index; None if there is none. Avoids hosts on which it failed, as
        `avoiding` says.

        Args:
            locality: instead of the gang's own.
        """
        return self._attempt(index, self.avoiding(gang), locality=locality)

    def need(self, index: Index, gang: Gang) -> Need:
        """Return the hosts of an index that may serve the gang, by the rules of `place`."""
        return need_of(index, self.avoiding(gang))

    def may_use(self, index: Index, gang: Gang) -> Callable[[int], bool]:
        """Return a function that says whether the gang may run on a host, given by number, by the rules of `place`."""
        need = self.need(index, gang)
        return lambda number: serves(index.kind(number), gang.wants.constraints) and need.admits(number)

    def could_hold(self, gang: Gang) -> bool:
        """Return True if the fewest GPUs of the gang fit into the empty inventory, including hosts on which it
        failed.
        """
        key = (self.shape(gang), gang.least)
        known = self._holds.get(key)
        if known is None:
            known = self._holds[key] = self._attempt(self._empty, gang.smallest, avoid=False) is not None
        return known

    def avoiding(self, gang: Gang) -> Gang:
        """Return the gang with the hosts that it really avoids: the last failed ones, as many as the inventory can
        spare.
        """
        if not gang.avoid:
            return gang
        key = (self.shape(gang), gang.least)
        avoid = self._avoids.get(key)
        if avoid is None:
            avoid = self._avoids[key] = self._spared(gang.smallest)
        return gang if avoid == gang.avoid else gang.but(avoid=avoid)

    def _spared(self, gang: Gang) -> tuple[str, ...]:
        """Without more hosts a gang is no easier to place, so the search is binary. Mostly all can be spared."""
        low, high = 0, len(gang.avoid)
        if self._attempt(self._empty, gang) is not None:
            return gang.avoid
        while low < high:
            middle = (low + high) // 2
            if self._attempt(self._empty, gang.but(avoid=gang.avoid[middle:])) is not None:
                high = middle
            else:
                low = middle + 1
        return gang.avoid[low:]

    def refuse(self, index: Index, gang: Gang) -> Refusal:
        """Return why the gang does not fit on an index."""
        if not self.could_hold(gang):
            return Refusal(True, Reason.IMPOSSIBLE, self._never(gang))
        lanes = index.lanes(gang.wants.constraints)
        free = max((sum(shelf.free for shelf in lane.shelves) for lane in lanes), default=0)
        but = ", but not in the arrangement that the job needs" if free >= gang.least else ""
        are = count(free, "suitable GPU of one generation is", "suitable GPUs of one generation are")
        return Refusal(False, Reason.NO_ROOM, f"{_needs(gang)}; {are} free for the job{but}")

    def _never(self, gang: Gang) -> str:
        asked, lanes = gang.wants.constraints, self._empty.lanes(gang.wants.constraints)
        if not lanes:
            return f"no host of the inventory has suitable GPUs ({_asked(gang)})"
        if asked.gpus_per_host and gang.least % asked.gpus_per_host:
            return f"{count(gang.gpus, 'GPU')} cannot be split into {asked.gpus_per_host} per host"
        unknown = sorted(name for name in asked.hosts if name not in self._empty.number)
        if unknown:
            return f"host {unknown[0]!r} is not in the inventory"
        most = max((lane.capacity for lane in lanes), default=0)
        if gang.least > most:
            return f"{_needs(gang)}; the inventory has at most {count(most, 'suitable GPU')} of one generation"
        if asked.hosts and not set(asked.hosts) - set(asked.avoid):
            return f"{_needs(gang)}; all named hosts are also among the hosts to avoid"
        return f"{_needs(gang)}; no suitable hosts of the inventory have so many GPUs ({_asked(gang)})"


def share_of(lanes: tuple[Lane, ...], gpus: int) -> float:
    """Return the part of its largest usable generation that a gang needs, 0 … 1."""
    most = max((lane.capacity for lane in lanes), default=0)
    return min(1.0, gpus / most) if most else 1.0


def _needs(gang: Gang) -> str:
    return f"the job needs {'at least ' if gang.least < gang.gpus else ''}{count(gang.least, 'GPU')}"


def _asked(gang: Gang) -> str:
    asked = gang.wants.constraints
    parts = [
        f"generation {' or '.join(asked.generations)}" if asked.generations else "",
        f"model {asked.gpu_model}" if asked.gpu_model else "",
        f"at least {asked.min_gpu_memory_mib} MiB of memory" if asked.min_gpu_memory_mib else "",
        f"{count(asked.gpus_per_host, 'GPU')} per host" if asked.gpus_per_host else "",
        f"locality {asked.locality}" if asked.locality != "any" else "",
        count(len(asked.hosts), "named host") if asked.hosts else "",
        f"without {count(len(asked.avoid), 'host')}" if asked.avoid else "",
        "one NVLink island per host" if asked.nvlink else "",
    ]
    return ", ".join(part for part in parts if part) or "any"
