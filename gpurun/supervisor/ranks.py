"""Which ranks run on which host, and what hosts report about them.

Horovod's elastic driver numbers hosts as they appear, and numbers them again after each change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from gpurun.errors import BadInput, GpurunError
from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.launch.launchers.launcher import seats_of
from gpurun.remote.agent import Agent
from gpurun.supervisor.links import Links
from gpurun.supervisor.verdict.ends import Rank, rank_in_event


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


MOST_NAMES = 1 << 15
"""No host has started more ranks of one attempt; an elastic gang starts some again after each change."""


class RankReports:
    """What hosts report about an attempt's ranks: their starts and ends. Any thread may use it.

    A host is believed only about ranks that run there.
    """

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._names: dict[str, set[object]] = {}  # by host, the ranks' ids
        self._doubted: set[str] = set()
        self._ranks: dict[tuple[str, str], Rank] = {}
        self._lock = threading.Lock()

    @property
    def all(self) -> Sequence[Rank]:
        """Return what is known of each rank."""
        with self._lock:
            return tuple(self._ranks.values())

    def believes(self, host: str, said: object, tell: Callable[[str], None]) -> bool:
        """Return whether an event is about a rank that runs on its host.

        Args:
            tell: gets one message about a host that reports other ranks.
        """
        rank = said.get("rank") if isinstance(said, dict) else None
        if not isinstance(said, dict) or type(rank) is not int:
            return True
        why = "" if self._seating.has(host, rank) else f"reports a rank {rank}, which does not run there"
        names = self._names.setdefault(host, set())
        if not why and said.get("id") not in names and len(names) >= MOST_NAMES:
            why = f"reports more than {MOST_NAMES} ranks"
        if why:
            self.accuse(host, f"{host} {why}, so gpurun ignores these reports", tell)
        else:
            names.add(said.get("id"))
        return not why

    def accuse(self, host: str, text: str, tell: Callable[[str], None]) -> None:
        """Tell something about a host whose reports cannot be true, once for each host."""
        if host not in self._doubted:
            self._doubted.add(host)
            tell(text)

    def rank_in(self, host: str, said: object, now_s: float) -> Rank | None:
        """Return the rank of an event, with what it says; None if it says nothing new. Does not keep it."""
        with self._lock:
            return rank_in_event(self._ranks, host, said, now_s)

    def keep(self, rank: Rank) -> None:
        """Keep what is known of a rank."""
        with self._lock:
            self._ranks[rank.host, rank.id] = rank

    def forget(self, host: str) -> None:
        """Discard what a host has reported."""
        with self._lock:
            self._ranks = {key: rank for key, rank in self._ranks.items() if key[0] != host}


# Ask hosts which of their ranks run.


TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RankPlace:
    """A rank that has started on a host.

    Attributes:
        code: its exit code; None while it runs.
        age_s: seconds since its start.
    """

    host: str
    rank: int
    code: int | None
    age_s: float


def ask_places(
    links: Links, job: str, attempt: int, seating: Seating
) -> tuple[list[RankPlace], Mapping[str, GpurunError]]:
    """Return what the job's hosts report about their own ranks; and the errors of hosts that do not answer."""

    def here(agent: Agent) -> list[RankPlace]:
        said = agent.call("ranks.list", job=job, attempt=attempt, timeout_s=TIMEOUT_S).value
        return [
            RankPlace(agent.host, one["rank"], one["code"], one["age_s"])
            for one in said
            if seating.has(agent.host, one["rank"])
        ]

    links.open(timeout_s=TIMEOUT_S)
    results = links.each(here)
    return [place for places in results.ok.values() for place in places], results.failed


def host_of(
    job: str, rank: int, places: Iterable[RankPlace], silent: Mapping[str, GpurunError], seating: Seating
) -> str:
    """Return the host of the newest rank with this number; if no rank has reported, the host in the plan.

    Raises:
        BadInput: the rank has ended, or does not exist; says which ranks run where.
        GpurunError: it may be on a host that does not answer.
    """
    known = sorted(places, key=lambda place: place.age_s)
    if rank >= seating.size:
        raise BadInput(f"the job has ranks 0 to {seating.size - 1}, not {rank}", job=job)
    if not known and (only := seating.host_of(rank)) is not None:
        return only
    mine = [place for place in known if place.rank == rank]
    for place in mine:
        if place.code is None:
            return place.host
    for error in silent.values():
        raise error
    living = [place for place in known if place.code is None]
    if mine:
        raise BadInput(
            f"rank {rank} has ended with code {mine[0].code} on {mine[0].host}",
            job=job,
            hint=_whereabouts(living),
        )
    raise BadInput(f"no rank {rank} has started", job=job, hint=_whereabouts(living))


def _whereabouts(living: Iterable[RankPlace]) -> str:
    """Return ``ranks that run now: 0-3 on h1; 4,6 on h2``."""
    by_host: dict[str, set[int]] = {}
    for place in living:
        by_host.setdefault(place.host, set()).add(place.rank)
    if not by_host:
        return "no rank of this job runs now"
    parts = [f"{_folded(ranks)} on {host}" for host, ranks in sorted(by_host.items(), key=lambda item: min(item[1]))]
    return f"ranks that run now: {'; '.join(parts)}"


def _folded(ranks: Iterable[int]) -> str:
    """Return ``0-2,5`` for ``{0, 1, 2, 5}``."""
    parts = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)
