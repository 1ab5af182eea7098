"""From which host each host gets a data set. Pure.

A host that has the set stands before the others of its rack, and nothing crosses the rack's uplink. Where no host has
it, it comes from the head, through the chain in which images travel.
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
    """The hops of each lane, holders included: they pull nothing.

    Args:
        lacking: hosts that are to get the set.
        holders: hosts that have it, the first choice first.
        blob: the set's blob, of `size` bytes.
    """
    wants = [Want(host, topology.rack_of(inventory, host), (blob,)) for host in lacking]
    if not topology.host_to_host(inventory, [*lacking, *holders]):
        return (star(wants),)
    lanes = topology.lanes(inventory, lacking)
    sources = [Hop(host, topology.rack_of(inventory, host), None, (blob,)) for host in holders]
    return tuple(_behind(sources, chain(wants, {blob: size}, lane=lane, lanes=lanes)) for lane in range(lanes))


def _behind(sources: Sequence[Hop], hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """The hops of a chain, those of each rack behind a holder in that rack, the others behind any holder."""
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
