"""Best-fit gang placement.

The objective, each line only among the answers that are best by the lines above (docs/scheduler.md draws it):

1. one generation, fewest racks, fewest hosts;
2. the tightest hosts, so that the largest gangs stay possible on one host, on two, …;
3. fewest empty racks opened, then fewest empty hosts, then the tightest racks;
4. inside a host: one NVLink island, GPUs near the HCA, the same on all hosts;
5. fewest hosts that lack its data;
6. the inventory's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from itertools import accumulate, chain, combinations, islice
from math import comb
from operator import and_, attrgetter
from typing import Any

from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.spec import Constraints, Grant, Locality, Placement
from gpurun.quantities import count
from gpurun.scheduler.model import Gang, Reason, Refusal, Snapshot

# The snapshot, arranged so that a placement looks at free counts instead of at hosts.


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


# Which GPUs of one host: one NVLink island if it can be, near the HCA, as on the gang's other hosts, then the lowest
# numbers.


Islands = tuple[tuple[int, ...], ...]


def usable_in_island(host: Host, free: int) -> int:
    """Most free GPUs that NVLink connects. A GPU that the inventory puts in no island is alone."""
    return max((island.bit_count() for island in _masks(host.nvlink, free)), default=0)


def choose_gpus(host: Host, free: int, gpus: int, common: int = 0) -> tuple[int, ...]:
    """`gpus` of the free ones (bits), at least that many.

    In this order: fewest NVLink islands, most GPUs near the HCA, fewest GPUs left over in the islands it
    touches, most of the `common` ones, lowest numbers. A host that does not say has one island.

    Args:
        common: GPUs (bits) that are free on every host of the gang. Where each GPU has a NIC of its own, NCCL then
            connects NICs of the same number ("if the communicator does not contain the same GPUs on each node, NCCL may
            still need to communicate across NICs": NCCL guide, NCCL_CROSS_NIC). Some fabrics connect no others.
    """
    return _choose(host.nvlink, host.near_hca, free, gpus, common & free)


@lru_cache(maxsize=65536)
def _choose(nvlink: Islands, near_hca: tuple[int, ...], free: int, gpus: int, common: int) -> tuple[int, ...]:
    near = mask_of(near_hca) & free
    islands = _masks(nvlink, free) if nvlink else [free]
    for number in range(1, len(islands) + 1):
        options = [
            _from_islands(chosen, near, gpus, common)
            for chosen in combinations(islands, number)
            if sum(island.bit_count() for island in chosen) >= gpus
        ]
        if options:
            return min(options)[3]
    raise ValueError(f"{gpus} GPUs are wanted, but only {free.bit_count()} are free")


def _from_islands(chosen: tuple[int, ...], near: int, gpus: int, common: int) -> tuple[int, int, int, tuple[int, ...]]:
    mask = sum(chosen)
    ranked = [indices(part & also) for part in (mask & near, mask & ~near) for also in (common, ~common)]
    picked = tuple(sorted(islice(chain.from_iterable(ranked), gpus)))
    few = -min((mask & near).bit_count(), gpus)
    return few, mask.bit_count() - gpus, -(mask_of(picked) & common).bit_count(), picked


def _masks(nvlink: Islands, free: int) -> list[int]:
    masks = [mask_of(island) & free for island in nvlink]
    alone = free & ~mask_of(gpu for island in nvlink for gpu in island)
    masks += [1 << gpu for gpu in indices(alone)]
    return [mask for mask in masks if mask]


# A gang's view of one generation: racks as candidates, each a ladder of hosts that may serve it.


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


# How many hosts, and which free counts: the arithmetic of a best fit, without a host in sight.


Fit = tuple[int, ...]
"""Hosts to use of each free count, from the highest count down to 1. Of two fits the smaller is the tighter."""


def hosts_needed(counts: Sequence[int], gpus: int) -> int | None:
    """Fewest hosts that together have `gpus` free; None if all together have fewer."""
    hosts = 0
    for free in range(len(counts) - 1, 0, -1):
        have = counts[free]
        if have:
            if have * free >= gpus:
                return hosts + -(-gpus // free)
            gpus -= have * free
            hosts += have
    return None


def tightest(counts: Sequence[int], gpus: int, hosts: int) -> Fit:
    """The tightest fit of `gpus` on `hosts` hosts, where `hosts` is what `hosts_needed` said."""
    if gpus == hosts * (len(counts) - 1):  # whole hosts of the largest size: nothing to choose
        return (hosts, *([0] * (len(counts) - 2)))
    frees = [free for free in range(len(counts) - 1, 0, -1) for _ in range(counts[free])]
    total = list(accumulate(frees, initial=0))  # total[i] = GPUs free on the i freest hosts
    seen = 0
    fit = []
    for free in range(len(counts) - 1, 0, -1):
        seen += counts[free]
        low, high = 0, min(counts[free], hosts)
        while low < high:  # the fewest here with which the lower levels can still do the rest
            middle = (low + high) // 2
            below = total[min(seen + hosts - middle, len(frees))] - total[seen]
            if middle * free + below >= gpus:
                high = middle
            else:
                low = middle + 1
        fit.append(low)
        gpus -= low * free
        hosts -= low
    return tuple(fit)


def even(counts: Sequence[int], per_host: int, hosts: int) -> Fit:
    """The tightest `hosts` hosts with at least `per_host` free each, of which there must be enough."""
    fit = [0] * len(counts)
    for free in range(per_host, len(counts)):
        fit[free] = min(counts[free], hosts)
        hosts -= fit[free]
    return tuple(reversed(fit[1:]))


# How a pass places a gang, and whether and where the gang could ever run. Every part of a pass uses this.


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


MAX_RACK_SETS = 256
"""Up to this many sets of racks are compared one by one; with more, those that `_greedy_sets` proposes."""
MAX_LAST_RACKS = 48

Chosen = tuple[tuple[int, int], ...]
"""Host numbers in rank order, each with the GPUs the gang may use there."""

Score = tuple[int, int, Fit, tuple[int, int, list[int]], int, Chosen]
"""Racks, hosts, fit, (empty racks, empty hosts, rooms of the racks), hosts without data, hosts: smaller is better."""


def place(snapshot: Snapshot, gang: Gang) -> Placement | Refusal:
    """Return the best placement of a gang on what is free now, or why there is none.

    Ignores pools and the queue, which `gpurun.scheduler.passes` handles.
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
    grant = Grant(host.name, choose_gpus(host, index.free[number], need.gpus))
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
        grants.append(Grant(host.name, choose_gpus(host, index.free[number], gpus, common)))
    racks = tuple(dict.fromkeys(index.hosts[number].rack for number, _ in chosen))
    return Placement(generation, racks, tuple(grants))
