"""Decide from which host each host gets a data set. Pure.

A host that has the set comes before the other hosts of its rack, so the set does not cross the rack's uplink. If no
host has the set, it comes from the head through the same chain as images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from gpurun.images import topology
from gpurun.images.chain import Hop, Want, chain, star
from gpurun.inventory.model import Inventory


def routes(
    inventory: Inventory | None, lacking: Sequence[str], holders: Iterable[str], blob: str, size: int
) -> tuple[tuple[Hop, ...], ...]:
    """Return the hops of each lane, including the holders, which pull nothing.

    Args:
        lacking: hosts that need the set.
        holders: hosts that have the set, the preferred host first.
        blob: the set's blob, of `size` bytes.
    """
    wants = [Want(host, topology.rack_of(inventory, host), (blob,)) for host in lacking]
    if not topology.host_to_host(inventory, [*lacking, *holders]):
        return (star(wants),)
    lanes = topology.lanes(inventory, lacking)
    sources = [Hop(host, topology.rack_of(inventory, host), None, (blob,)) for host in holders]
    return tuple(_behind(sources, chain(wants, {blob: size}, lane=lane, lanes=lanes)) for lane in range(lanes))


def _behind(sources: Sequence[Hop], hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Return the hops of a chain: those of each rack behind a holder in that rack, the others behind any holder."""
    ordered: dict[str, Hop] = {}
    for rack, group in groupby(hops, key=lambda hop: hop.rack):
        near = next((source for source in sources if source.rack == rack), None)
        source = near or (next(iter(sources), None) if not ordered else None)
        if source is not None:
            ordered.setdefault(source.host, source)
        for hop in group:
            before = source.host if source is not None else hop.upstream
            ordered[hop.host] = Hop(hop.host, hop.rack, before, hop.digests)
            source = None
    return tuple(ordered.values())
