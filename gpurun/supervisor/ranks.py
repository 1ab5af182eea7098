"""What the ranks of an attempt have reported: which started, which ended, when and how. Pure.

A script of gpurun's is every rank's parent in its container and records its end (`gpurun.launch.rank`); the host's
agent reports it to the head. So gpurun knows a rank's end whatever a launcher prints, waits for or forgets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

TOGETHER_S = 0.5
"""Ends closer than this cannot be told apart by time: hosts are asked at intervals, and answers travel."""
IDLE_S = 10.0
"""A host without ranks for so long has left an elastic gang: Horovod never uses a host again on which a rank failed."""
BROKEN_OFF = (128 + 15, 128 + 9)
"""Codes of ranks that something ended from outside; most often because another rank had failed."""


class Rank(NamedTuple):
    """One process of a gang, as its host has reported it. Times are on the head's monotonic clock.

    Attributes:
        id: the host's identifier; unique on the host within an attempt.
        code: exit code, 128 + n for signal n; None while it runs.
        is_cut_off: it did not record its end: it was killed together with gpurun's script.
        with_container: all other processes in its container were killed, too.
    """

    host: str
    id: str
    rank: int
    started_s: float
    ended_s: float | None = None
    code: int | None = None
    is_cut_off: bool = False
    with_container: bool = False

    @property
    def was_broken_off(self) -> bool:
        """Return whether something outside may have ended it."""
        return self.is_cut_off or self.code in BROKEN_OFF


def told(ranks: Mapping[tuple[str, str], Rank], host: str, event: object, now_s: float) -> Rank | None:
    """Return the rank in an event of ``ranks.follow``; None if the event has nothing new, or is not valid.

    Args:
        ranks: (host, id) → what is known.
    """
    if not isinstance(event, Mapping) or event.get("kind") not in ("start", "end"):
        return None
    ident, rank, age_s = event.get("id"), event.get("rank"), event.get("age_s")
    if not isinstance(ident, str) or type(rank) is not int or not isinstance(age_s, int | float):
        return None
    at_s = now_s - max(0.0, float(age_s))
    known = ranks.get((host, ident))
    if event["kind"] == "start":
        return None if known else Rank(host, ident, rank, at_s)
    code = event.get("code")
    known = known or Rank(host, ident, rank, at_s)
    if type(code) is not int:
        return None
    is_cut_off = bool(event.get("killed"))
    # A new agent has not seen the container fall, and takes back nothing.
    with_container = is_cut_off and (known.with_container or bool(event.get("container")))
    ended = known._replace(code=code, is_cut_off=is_cut_off, with_container=with_container)
    return None if ended == known else ended._replace(ended_s=at_s if known.ended_s is None else known.ended_s)


def first_failed(ranks: Iterable[Rank]) -> Rank | None:
    """Return the rank that failed first; None if none has.

    If ranks ended at the same time, one that failed by itself comes before one that was killed.
    """
    failed = sorted((rank for rank in ranks if rank.code), key=lambda rank: (rank.ended_s or 0.0, rank.rank))
    if not failed:
        return None
    until_s = (failed[0].ended_s or 0.0) + TOGETHER_S
    together = [rank for rank in failed if (rank.ended_s or 0.0) <= until_s]
    return min(together, key=lambda rank: rank.was_broken_off)


def newest(ranks: Iterable[Rank]) -> list[Rank]:
    """Return the last start of each rank of each host. Ranks of an elastic gang may start again."""
    last: dict[tuple[str, int], Rank] = {}
    for rank in sorted(ranks, key=lambda rank: rank.started_s):
        last[rank.host, rank.rank] = rank
    return list(last.values())


def have_succeeded(ranks: Iterable[Rank], awaited: Collection[int]) -> float | None:
    """Return when the last awaited rank ended with 0; None if not all have."""
    ends = {rank.rank: rank.ended_s for rank in ranks if rank.code == 0 and rank.rank in awaited}
    if len(ends) < len(awaited):
        return None
    return max((end for end in ends.values() if end is not None), default=None)


def hosts_without_ranks(ranks: Sequence[Rank], now_s: float) -> list[str]:
    """Return hosts on which a rank has failed and all have ended, some time ago, while other hosts' ranks continue.

    Leaves out hosts whose ranks have returned 0: the other ranks may take long to save.
    """
    running = {rank.host for rank in ranks if rank.code is None}
    failed = {rank.host for rank in ranks if rank.code}
    last_s: dict[str, float] = {}
    for rank in ranks:
        last_s[rank.host] = max(last_s.get(rank.host, 0.0), rank.ended_s or 0.0)
    return sorted(host for host in failed - running if running and now_s - last_s[host] >= IDLE_S)


def hosts_that_are_done(ranks: Iterable[Rank]) -> set[str]:
    """Return hosts whose ranks have all returned 0."""
    codes: dict[str, set[int | None]] = {}
    for rank in ranks:
        codes.setdefault(rank.host, set()).add(rank.code)
    return {host for host, found in codes.items() if found == {0}}
