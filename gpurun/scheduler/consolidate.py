"""The placement of the published simulators, which the policies ``fifo`` and ``sjf`` are compared with.

A gang of up to a host's size gets one host, the one with the fewest free GPUs that is enough. A larger one gets
whole hosts, and for what is left over the freest host there is. Racks are not looked at; equal hosts are taken in
the inventory's order. Source: S-Lab-System-Group/HeliosArtifact, QSSF Service, ``placer/consolidate.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.jobs.spec import Locality
from gpurun.scheduler.gpus import choose
from gpurun.scheduler.index import Index, Lane
from gpurun.scheduler.model import Gang, Grant, Placement
from gpurun.scheduler.placement import try_place
from gpurun.scheduler.racks import need_of


def try_consolidated(
    index: Index, gang: Gang, *, avoid: bool = True, locality: Locality | None = None
) -> Placement | None:
    """As `try_place`, consolidated. Gangs that ask for certain hosts or numbers per host are placed by that."""
    need = need_of(index, gang, avoid=avoid, locality=locality)
    if not need.plain or need.per_host or need.locality != "any":
        return try_place(index, gang, avoid=avoid, locality=locality)
    for lane in index.lanes(gang.constraints):
        hosts = _hosts(index, lane, gang.gpus)
        if hosts is not None:
            grants = [Grant(index.hosts[n].name, choose(index.hosts[n], index.free[n], gpus)) for n, gpus in hosts]
            racks = dict.fromkeys(index.hosts[n].rack for n, _ in hosts)
            return Placement(lane.generation, tuple(racks), tuple(grants))
    return None


def _hosts(index: Index, lane: Lane, gpus: int) -> list[tuple[int, int]] | None:
    size = max(index.full[host].bit_count() for shelf in lane.shelves for level in shelf.levels for host in level)
    if gpus <= size:
        best = next(_at_least(lane, range(gpus, size + 1)), None)
        return None if best is None else [(best, gpus)]
    whole, rest = divmod(gpus, size)
    free = _at_least(lane, range(size, size + 1))
    hosts = [(host, size) for host, _ in zip(free, range(whole), strict=False)]
    if len(hosts) < whole:
        return None
    if rest:
        taken = {host for host, _ in hosts}
        freest = next((host for host in _at_least(lane, range(size, rest - 1, -1)) if host not in taken), None)
        if freest is None:
            return None
        hosts.append((freest, rest))
    return hosts


def _at_least(lane: Lane, levels: range) -> Iterator[int]:
    for free in levels:
        yield from sorted(host for shelf in lane.shelves for host in shelf.levels[free])
