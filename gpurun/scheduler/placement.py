"""Best-fit gang placement.

The objective, each line only among the answers that are best by the lines above (docs/scheduler.md draws it):

1. one generation, fewest racks, fewest hosts;
2. the tightest hosts (see `gpurun.scheduler.fit`), so that the largest gangs stay possible on one host, on two, …;
3. fewest empty racks opened, then fewest empty hosts, then the tightest racks;
4. inside a host: one NVLink island, GPUs near the HCA, the same on all hosts (see `gpurun.scheduler.gpus`);
5. fewest hosts that lack its data;
6. the inventory's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import combinations
from math import comb
from operator import and_
from typing import Any

from gpurun.jobs.spec import Locality
from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.fit import Fit, even, hosts_needed, tightest
from gpurun.scheduler.gpus import choose
from gpurun.scheduler.index import Index, Lane
from gpurun.scheduler.model import Gang, Grant, Placement, Refusal, Snapshot
from gpurun.scheduler.racks import Need, Rack, need_of, racks_for

MAX_RACK_SETS = 256
"""Up to this many sets of racks are compared one by one; with more, those that `_greedy_sets` proposes."""
MAX_LAST_RACKS = 48

Chosen = tuple[tuple[int, int], ...]
"""Host numbers in rank order, each with the GPUs the gang may use there."""

Score = tuple[int, int, Fit, tuple[int, int, list[int]], int, Chosen]
"""Racks, hosts, fit, (empty racks, empty hosts, rooms of the racks), hosts without data, hosts: smaller is better."""


def place(snapshot: Snapshot, gang: Gang) -> Placement | Refusal:
    """Return the best placement of a gang on what is free now, or why there is none.

    Ignores pools and the queue, which `gpurun.scheduler.schedule` handles.
    """
    index, capacity = Index(snapshot), Capacity(snapshot.inventory, try_place)
    return capacity.place(index, gang) or capacity.refuse(index, gang)


def try_place(index: Index, gang: Gang, *, avoid: bool = True, locality: Locality | None = None) -> Placement | None:
    """Return the best placement on what is free in the index, or None. Changes nothing.

    Args:
        avoid: leave out the hosts on which the gang failed before.
        locality: instead of the gang's own.
    """
    need = need_of(index, gang, avoid=avoid, locality=locality)
    lanes = index.lanes(gang.wants.constraints)
    is_simple = not need.nvlink and not need.per_host and need.gpus <= index.height
    if is_simple and not any(lane.mixed for lane in lanes):
        single = _one_host(index, lanes, need) if need.hosts is None else _one_named_host(index, lanes, need)
        if single is not None or need.locality == "host":
            return single
    best: tuple[Score, str, Chosen] | None = None
    for lane in lanes:
        answer = _answer(index, lane, need)
        if answer is not None and (best is None or answer[0] < best[0]):
            best = (answer[0], lane.generation, answer[1])
    return None if best is None else _placement(index, best[1], best[2], need)


def _one_host(index: Index, lanes: Iterable[Lane], need: Need) -> Placement | None:
    """The same objective where one host is enough and all but a few hosts serve: read off the shelves."""
    best: tuple[int, bool, bool, int, bool, int, str] | None = None
    for free in range(need.gpus, index.height + 1):
        for lane in lanes:
            for shelf in lane.shelves:
                if not shelf.counts[free] or (best is not None and shelf.empty > best[1]):
                    continue
                level = shelf.levels[free]
                if not need.avoid.isdisjoint(level):
                    level = level - need.avoid
                    if not level:
                        continue
                if shelf.size and not need.near:
                    host_empty, lacks, first = shelf.size == free, True, min(level)
                else:
                    host_empty, lacks, first = min(
                        (index.full[n].bit_count() == free, n not in need.near, n) for n in level
                    )
                key = (free, shelf.empty, host_empty, shelf.free, lacks, first, lane.generation)
                if best is None or key < best:
                    best = key
        if best is not None:
            return _on_one(index, best[5], need)
    return None


def _one_named_host(index: Index, lanes: Iterable[Lane], need: Need) -> Placement | None:
    """As `_one_host`, among the hosts that the gang names."""
    best: tuple[int, bool, bool, int, bool, int] | None = None
    for n in need.hosts or ():
        free, shelf = index.free[n].bit_count(), index.shelf_of[n]
        if free < need.gpus or shelf is None or n in need.avoid:
            continue
        if any(shelf in lane.racks.get(shelf.number, ()) for lane in lanes):
            key = (free, shelf.empty, index.free[n] == index.full[n], shelf.free, n not in need.near, n)
            best = key if best is None or key < best else best
    return None if best is None else _on_one(index, best[5], need)


def _on_one(index: Index, number: int, need: Need) -> Placement:
    host = index.hosts[number]
    grant = Grant(host.name, choose(host, index.free[number], need.gpus))
    return Placement(host.generation, (host.rack,), (grant,))


def _answer(index: Index, lane: Lane, need: Need) -> tuple[Score, Chosen] | None:
    """The best answer within a generation."""
    racks = racks_for(index, lane, need)
    number = _racks_needed(racks, need)
    if number is None or (number > 1 and need.locality != "any"):
        return None
    sets = [(chosen, _counts(chosen)) for chosen in _rack_sets(racks, number, need)]
    sized = [(_hosts_needed(counts, need), counts, chosen) for chosen, counts in sets]
    hosts = min((size for size, _, _ in sized if size is not None), default=None)
    if hosts is None or (need.locality == "host" and hosts > 1):
        return None
    fits = [(_tightest(counts, need, hosts), chosen) for size, counts, chosen in sized if size == hosts]
    fit = min(found for found, _ in fits)
    levels = [(free, use) for free, use in zip(range(len(fit), 0, -1), fit, strict=True) if use]
    keyed = [(_rack_key(index, chosen, levels), chosen) for found, chosen in fits if found == fit]
    key = min(found for found, _ in keyed)
    answers = (_hosts(index, chosen, fit, need) for found, chosen in keyed if found == key)
    lacks, best = min((sum(host not in need.near for host, _ in answer), answer) for answer in answers)
    return (number, hosts, fit, key, lacks, best), best


def _racks_needed(racks: Sequence[Rack], need: Need) -> int | None:
    if need.per_host and need.gpus % need.per_host:
        return None
    missing = need.units
    if max((_units(rack, need) for rack in racks), default=0) >= missing:
        return 1  # most gangs: no need to sort
    for number, units in enumerate(sorted((_units(rack, need) for rack in racks), reverse=True), 1):
        missing -= units
        if missing <= 0:
            return number
    return None


def _units(rack: Rack, need: Need) -> int:
    return sum(rack.counts[need.per_host :]) if need.per_host else rack.free


def _rack_sets(racks: Sequence[Rack], number: int, need: Need) -> list[tuple[Rack, ...]]:
    if number == 1:
        return [(rack,) for rack in racks if _units(rack, need) >= need.units]
    if comb(len(racks), number) > MAX_RACK_SETS:
        return _greedy_sets(racks, number, need)
    units = {rack.number: _units(rack, need) for rack in racks}
    return [
        chosen for chosen in combinations(racks, number) if sum(units[rack.number] for rack in chosen) >= need.units
    ]


def _greedy_sets(racks: Sequence[Rack], number: int, need: Need) -> list[tuple[Rack, ...]]:
    """The freest racks, or those with the freest hosts; and for the last place the tightest that are enough."""
    sets: dict[tuple[int, ...], tuple[Rack, ...]] = {}
    for strength in (_freest(need), _freest_hosts):
        ranked = sorted(racks, key=strength)
        base, rest = ranked[: number - 1], ranked[number - 1 :]
        missing = need.units - sum(_units(rack, need) for rack in base)
        enough = sorted((rack for rack in rest if _units(rack, need) >= missing), key=_tightness)
        for rack in enough[:MAX_LAST_RACKS]:
            chosen = tuple(sorted((*base, rack), key=lambda rack: rack.number))
            sets[tuple(rack.number for rack in chosen)] = chosen
    return list(sets.values())


def _freest(need: Need) -> Callable[[Rack], Any]:
    return lambda rack: (-_units(rack, need), rack.number)


def _freest_hosts(rack: Rack) -> Any:
    return [-count for count in reversed(rack.counts)], rack.number


def _tightness(rack: Rack) -> Any:
    return rack.free, rack.number


def _counts(racks: Sequence[Rack]) -> Sequence[int]:
    counts: Sequence[int] = racks[0].counts
    for rack in racks[1:]:
        counts = [a + b for a, b in zip(counts, rack.counts, strict=True)]
    return counts


def _hosts_needed(counts: Sequence[int], need: Need) -> int | None:
    if need.per_host:
        return need.units if sum(counts[need.per_host :]) >= need.units else None
    return hosts_needed(counts, need.gpus)


def _tightest(counts: Sequence[int], need: Need, hosts: int) -> Fit:
    return even(counts, need.per_host, hosts) if need.per_host else tightest(counts, need.gpus, hosts)


def _rack_key(index: Index, racks: Sequence[Rack], levels: Sequence[tuple[int, int]]) -> tuple[int, int, list[int]]:
    """Empty racks opened, empty hosts opened, GPUs free in the racks; `levels`: hosts used of each free count."""
    empty_racks, empty_hosts = 0, 0
    for rack in racks:
        empty_racks += rack.empty
    for free, use in levels:
        left = use
        for rack in racks:
            left -= _part_used(index, rack, free)
        if left > 0:
            empty_hosts += left
    return empty_racks, empty_hosts, sorted([rack.room for rack in racks], reverse=True)


def _part_used(index: Index, rack: Rack, free: int) -> int:
    """Hosts of a rack's level on which something runs already."""
    if rack.size:
        return 0 if free == rack.size else rack.counts[free]
    return sum(index.free[host] != index.full[host] for host in rack.levels[free])


def _hosts(index: Index, racks: Sequence[Rack], fit: Fit, need: Need) -> Chosen:
    """The hosts of a fit: part-used ones first among equals, then those that have data, then the inventory's order."""
    chosen = []
    for free, use in zip(range(len(fit), 0, -1), fit, strict=True):
        if use:
            level = (host for rack in racks for host in rack.levels[free])
            ranked = sorted(level, key=lambda host: (index.free[host] == index.full[host], host not in need.near, host))
            chosen += [(host, free) for host in ranked[:use]]
    return tuple(sorted(chosen, key=lambda item: (index.rack_of[item[0]], item[0])))


def _placement(index: Index, generation: str, chosen: Chosen, need: Need) -> Placement:
    surplus = 0 if need.per_host else sum(usable for _, usable in chosen) - need.gpus
    tail = min(chosen, key=lambda item: (item[1], item[0]))[0]  # the surplus stays on the tightest host
    common = reduce(and_, (index.free[number] for number, _ in chosen))
    grants = []
    for number, usable in chosen:
        gpus = need.per_host or usable - (surplus if number == tail else 0)
        host = index.hosts[number]
        grants.append(Grant(host.name, choose(host, index.free[number], gpus, common)))
    racks = tuple(dict.fromkeys(index.hosts[number].rack for number, _ in chosen))
    return Placement(generation, racks, tuple(grants))
