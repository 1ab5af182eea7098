"""One host in one chain: what it pulls, from which source, and its progress. Used by the driver's one thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpurun.images.chain import Hop
from gpurun.images.pulls import Ended, Pull, PullProgress
from gpurun.images.slow import HostPace, rate_of

HEAD = "head"
HEAD_OVER_SSH = "head over SSH"
RATE_WINDOW_S = 3.0


@dataclass
class ChainLane:
    """A host's part in a chain.

    Attributes:
        number: the number of the chain.
        upstreams: possible sources, the best first: hosts, `HEAD`, `HEAD_OVER_SSH`.
        tries: consecutive failures with the first source.
        corrupt: how often a chunk did not match its announced hash.
        generation: the number of the current pull; events of other pulls are ignored.
        asked: the blobs of the current pull.
        done: blobs that have arrived.
    """

    hop: Hop
    number: int
    upstreams: list[str]
    tries: int = 0
    corrupt: int = 0
    generation: int = 0
    pull: Pull | None = None
    asked: tuple[str, ...] = ()
    done: set[str] = field(default_factory=set)
    _started_s: float = 0.0
    _before_bytes: int = 0
    _pull_bytes: int = 0
    _marks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The host's name."""
        return self.hop.host

    @property
    def key(self) -> str:
        """Return the key that identifies its events."""
        return f"{self.number}/{self.hop.host}"

    @property
    def received(self) -> int:
        """Return the bytes received so far."""
        return self._before_bytes + self._pull_bytes

    @property
    def source(self) -> str | None:
        """Return the current source."""
        return self.pull.source.name if self.pull is not None else None

    def lacks(self, announced: set[str]) -> tuple[str, ...]:
        """Return the blobs that it could pull now."""
        return tuple(digest for digest in self.hop.digests if digest in announced and digest not in self.done)

    def started(self, pull: Pull, asked: tuple[str, ...]) -> None:
        """Record that a pull of this generation has begun."""
        self.pull, self.asked = pull, asked
        self._started_s = time.monotonic()
        self._marks = []

    def progressed(self, event: PullProgress) -> None:
        """Record that the current pull has received more."""
        self._pull_bytes = event.bytes
        self.tries = 0
        now = time.monotonic()
        self._marks = [*[mark for mark in self._marks if mark[0] > now - RATE_WINDOW_S], (now, self.received)]

    def ended(self, event: Ended) -> None:
        """Record the end of the current pull, with or without success."""
        self.pull = None
        self._before_bytes += event.bytes
        self._pull_bytes = 0
        if event.error is None:
            self.done |= set(self.asked)
            self.tries = 0

    def abandon(self) -> None:
        """Stop the current pull. Keeps what it received, so that another pull can continue."""
        if self.pull is not None:
            self.generation += 1
            self.pull.stop()
            self.pull = None
            self._before_bytes += self._pull_bytes
            self._pull_bytes = 0

    def pace(self, lanes: Sequence[ChainLane]) -> HostPace:
        """Return the speed of its pull, compared with all lanes of its chain."""
        return HostPace(
            host=self.host,
            rack=self.hop.rack,
            upstream=self.source if self.source not in (HEAD, HEAD_OVER_SSH) else None,
            received=self.received,
            rate=rate_of(self._marks),
            age_s=time.monotonic() - self._started_s if self.pull else 0.0,
            followed=any(other.source == self.host for other in lanes),
        )


def lanes_of(hops: Sequence[Hop], number: int, direct: bool) -> list[ChainLane]:
    """Return the lanes of a chain, each with its possible sources: the hosts before it, nearest first, then the head.

    Args:
        direct: False: the head can be reached over SSH only.
    """
    ways_to_head = [HEAD, HEAD_OVER_SSH] if direct else [HEAD_OVER_SSH]
    before: dict[str, list[str]] = {}
    lanes: list[ChainLane] = []
    for hop in hops:
        upstreams = [hop.upstream, *before[hop.upstream]] if hop.upstream is not None else []
        before[hop.host] = upstreams
        lanes.append(ChainLane(hop, number, [*upstreams, *ways_to_head]))
    return lanes
