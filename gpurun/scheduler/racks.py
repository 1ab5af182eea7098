"""A gang's view of one generation: racks as candidates, each a ladder of hosts that may serve it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gpurun.scheduler.gpus import usable_in_island
from gpurun.scheduler.index import Index, Shelf
from gpurun.scheduler.model import Gang


@dataclass(frozen=True)
class Need:
    """What a gang asks of racks and hosts, worked out once per gang.

    Attributes:
        per_host: exactly this many GPUs on each host; None = any number.
        hosts: host numbers it may use; None = all.
        avoid: host numbers it may not use.
        nvlink: only GPUs of one island count.
    """

    gpus: int
    per_host: int | None
    hosts: frozenset[int] | None
    avoid: frozenset[int]
    nvlink: bool

    @property
    def plain(self) -> bool:
        """True if every host of the right kind serves: the index's own shelves can be used as they are."""
        return self.hosts is None and not self.avoid and not self.nvlink


def need_of(index: Index, gang: Gang, avoid: Iterable[str] = ()) -> Need:
    """The gang's need, with host names turned into numbers. Names that are not in the inventory drop out."""
    wants = gang.constraints
    number = index.number
    return Need(
        gpus=gang.gpus,
        per_host=wants.gpus_per_host,
        hosts=frozenset(number[h] for h in wants.hosts if h in number) if wants.hosts else None,
        avoid=frozenset(number[h] for h in (*wants.avoid, *avoid) if h in number),
        nvlink=wants.nvlink,
    )


class Rack:
    """One rack as a candidate.

    Attributes:
        levels: `levels[f]`: the hosts on which the gang may use f GPUs.
        counts: how many those are.
        free: GPUs the gang may use here.
        room: all GPUs of the generation that are free here, usable by this gang or not.
        empty: no GPU of the rack's usable hosts of this generation is in use.
    """

    __slots__ = ("counts", "empty", "free", "levels", "number", "room")

    def __init__(self, number: int, levels: Sequence[Collection[int]], shelves: Sequence[Shelf]) -> None:
        self.number = number
        self.levels = levels
        self.counts = [len(level) for level in levels]
        self.free = sum(free * count for free, count in enumerate(self.counts))
        self.room = sum(shelf.free for shelf in shelves)
        self.empty = self.room == sum(shelf.capacity for shelf in shelves)


def racks_for(index: Index, shelves: Sequence[Shelf], need: Need) -> list[Rack]:
    """The racks of one generation in which the gang could use at least one GPU, in the inventory's order."""
    grouped: dict[int, list[Shelf]] = {}
    for shelf in shelves:
        grouped.setdefault(shelf.rack, []).append(shelf)
    racks = []
    for number in sorted(grouped):
        group = grouped[number]
        if need.plain and len(group) == 1:
            racks.append(Rack(number, group[0].levels, group))
            continue
        levels: list[list[int]] = [[] for _ in range(index.height + 1)]
        for host, usable in _usable(index, group, need):
            levels[usable].append(host)
        racks.append(Rack(number, levels, group))
    return [rack for rack in racks if rack.free]


def _usable(index: Index, shelves: Iterable[Shelf], need: Need) -> Iterable[tuple[int, int]]:
    for shelf in shelves:
        for free, level in enumerate(shelf.levels):
            for host in level:
                if host in need.avoid or (need.hosts is not None and host not in need.hosts):
                    continue
                yield host, usable_in_island(index.hosts[host], index.free[host]) if need.nvlink else free
