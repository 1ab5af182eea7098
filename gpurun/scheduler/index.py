"""The snapshot, arranged so that a placement looks at free counts instead of at hosts.

An `Index` is built once and kept up to date as GPUs are granted and returned. Hosts are numbered in the
inventory's order, which is also the last tie-break everywhere; free GPUs of a host are the bits of one int.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpurun.inventory.model import Host
from gpurun.jobs.spec import Constraints
from gpurun.scheduler.model import Placement, Snapshot

Kind = tuple[str, str | None, int | None]
"""What hosts must share to be alike for every gang: generation, GPU model, GPU memory."""

Masks = Sequence[tuple[int, int]]
"""Host numbers, each with some of its GPUs as bits."""


class Shelf:
    """The usable hosts of one rack and one kind, by how many GPUs they have free.

    Attributes:
        number: the rack's number.
        levels: `levels[f]` = numbers of the hosts with exactly f GPUs free.
        counts: `counts[f]` = how many those are.
        free: GPUs free on the whole shelf.
        capacity: GPUs of its hosts.
        size: GPUs of each host; 0 when they differ.
    """

    __slots__ = ("capacity", "counts", "free", "kind", "levels", "number", "size")

    def __init__(self, number: int, kind: Kind, height: int) -> None:
        self.number = number
        self.kind = kind
        self.levels: list[set[int]] = [set() for _ in range(height + 1)]
        self.counts = [0] * (height + 1)
        self.free = 0
        self.capacity = 0
        self.size = -1

    @property
    def room(self) -> int:
        """GPUs that are free here, regardless of who may use them."""
        return self.free

    @property
    def empty(self) -> bool:
        """True if none of its GPUs is in use."""
        return self.free == self.capacity

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


@dataclass(frozen=True)
class Lane:
    """The shelves of one generation that serve some constraints, in the inventory's order.

    Attributes:
        racks: rack → its shelves.
        mixed: some rack has two of them.
        capacity: GPUs of all of them.
    """

    generation: str
    shelves: tuple[Shelf, ...]
    racks: Mapping[int, tuple[Shelf, ...]]
    mixed: bool
    capacity: int


class Index:
    """Free GPUs of every usable host, kept current by `take` and `give`. Not a value: its owner changes it."""

    def __init__(self, snapshot: Snapshot) -> None:
        inventory = snapshot.inventory
        self.hosts: tuple[Host, ...] = inventory.hosts
        self.number = {host.name: n for n, host in enumerate(self.hosts)}
        self.racks = _rack_names(snapshot)
        rack_number = {name: n for n, name in enumerate(self.racks)}
        self.rack_of = [rack_number[host.rack] for host in self.hosts]
        self.height = max((host.gpus for host in self.hosts), default=0)
        self.full = [(1 << host.gpus) - 1 for host in self.hosts]
        self.free = list(self.full)
        for running in snapshot.running:
            self._clear(self.masks(running.placement))
        self._clear(self.masks_of(snapshot.taken))
        self.shelf_of: list[Shelf | None] = [None] * len(self.hosts)
        self._shelves: dict[tuple[int, Kind], Shelf] = {}
        for n, host in enumerate(self.hosts):
            if host.name not in snapshot.unusable:
                self._shelve(n, host)
        self.total_free = sum(shelf.free for shelf in self._shelves.values())
        self.capacity = sum(shelf.capacity for shelf in self._shelves.values())
        self._lanes: dict[tuple[object, ...], tuple[Lane, ...]] = {}

    def _clear(self, masks: Masks) -> None:
        for n, mask in masks:
            self.free[n] &= ~mask

    def _shelve(self, n: int, host: Host) -> None:
        key = (self.rack_of[n], self.kind(n))
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = Shelf(*key, self.height)
        shelf.put(n, self.free[n].bit_count())
        shelf.capacity += host.gpus
        shelf.size = host.gpus if shelf.size in (-1, host.gpus) else 0
        self.shelf_of[n] = shelf

    def kind(self, number: int) -> Kind:
        """A host's kind."""
        host = self.hosts[number]
        return host.generation, host.gpu_model, host.gpu_memory_mib

    def lanes(self, constraints: Constraints) -> tuple[Lane, ...]:
        """One lane per generation that serves these constraints, leaving `hosts` and `avoid` aside."""
        key = (constraints.generations, constraints.gpu_model, constraints.min_gpu_memory_mib)
        lanes = self._lanes.get(key)
        if lanes is None:
            found: dict[str, list[Shelf]] = {}
            for (_, kind), shelf in sorted(self._shelves.items(), key=lambda item: item[0][0]):
                if serves(kind, constraints):
                    found.setdefault(kind[0], []).append(shelf)
            lanes = self._lanes[key] = tuple(_lane(name, found[name]) for name in sorted(found))
        return lanes

    def free_on_empty_hosts(self) -> int:
        """GPUs of the usable hosts on which nothing runs."""
        return sum(
            shelf.size * shelf.counts[shelf.size]
            if shelf.size
            else sum(self.free[n].bit_count() for level in shelf.levels for n in level if self.free[n] == self.full[n])
            for shelf in self._shelves.values()
        )

    def masks(self, placement: Placement) -> Masks:
        """A placement's GPUs as bits. Hosts that are not in the inventory any more are left out."""
        return [
            (n, mask_of(grant.gpus) & self.full[n])
            for grant in placement.grants
            if (n := self.number.get(grant.host)) is not None
        ]

    def masks_of(self, gpus: Mapping[str, Iterable[int]]) -> Masks:
        """GPUs by host name as bits. Hosts that are not in the inventory any more are left out."""
        return [
            (n, mask_of(some) & self.full[n]) for host, some in gpus.items() if (n := self.number.get(host)) is not None
        ]

    def take(self, masks: Masks) -> None:
        """Mark GPUs as used."""
        for n, mask in masks:
            self._move(n, self.free[n] & ~mask)

    def give(self, masks: Masks) -> None:
        """Mark GPUs as free."""
        for n, mask in masks:
            self._move(n, self.free[n] | mask)

    def hold(self, masks: Masks) -> Masks:
        """Take those of these GPUs that are free, and say which they were: `give` them back later."""
        held = [(n, mask & self.free[n]) for n, mask in masks if mask & self.free[n]]
        self.take(held)
        return held

    def usable(self, placement: Placement) -> bool:
        """True if all of its hosts are in the inventory, usable, and have these GPUs."""
        return all(
            (n := self.number.get(grant.host)) is not None
            and self.shelf_of[n] is not None
            and not mask_of(grant.gpus) & ~self.full[n]
            for grant in placement.grants
        )

    def _move(self, n: int, free: int) -> None:
        shelf, was = self.shelf_of[n], self.free[n]
        self.free[n] = free
        if shelf is not None and free != was:
            before, after = was.bit_count(), free.bit_count()
            shelf.drop(n, before)
            shelf.put(n, after)
            self.total_free += after - before


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


def indices(mask: int) -> Iterator[int]:
    """Bits as GPU indices, ascending."""
    return (n for n in range(mask.bit_length()) if mask >> n & 1)


def _lane(generation: str, shelves: list[Shelf]) -> Lane:
    racks: dict[int, tuple[Shelf, ...]] = {}
    for shelf in shelves:
        racks[shelf.number] = (*racks.get(shelf.number, ()), shelf)
    capacity = sum(shelf.capacity for shelf in shelves)
    return Lane(generation, tuple(shelves), racks, len(racks) < len(shelves), capacity)


def _rack_names(snapshot: Snapshot) -> tuple[str, ...]:
    names = dict.fromkeys(rack.name for rack in snapshot.inventory.racks)
    names.update(dict.fromkeys(host.rack for host in snapshot.inventory.hosts))
    return tuple(names)
