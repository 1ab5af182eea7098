"""The snapshot, arranged so that a placement looks at free counts instead of at hosts.

An `Index` is built once per pass and kept up to date as the pass grants and returns GPUs. Hosts are numbered in
the inventory's order, which is also the last tie-break everywhere; free GPUs of a host are the bits of one int.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpurun.inventory.model import Host
from gpurun.jobs.spec import Constraints
from gpurun.scheduler.model import Placement, Snapshot

Kind = tuple[str, str | None, int | None]
"""What hosts must share to be alike for every gang: generation, GPU model, GPU memory."""


class Shelf:
    """The hosts of one rack and one kind, by how many GPUs they have free.

    Attributes:
        rack: the rack's number.
        levels: `levels[f]` = numbers of the hosts with exactly f GPUs free.
        counts: `counts[f]` = how many those are.
        free: GPUs free on the whole shelf.
        capacity: GPUs of the shelf's usable hosts.
    """

    __slots__ = ("capacity", "counts", "free", "kind", "levels", "rack")

    def __init__(self, rack: int, kind: Kind, height: int) -> None:
        self.rack = rack
        self.kind = kind
        self.levels: list[set[int]] = [set() for _ in range(height + 1)]
        self.counts = [0] * (height + 1)
        self.free = 0
        self.capacity = 0

    def put(self, host: int, free: int) -> None:
        """Add a host that has `free` GPUs free."""
        self.levels[free].add(host)
        self.counts[free] += 1
        self.free += free

    def drop(self, host: int, free: int) -> None:
        """Take a host out that was put with `free`."""
        self.levels[free].remove(host)
        self.counts[free] -= 1
        self.free -= free


class Index:
    """Free GPUs of every usable host, kept current by `take` and `give`.

    Not a value: one pass owns one index.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        inventory = snapshot.inventory
        self.snapshot = snapshot
        self.hosts: tuple[Host, ...] = inventory.hosts
        self.number = {host.name: n for n, host in enumerate(self.hosts)}
        self.racks = _rack_names(snapshot)
        rack_number = {name: n for n, name in enumerate(self.racks)}
        self.height = max((host.gpus for host in self.hosts), default=0)
        self.full = [(1 << host.gpus) - 1 for host in self.hosts]
        self.free = list(self.full)
        self._subtract(snapshot)
        self.shelf_of: list[Shelf | None] = [None] * len(self.hosts)
        self.shelves: dict[tuple[int, Kind], Shelf] = {}
        unusable = snapshot.unusable
        for n, host in enumerate(self.hosts):
            if host.name in unusable:
                continue
            key = (rack_number[host.rack], (host.generation, host.gpu_model, host.gpu_memory_mib))
            shelf = self.shelves.get(key)
            if shelf is None:
                shelf = self.shelves[key] = Shelf(*key, self.height)
            shelf.put(n, self.free[n].bit_count())
            shelf.capacity += host.gpus
            self.shelf_of[n] = shelf
        self._lanes: dict[tuple[object, ...], dict[str, list[Shelf]]] = {}

    def _subtract(self, snapshot: Snapshot) -> None:
        free, number = self.free, self.number
        for running in snapshot.running:
            for grant in running.placement.grants:
                n = number.get(grant.host)
                if n is not None:  # a host that left the inventory keeps its lease until it is fenced
                    free[n] &= ~mask_of(grant.gpus)
        for name, gpus in snapshot.taken.items():
            n = number.get(name)
            if n is not None:
                free[n] &= ~mask_of(gpus)

    def lanes(self, constraints: Constraints) -> dict[str, list[Shelf]]:
        """Generation → its shelves that serve these constraints, leaving `hosts` and `avoid` aside."""
        key = (constraints.generations, constraints.gpu_model, constraints.min_gpu_memory_mib)
        lanes = self._lanes.get(key)
        if lanes is None:
            lanes = {}
            for _, shelf in sorted(self.shelves.items(), key=lambda item: item[0][0]):
                if serves(shelf.kind, constraints):
                    lanes.setdefault(shelf.kind[0], []).append(shelf)
            lanes = self._lanes[key] = {name: lanes[name] for name in sorted(lanes)}
        return lanes

    def take(self, placement: Placement) -> None:
        """Mark a placement's GPUs as used. They must be free."""
        for n, mask in self._masks(placement):
            self._move(n, self.free[n] & ~mask)

    def give(self, placement: Placement) -> None:
        """Mark a placement's GPUs as free again. Hosts that left the inventory are passed over."""
        for n, mask in self._masks(placement):
            self._move(n, self.free[n] | mask)

    def holds(self, placement: Placement) -> bool:
        """True if every GPU of the placement is free now on a usable host."""
        hosts = [grant.host for grant in placement.grants]
        return all(host in self.number for host in hosts) and all(
            self.shelf_of[n] is not None and self.free[n] & mask == mask for n, mask in self._masks(placement)
        )

    def _masks(self, placement: Placement) -> Iterator[tuple[int, int]]:
        for grant in placement.grants:
            n = self.number.get(grant.host)
            if n is not None:
                yield n, mask_of(grant.gpus) & self.full[n]

    def _move(self, n: int, free: int) -> None:
        shelf = self.shelf_of[n]
        if shelf is not None:
            shelf.drop(n, self.free[n].bit_count())
            shelf.put(n, free.bit_count())
        self.free[n] = free


def serves(kind: Kind, constraints: Constraints) -> bool:
    """True if hosts of this kind have GPUs that the constraints accept."""
    generation, model, memory = kind
    if constraints.generations and generation not in constraints.generations:
        return False
    if constraints.gpu_model is not None and model != constraints.gpu_model:
        return False
    least = constraints.min_gpu_memory_mib
    return least is None or (memory is not None and memory >= least)


def mask_of(gpus: Iterable[int]) -> int:
    """GPU indices as bits."""
    mask = 0
    for gpu in gpus:
        mask |= 1 << gpu
    return mask


def _rack_names(snapshot: Snapshot) -> tuple[str, ...]:
    names = dict.fromkeys(rack.name for rack in snapshot.inventory.racks)
    names.update(dict.fromkeys(host.rack for host in snapshot.inventory.hosts))
    return tuple(names)
