"""Find on which host each rank runs. The hosts report it, because a launcher may place ranks in another order than the
grant.

Horovod's elastic driver numbers hosts as they appear, and numbers them again after each change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from gpurun.errors import BadInput, GpurunError
from gpurun.remote.agent import Agent
from gpurun.supervisor.links import Links
from gpurun.supervisor.seating import Seating

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


def ask(links: Links, job: str, attempt: int, seating: Seating) -> tuple[list[RankPlace], Mapping[str, GpurunError]]:
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
