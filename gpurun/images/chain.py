"""Order the hosts through which blobs travel. Pure.

Every blob crosses each rack's uplink once: the chain visits rack after rack. Hosts and racks that lack most come first,
so hosts rarely pass on blobs that they do not need themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Want:
    """What one host lacks.

    Attributes:
        digests: the blobs, in the order in which they should arrive.
    """

    host: str
    rack: str
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Hop:
    """One host's place in a chain.

    Attributes:
        upstream: the host it pulls from; None = the head.
        digests: the blobs it pulls: those it lacks and those that hosts after it lack.
    """

    host: str
    rack: str
    upstream: str | None
    digests: tuple[str, ...]


def chain(wants: Sequence[Want], sizes: Mapping[str, int], *, lane: int = 0, lanes: int = 1) -> tuple[Hop, ...]:
    """Return the hops of one chain, beginning with the one that pulls from the head.

    Args:
        sizes: bytes of each blob.
        lane, lanes: which of several parallel chains; each begins with another host of every rack, so that the
            lanes between racks use different hosts' links.
    """
    ordered = _order(wants, sizes, lane, lanes)
    needed: list[tuple[str, ...]] = []
    after: dict[str, None] = {}
    for want in reversed(ordered):
        after = dict.fromkeys([*want.digests, *after])
        needed.append(_in_order(after, wants))
    needed.reverse()
    upstreams = [None, *(want.host for want in ordered)]
    return tuple(
        Hop(want.host, want.rack, upstream, digests)
        for want, upstream, digests in zip(ordered, upstreams, needed, strict=False)
    )


def star(wants: Sequence[Want]) -> tuple[Hop, ...]:
    """Return hops in which every host pulls from the head, for hosts that cannot connect to each other."""
    return tuple(Hop(want.host, want.rack, None, want.digests) for want in wants)


def _order(wants: Sequence[Want], sizes: Mapping[str, int], lane: int, lanes: int) -> list[Want]:
    racks: dict[str, list[Want]] = {}
    for want in wants:
        racks.setdefault(want.rack, []).append(want)

    def lacks(want: Want) -> int:
        return sum(sizes.get(digest, 0) for digest in want.digests)

    # sorted() is stable: hosts that lack the same stay in the order they were given.
    by_need = [sorted(hosts, key=lacks, reverse=True) for hosts in racks.values()]
    by_need.sort(key=lambda hosts: lacks(hosts[0]), reverse=True)
    ordered: list[Want] = []
    for hosts in by_need:
        turn = lane * len(hosts) // lanes
        ordered += hosts[turn:] + hosts[:turn]
    return ordered


def _in_order(digests: Mapping[str, None], wants: Sequence[Want]) -> tuple[str, ...]:
    """Return the digests in the order in which hosts need them: that of the longest list that has them."""
    longest = sorted(wants, key=lambda want: len(want.digests), reverse=True)
    ranked = dict.fromkeys(digest for want in longest for digest in want.digests)
    return tuple(digest for digest in ranked if digest in digests)
