"""Find the host of a chain that slows the hosts after it. Pure.

A host is slow if the host before it receives at least twice as fast and is well ahead. The first host of a rack looks
the same behind an uplink that is slower than the links inside the rack. So gpurun replaces one such host per rack. If
the next host in its place is not much faster, gpurun blames the network and replaces no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FACTOR = 2.0
BACKLOG_BYTES = 16 << 20
# A pull says nothing about its host before it has lasted this long.
MIN_AGE_S = 2.0


@dataclass(frozen=True)
class HostPace:
    """The speed of a host's pull.

    Attributes:
        upstream: the host it pulls from; None = the head.
        received: bytes so far.
        rate: recent bytes per second; None while unknown.
        followed: whether an unfinished host pulls from it.
    """

    host: str
    rack: str
    upstream: str | None
    received: int
    rate: float | None
    age_s: float
    followed: bool


@dataclass(frozen=True)
class LinkTrial:
    """A host that gpurun moved out of the way, and how fast it was. `rack` is where it was first; None if it was
    not.
    """

    host: str
    rack: str | None
    rate: float


def slow_host(paces: Sequence[HostPace], trials: Sequence[LinkTrial]) -> HostPace | None:
    """Return the first host of a chain that slows those after it, and that gpurun has not moved yet.

    Args:
        paces: in chain order.
        trials: what was done before.
    """
    by_host = {pace.host: pace for pace in paces}
    tried = {trial.host for trial in trials}
    for pace in paces:
        ahead = by_host.get(pace.upstream or "")
        if pace.host in tried or not pace.followed or ahead is None or not _drags(pace, ahead):
            continue
        if ahead.rack != pace.rack and not _worth_another(pace, trials):
            continue
        return pace
    return None


def _drags(pace: HostPace, ahead: HostPace) -> bool:
    if pace.rate is None or ahead.rate is None or pace.age_s < MIN_AGE_S:
        return False
    return ahead.received - pace.received > BACKLOG_BYTES and ahead.rate > FACTOR * pace.rate


def _worth_another(pace: HostPace, trials: Sequence[LinkTrial]) -> bool:
    """Return whether replacing the first host of this rack has helped so far."""
    before = [trial for trial in trials if trial.rack == pace.rack]
    return not before or (pace.rate or 0.0) > FACTOR * before[-1].rate


def rate_of(marks: Sequence[tuple[float, int]]) -> float | None:
    """Return bytes per second over marks (time, bytes so far); None with fewer than two."""
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return None
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
