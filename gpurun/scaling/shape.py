"""The hosts of a gang's ranks, and the links between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import isfinite

MOST_RANKS = 1_000_000
LEAST_BIT_PER_S, MOST_BIT_PER_S = 1e3, 1e16


class LinkClass(str, Enum):
    """A kind of link. The model treats links of one kind as equal."""

    HOST = "inside a host"
    RACK = "between hosts of a rack"
    RACKS = "between racks"


@dataclass(frozen=True)
class LinkRates:
    """Nominal rates per direction in bit/s; None = not known.

    Attributes:
        host: between GPUs of one host.
        rack: a host's own link.
        racks: a rack's link to the other racks, which all its hosts share.
    """

    host: float | None = None
    rack: float | None = None
    racks: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.host, self.rack, self.racks):
            if rate is not None and not (isfinite(rate) and LEAST_BIT_PER_S <= rate <= MOST_BIT_PER_S):
                raise ValueError(
                    f"the rate {rate!r} of a link must be from {LEAST_BIT_PER_S:g} to {MOST_BIT_PER_S:g} bit/s, or null"
                )

    def of(self, link: LinkClass) -> float | None:
        """Return the rate of a class."""
        return {LinkClass.HOST: self.host, LinkClass.RACK: self.rack, LinkClass.RACKS: self.racks}[link]


@dataclass(frozen=True)
class Shape:
    """The hosts of a gang's ranks.

    Attributes:
        ranks_per_host: ranks, host by host in rank order; 0 for a host that has only servers.
        racks: the rack of each host.
        servers_per_host: parameter servers on each host; empty = none.

    Raises:
        ValueError: no gang can have this shape.
    """

    ranks_per_host: tuple[int, ...]
    racks: tuple[str, ...]
    servers_per_host: tuple[int, ...] = ()
    rates: LinkRates = field(default_factory=LinkRates)

    def __post_init__(self) -> None:
        hosts = len(self.ranks_per_host)
        if len(self.racks) != hosts or len(self.servers_per_host) not in (0, hosts):
            raise ValueError(
                f"for {hosts} hosts, racks must have {hosts} entries, and servers_per_host {hosts} or 0 entries"
            )
        if any(not 0 <= count <= MOST_RANKS for count in (*self.ranks_per_host, *self.servers_per_host)):
            raise ValueError(f"a host must have from 0 to {MOST_RANKS} ranks or servers")
        if not 0 < sum(self.ranks_per_host) <= MOST_RANKS:
            raise ValueError(f"a gang must have from 1 to {MOST_RANKS} ranks")

    @cached_property
    def ranks(self) -> int:
        """The number of training ranks."""
        return sum(self.ranks_per_host)

    @cached_property
    def ring(self) -> tuple[tuple[int, str], ...]:
        """The ranks and the rack of each host with ranks, in rank order."""
        return tuple((ranks, rack) for ranks, rack in zip(self.ranks_per_host, self.racks, strict=True) if ranks)

    @cached_property
    def flows_between_racks(self) -> int:
        """The number of the ring's flows that share the busiest rack's link in one direction; 0 within one rack."""
        racks = [rack for _, rack in self.ring]
        leaving = [a for a, b in pairwise([*racks, racks[0]]) if a != b]
        return max((leaving.count(rack) for rack in set(leaving)), default=0)

    @cached_property
    def links(self) -> frozenset[LinkClass]:
        """The classes of links between its ranks and servers."""
        return frozenset(self._links())

    def _links(self) -> Iterator[LinkClass]:
        servers = self.servers_per_host or (0,) * len(self.ranks_per_host)
        used = [at for at, ranks in enumerate(self.ranks_per_host) if ranks + servers[at]]
        if any(ranks + servers[at] > 1 for at, ranks in enumerate(self.ranks_per_host)):
            yield LinkClass.HOST
        racks = [self.racks[at] for at in used]
        if len(set(racks)) < len(racks):
            yield LinkClass.RACK
        if len(set(racks)) > 1:
            yield LinkClass.RACKS

    def on(self, rates: LinkRates) -> Shape:
        """Return the same gang with other link rates."""
        return Shape(self.ranks_per_host, self.racks, self.servers_per_host, rates)
