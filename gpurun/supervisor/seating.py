"""Which ranks a host may speak of. Pure.

A host may be hostile. It says of its own ranks what it likes: nobody else can know. It has no say in the ranks of other
hosts: not that they ended, not what they print, not how far they are, not where they live.
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
    """Where the ranks of an attempt run.

    Attributes:
        grants: the gang's, in rank order.
        most: an elastic gang has ranks with numbers below this. Its launcher numbers hosts again after each change, so
            each host may have any of them. None for any other gang.
        roles: as the job's spec has them.
    """

    grants: Sequence[Grant]
    most: int | None = None
    roles: Roles | None = None

    @classmethod
    def of(cls, grants: Sequence[Grant], spec: JobSpec) -> Seating:
        """The seating of a job's attempt."""
        return cls(tuple(grants), spec.gpus if spec.is_live_elastic else None, spec.roles)

    def has(self, host: str, rank: int) -> bool:
        """Whether a rank of this number may run on a host."""
        return rank in (self._numbers.get(host, ()) if self.most is None else range(self.most))

    def host_of(self, rank: int) -> str | None:
        """The only host that may have this rank; None if there is none, or if each host may have any of them."""
        return next((host for host, own in self._numbers.items() if rank in own), None) if self.most is None else None

    @property
    def size(self) -> int:
        """So many ranks it has at most: their numbers are below this."""
        return sum(len(own) for own in self._numbers.values()) if self.most is None else self.most

    def own(self, host: str, ranks: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
        """What a host says of its own ranks, of what it says by rank number."""
        return ((int(rank), said) for rank, said in ranks.items() if self.has(host, int(rank)))

    @cached_property
    def _numbers(self) -> Mapping[str, set[int]]:
        found: dict[str, set[int]] = {}
        for seat in seats_of(self.grants, self.roles):
            found.setdefault(seat.host, set()).add(seat.rank)
        return found
