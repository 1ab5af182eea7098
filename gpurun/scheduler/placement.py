"""Best-fit gang placement.

The objective, each line only among the answers that are best by the lines above (docs/scheduler.md draws it):

1. one generation, fewest racks, fewest hosts;
2. the tightest hosts (see `gpurun.scheduler.fit`), so that the largest gangs stay possible on one host, on two, …;
3. fewest empty racks opened, then fewest empty hosts, then the tightest racks;
4. inside a host: one NVLink island, GPUs near the HCA (see `gpurun.scheduler.gpus`);
5. the inventory's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from gpurun.scheduler.fit import Fit, even, hosts_needed, tightest
from gpurun.scheduler.gpus import choose, indices
from gpurun.scheduler.index import Index, Shelf
from gpurun.scheduler.model import Gang, Grant, Placement, Reason, Refusal, Snapshot
from gpurun.scheduler.racks import Need, Rack, need_of, racks_for

MAX_RACK_SETS = 2000
"""Up to this many sets of racks are compared one by one; beyond it the search is greedy (`_greedy_sets`)."""


@dataclass(frozen=True, order=True)
class Score:
    """How good an answer is; smaller is better, compared in this order."""

    racks: int
    hosts: int
    fit: Fit
    empty_racks: int
    empty_hosts: int
    rack_rooms: tuple[int, ...]
    order: tuple[int, ...]


Answer = tuple[Score, str, tuple[tuple[int, int], ...]]
"""Score, generation, and (host number, GPUs) in rank order."""


def place(snapshot: Snapshot, gang: Gang) -> Placement | Refusal:
    """The best placement of a gang on what is free now, or why there is none."""
    return place_on(Index(snapshot), gang)


def place_on(index: Index, gang: Gang) -> Placement | Refusal:
    """As `place`, on an index that is kept current. Changes nothing."""
    placement = try_place(index, gang)
    if placement is not None:
        return placement
    empty = Index(Snapshot(inventory=index.snapshot.inventory))
    if try_place(empty, gang, avoid=False) is None:
        return Refusal(True, Reason.IMPOSSIBLE, _never(empty, gang))
    return Refusal(False, Reason.NO_ROOM, _not_now(index, gang))


def try_place(index: Index, gang: Gang, *, avoid: bool = True) -> Placement | None:
    """The best placement on what is free now, or None."""
    need = need_of(index, gang, gang.avoid if avoid else ())
    best: Answer | None = None
    for generation, shelves in index.lanes(gang.constraints).items():
        answer = _best_in(index, shelves, need, gang.constraints.locality, generation)
        if answer is not None and (best is None or answer < best):
            best = answer
    return None if best is None else _placement(index, best, need)


def _best_in(index: Index, shelves: Sequence[Shelf], need: Need, locality: str, name: str) -> Answer | None:
    racks = racks_for(index, shelves, need)
    number = _racks_needed(racks, need)
    if number is None or (number > 1 and locality != "any"):
        return None
    best: Answer | None = None
    for chosen in _rack_sets(racks, number, need):
        answer = _fit_racks(index, chosen, need, name)
        if answer is None or (locality == "host" and answer[0].hosts > 1):
            continue
        if best is None or answer < best:
            best = answer
    return best


def _units(rack: Rack, need: Need) -> int:
    """How much of the need a rack can carry: GPUs, or hosts where the number per host is fixed."""
    return sum(rack.counts[need.per_host :]) if need.per_host else rack.free


def _target(need: Need) -> int:
    return -(-need.gpus // need.per_host) if need.per_host else need.gpus


def _racks_needed(racks: Sequence[Rack], need: Need) -> int | None:
    if need.per_host and need.gpus % need.per_host:
        return None
    missing = _target(need)
    for number, units in enumerate(sorted((_units(rack, need) for rack in racks), reverse=True), 1):
        missing -= units
        if missing <= 0:
            return number
    return None


def _rack_sets(racks: Sequence[Rack], number: int, need: Need) -> list[tuple[Rack, ...]]:
    target = _target(need)
    if comb(len(racks), number) > MAX_RACK_SETS:
        return _greedy_sets(racks, number, need)
    return [
        chosen
        for chosen in combinations(racks, number)
        if sum(_units(rack, need) for rack in chosen) >= target
    ]


def _greedy_sets(racks: Sequence[Rack], number: int, need: Need) -> list[tuple[Rack, ...]]:
    """The freest racks, and for the last place each rack that is still enough."""
    by_size = sorted(racks, key=lambda rack: (-_units(rack, need), rack.number))
    base, rest = by_size[: number - 1], by_size[number - 1 :]
    missing = _target(need) - sum(_units(rack, need) for rack in base)
    return [(*base, rack) for rack in rest if _units(rack, need) >= missing]


def _fit_racks(index: Index, racks: Sequence[Rack], need: Need, generation: str) -> Answer | None:
    counts = [sum(level) for level in zip(*(rack.counts for rack in racks), strict=True)]
    if need.per_host:
        hosts: int | None = need.gpus // need.per_host
        fit = even(counts, need.per_host, need.gpus // need.per_host)
    else:
        hosts = hosts_needed(counts, need.gpus)
        fit = None if hosts is None else tightest(counts, need.gpus, hosts)
    if hosts is None or fit is None:
        return None
    chosen = _hosts(index, racks, fit)
    empty_hosts = sum(index.free[host] == index.full[host] for host, _ in chosen)
    rooms = tuple(sorted((rack.room for rack in racks), reverse=True))
    score = Score(
        len(racks),
        hosts,
        fit,
        sum(rack.empty for rack in racks),
        empty_hosts,
        rooms,
        tuple(host for host, _ in chosen),
    )
    return score, generation, chosen


def _hosts(index: Index, racks: Sequence[Rack], fit: Fit) -> tuple[tuple[int, int], ...]:
    """The hosts of a fit, (number, usable GPUs): part-used ones first among equals, then the inventory's order."""
    chosen = []
    for free, use in zip(range(len(fit), 0, -1), fit, strict=True):
        if use:
            level = (host for rack in racks for host in rack.levels[free])
            ranked = sorted(level, key=lambda host: (index.free[host] == index.full[host], host))
            chosen += [(host, free) for host in ranked[:use]]
    rack_of = {host: rack.number for rack in racks for level in rack.levels for host in level}
    return tuple(sorted(chosen, key=lambda item: (rack_of[item[0]], item[0])))


def _placement(index: Index, answer: Answer, need: Need) -> Placement:
    _, generation, chosen = answer
    surplus = 0 if need.per_host else sum(usable for _, usable in chosen) - need.gpus
    tail = min(chosen, key=lambda item: (item[1], item[0]))[0]  # the surplus stays on the tightest host
    grants = []
    for host, usable in chosen:
        gpus = need.per_host or usable - (surplus if host == tail else 0)
        grants.append(Grant(index.hosts[host].name, choose(index.hosts[host], index.free[host], gpus)))
    racks = tuple(dict.fromkeys(index.hosts[host].rack for host, _ in chosen))
    return Placement(generation, racks, tuple(grants))


def _never(empty: Index, gang: Gang) -> str:
    lanes = empty.lanes(gang.constraints)
    if not lanes:
        return "no host of the inventory has such GPUs"
    most = max(sum(shelf.capacity for shelf in shelves) for shelves in lanes.values())
    return f"{gang.gpus} GPUs were asked for; the inventory could give at most {most} under these constraints"


def _not_now(index: Index, gang: Gang) -> str:
    lanes = index.lanes(gang.constraints)
    free = {name: sum(shelf.free for shelf in shelves) for name, shelves in lanes.items()}
    most = max(free.values(), default=0)
    return f"{gang.gpus} GPUs were asked for; {most} are free now"


__all__ = ["Score", "indices", "place", "place_on", "try_place"]
