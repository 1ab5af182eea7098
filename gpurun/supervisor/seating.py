"""Which ranks a host may report about. Pure.

A host may be hostile. gpurun must believe its reports about its own ranks, because there is no other source. It must
not believe anything about ranks of other hosts: their ends, their output, their progress, their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.launch.seats import seats_of


@dataclass(frozen=True)
class Seating:
    """The hosts of an attempt's ranks.

    Attributes:
        grants: the gang's, in rank order.
        most: an elastic gang has ranks with numbers below this. Its launcher numbers hosts again after each change, so
            each host may have any of them. None for any other gang.
        roles, one_per_host: as in the job's spec.
    """

    grants: Sequence[Grant]
    most: int | None = None
    roles: Roles | None = None
    one_per_host: bool = False

    @classmethod
    def of(cls, grants: Sequence[Grant], spec: JobSpec) -> Seating:
        """Return the seating of a job's attempt."""
        return cls(tuple(grants), spec.gpus if spec.is_live_elastic else None, spec.roles, spec.one_per_host)

    def has(self, host: str, rank: int) -> bool:
        """Return whether a rank of this number may run on a host."""
        return rank in (self._numbers.get(host, ()) if self.most is None else range(self.most))

    def host_of(self, rank: int) -> str | None:
        """Return the only host that may have this rank; None if there is none, or if each host may have any of them."""
        return next((host for host, own in self._numbers.items() if rank in own), None) if self.most is None else None

    @property
    def size(self) -> int:
        """Return the largest number of ranks."""
        return sum(len(own) for own in self._numbers.values()) if self.most is None else self.most

    def own(self, host: str, ranks: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
        """Yield what a host reports about its own ranks, from its reports by rank number."""
        return ((int(rank), said) for rank, said in ranks.items() if self.has(host, int(rank)))

    @cached_property
    def _numbers(self) -> Mapping[str, set[int]]:
        found: dict[str, set[int]] = {}
        for seat in seats_of(self.grants, self.roles, one_per_host=self.one_per_host):
            found.setdefault(seat.host, set()).add(seat.rank)
        return found
