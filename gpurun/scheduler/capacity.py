"""What the inventory could ever hold, and the refusal of what it could not."""

from __future__ import annotations

from collections.abc import Callable

from gpurun.inventory.model import Inventory
from gpurun.scheduler.index import Index, Lane
from gpurun.scheduler.model import Gang, Placement, Reason, Refusal, Snapshot

Try = Callable[[Index, Gang], Placement | None]


class Capacity:
    """The inventory with every host usable and nothing running; remembers what it was asked.

    Args:
        attempt: how a gang is placed.
    """

    def __init__(self, inventory: Inventory, attempt: Callable[..., Placement | None]) -> None:
        self._empty = Index(Snapshot(inventory))
        self._attempt = attempt
        self._known: dict[tuple[object, int], bool] = {}

    def could_hold(self, gang: Gang) -> bool:
        """True if the gang fits into the empty inventory, hosts it failed on before included."""
        key = (gang.constraints, gang.gpus)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._attempt(self._empty, gang, avoid=False) is not None
        return known

    def could_avoid(self, gang: Gang) -> bool:
        """True if the gang fits into the empty inventory without the hosts it failed on before."""
        return self._attempt(self._empty, gang) is not None

    def refuse(self, index: Index, gang: Gang) -> Refusal:
        """Why the gang is not placed on this index, on which it does not fit."""
        if not self.could_hold(gang):
            return Refusal(True, Reason.IMPOSSIBLE, self._never(gang))
        lanes = index.lanes(gang.constraints)
        free = max((sum(shelf.free for shelf in lane.shelves) for lane in lanes), default=0)
        asked = _plural(gang.gpus, "GPU")
        but = ", but not as it needs them" if free >= gang.gpus else ""
        return Refusal(
            False, Reason.NO_ROOM, f"{asked} wanted; {free} such GPUs of one generation are free for it{but}"
        )

    def _never(self, gang: Gang) -> str:
        wants, lanes = gang.constraints, self._empty.lanes(gang.constraints)
        if not lanes:
            return f"no host of the inventory has such GPUs ({_asked(gang)})"
        if wants.gpus_per_host and gang.gpus % wants.gpus_per_host:
            return f"{_plural(gang.gpus, 'GPU')} cannot be split into {wants.gpus_per_host} per host"
        unknown = sorted(name for name in wants.hosts if name not in self._empty.number)
        if unknown:
            return f"host {unknown[0]!r} is not in the inventory"
        most = max((lane.capacity for lane in lanes), default=0)
        if gang.gpus > most:
            return f"{_plural(gang.gpus, 'GPU')} wanted; the inventory has at most {most} such GPUs of one generation"
        return f"{_plural(gang.gpus, 'GPU')} wanted; no hosts of the inventory could give them ({_asked(gang)})"


def share_of(lanes: tuple[Lane, ...], gpus: int) -> float:
    """How much of the largest generation that serves it a gang needs, 0 … 1."""
    most = max((lane.capacity for lane in lanes), default=0)
    return min(1.0, gpus / most) if most else 1.0


def _asked(gang: Gang) -> str:
    wants = gang.constraints
    parts = [
        f"generation {' or '.join(wants.generations)}" if wants.generations else "",
        f"model {wants.gpu_model}" if wants.gpu_model else "",
        f"at least {wants.min_gpu_memory_mib} MiB of memory" if wants.min_gpu_memory_mib else "",
        f"{wants.gpus_per_host} GPUs per host" if wants.gpus_per_host else "",
        f"locality {wants.locality}" if wants.locality != "any" else "",
        f"{len(wants.hosts)} named hosts" if wants.hosts else "",
        f"without {len(wants.avoid)} hosts" if wants.avoid else "",
        "one NVLink island per host" if wants.nvlink else "",
    ]
    return ", ".join(part for part in parts if part) or "any"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
