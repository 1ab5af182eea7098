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
    asked, number = gang.wants.constraints, index.number
    shun = (*asked.avoid, *gang.avoid) if avoid else asked.avoid
    hosts = frozenset(number[name] for name in asked.hosts if name in number) if asked.hosts else None
    avoided = frozenset(number[name] for name in shun if name in number)
    plain = hosts is None and not avoided and not asked.nvlink
    near = frozenset(number[name] for name in gang.near if name in number)
    return Need(gang.gpus, asked.gpus_per_host, locality or asked.locality, hosts, avoided, asked.nvlink, plain, near)


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
    """The racks of one generation in which the gang could use at least one GPU, in the inventory's order.

    If it names hosts, only those are looked at. If it avoids some, only their racks differ from what the index knows.
    """
    if need.plain and not lane.mixed:
        return [shelf for shelf in lane.shelves if shelf.free]
    if need.hosts is not None:
        racks: list[Rack] = [_some_of(index, lane, number, hosts, need) for number, hosts in _named(index, lane, need)]
    elif need.nvlink:
        racks = [_some_of(index, lane, number, _all_hosts(shelves), need) for number, shelves in lane.racks.items()]
    else:
        fewer = {index.rack_of[host] for host in need.avoid}
        racks = [
            shelves[0] if len(shelves) == 1 and number not in fewer else _without(number, shelves, need.avoid)
            for number, shelves in lane.racks.items()
            if any(shelf.free for shelf in shelves)
        ]
    return [rack for rack in racks if rack.free]


def _named(index: Index, lane: Lane, need: Need) -> list[tuple[int, list[int]]]:
    """The racks of the hosts that a gang names, each with those of its hosts that have a free GPU for the gang."""
    found: dict[int, list[int]] = {}
    for host in need.hosts or ():
        shelf = index.shelf_of[host] if index.free[host] else None
        if shelf is not None and shelf in lane.racks.get(shelf.number, ()):
            found.setdefault(shelf.number, []).append(host)
    return sorted(found.items())


def _all_hosts(shelves: Iterable[Shelf]) -> Iterable[int]:
    return (host for shelf in shelves for level in shelf.levels for host in level)


def _some_of(index: Index, lane: Lane, number: int, hosts: Iterable[int], need: Need) -> Part:
    levels: list[list[int]] = [[] for _ in range(index.height + 1)]
    for host in hosts:
        if host not in need.avoid:
            mask = index.free[host]
            levels[usable_in_island(index.hosts[host], mask) if need.nvlink else mask.bit_count()].append(host)
    return Part(number, levels, lane.racks[number])


def _without(number: int, shelves: Sequence[Shelf], avoid: frozenset[int]) -> Part:
    """A rack without some hosts."""
    levels = [set[int]().union(*level) - avoid for level in zip(*(shelf.levels for shelf in shelves), strict=True)]
    return Part(number, levels, shelves)
