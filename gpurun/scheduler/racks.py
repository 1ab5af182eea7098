"""A gang's view of one generation: racks as candidates, each a ladder of hosts that may serve it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gpurun.jobs.spec import Locality
from gpurun.scheduler.gpus import usable_in_island
from gpurun.scheduler.index import Index, Lane, Shelf
from gpurun.scheduler.model import Gang


@dataclass(frozen=True)
class Need:
    """What a gang asks of racks and hosts.

    Attributes:
        per_host: exactly this many GPUs on each host; None = any number.
        hosts: host numbers it may use; None = all.
        avoid: host numbers it may not use.
        nvlink: only GPUs of one island count.
        plain: every host of the right kind serves, with all of its free GPUs.
        near: host numbers it prefers where nothing else tells two answers apart.
    """

    gpus: int
    per_host: int | None
    locality: Locality
    hosts: frozenset[int] | None
    avoid: frozenset[int]
    nvlink: bool
    plain: bool
    near: frozenset[int] = frozenset()

    def admits(self, host: int) -> bool:
        """Returns True if the gang may use a host of the right kind."""
        return host not in self.avoid and (self.hosts is None or host in self.hosts)

    @property
    def units(self) -> int:
        """GPUs, or hosts where the number per host is fixed."""
        return self.gpus // self.per_host if self.per_host else self.gpus


def need_of(index: Index, gang: Gang, *, avoid: bool = True, locality: Locality | None = None) -> Need:
    """The gang's need, with host names turned into numbers. Names that are not in the inventory drop out.

    Args:
        avoid: also leave out the hosts it failed on before.
        locality: in place of the gang's own.
    """
    wants, number = gang.constraints, index.number
    shun = (*wants.avoid, *gang.avoid) if avoid else wants.avoid
    hosts = frozenset(number[name] for name in wants.hosts if name in number) if wants.hosts else None
    avoided = frozenset(number[name] for name in shun if name in number)
    plain = hosts is None and not avoided and not wants.nvlink
    near = frozenset(number[name] for name in gang.near if name in number)
    return Need(gang.gpus, wants.gpus_per_host, locality or wants.locality, hosts, avoided, wants.nvlink, plain, near)


class Part:
    """A rack with only some hosts, or some of their GPUs, usable for a gang. Has the interface of a `Shelf`.

    Attributes:
        free: GPUs the gang may use here.
        room: GPUs of the generation that are free here, regardless of who may use them.
        empty: no GPU of the rack's usable hosts of this generation is in use.
    """

    __slots__ = ("counts", "empty", "free", "levels", "number", "room", "size")

    def __init__(self, number: int, levels: Sequence[Collection[int]], shelves: Sequence[Shelf]) -> None:
        self.number = number
        self.levels = levels
        self.counts = [len(level) for level in levels]
        self.free = sum(free * count for free, count in enumerate(self.counts))
        self.room = sum(shelf.free for shelf in shelves)
        self.size = 0
        self.empty = self.room == sum(shelf.capacity for shelf in shelves)


Rack = Shelf | Part


def racks_for(index: Index, lane: Lane, need: Need) -> Sequence[Rack]:
    """The racks of one generation in which the gang could use at least one GPU, in the inventory's order."""
    if need.plain and not lane.mixed:
        return [shelf for shelf in lane.shelves if shelf.free]
    grouped: dict[int, list[Shelf]] = {}
    for shelf in lane.shelves:
        grouped.setdefault(shelf.number, []).append(shelf)
    racks = []
    for number, group in grouped.items():
        levels: list[list[int]] = [[] for _ in range(index.height + 1)]
        for host, usable in _usable(index, group, need):
            levels[usable].append(host)
        racks.append(Part(number, levels, group))
    return [rack for rack in racks if rack.free]


def _usable(index: Index, shelves: Iterable[Shelf], need: Need) -> Iterable[tuple[int, int]]:
    for shelf in shelves:
        for free, level in enumerate(shelf.levels):
            for host in level:
                if not need.admits(host):
                    continue
                yield host, usable_in_island(index.hosts[host], index.free[host]) if need.nvlink else free
