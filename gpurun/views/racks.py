"""Group equal hosts: by rack, then by their cells. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpurun.views.picture import HostCells


class Alike(NamedTuple):
    """Hosts of one rack with equal cells and state."""

    names: tuple[str, ...]
    cells: tuple[str, ...]
    state: str
    shown: str


class RackView(NamedTuple):
    """A rack, or several racks whose hosts all look the same.

    Attributes:
        generations: of its hosts; more than one only in a mixed rack.
        free: GPUs that a new gang can get: those of hosts that accept no new gangs do not count.
    """

    racks: tuple[str, ...]
    generations: tuple[str, ...]
    hosts: int
    gpus: int
    free: int
    groups: tuple[Alike, ...]


def racks_of(hosts: Iterable[HostCells]) -> list[RackView]:
    """Return the racks in the inventory's order. Equal racks are merged into the first of them."""
    by_rack: dict[str, list[HostCells]] = {}
    for host in hosts:
        by_rack.setdefault(host.rack, []).append(host)
    found = [_rack(name, members) for name, members in by_rack.items()]
    merged: dict[object, RackView] = {}
    for at, rack in enumerate(found):
        one = rack.groups[0]
        key = at if len(rack.groups) > 1 else (rack.generations, one.cells, one.shown)
        merged[key] = _together(merged[key], rack) if key in merged else rack
    return list(merged.values())


def _rack(name: str, hosts: list[HostCells]) -> RackView:
    groups: dict[tuple[str, tuple[str, ...], str], list[HostCells]] = {}
    for host in hosts:
        groups.setdefault((host.generation, host.cells, host.shown), []).append(host)
    alike = tuple(
        Alike(tuple(host.name for host in members), cells, members[0].state, shown)
        for (_, cells, shown), members in groups.items()
    )
    generations = tuple(dict.fromkeys(host.generation for host in hosts))
    free = sum(host.free for host in hosts if host.state == "ok")
    return RackView((name,), generations, len(hosts), sum(host.gpus for host in hosts), free, alike)


def _together(one: RackView, other: RackView) -> RackView:
    first, second = one.groups[0], other.groups[0]
    return RackView(
        one.racks + other.racks, one.generations, one.hosts + other.hosts, one.gpus + other.gpus,
        one.free + other.free, (first._replace(names=first.names + second.names),),
    )  # fmt: skip
