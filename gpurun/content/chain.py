"""Order the hosts through which blobs travel. Pure.

Every blob crosses each rack's uplink once: the chain visits rack after rack. Hosts and racks that lack most come first,
so hosts rarely pass on blobs that they do not need themselves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from gpurun.errors import GpurunError
from gpurun.node.transfer import blobs
from gpurun.remote import Agent, RemoteOpFailed

if TYPE_CHECKING:
    from gpurun.remote.agent import Stream


# Find the host of a chain that slows the hosts after it. Pure.


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


# The threads of a transfer: each runs one host's current pull and sends its events to the driver.


# How long an upstream host may take to show that it is alive before another one is asked instead.
ALIVE_S = 2.0


@dataclass(frozen=True)
class PullProgress:
    """A pull has received this many bytes so far."""

    key: str
    generation: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Ended:
    """A pull has ended. `error` None: all its blobs have arrived."""

    key: str
    generation: int
    bytes: int
    error: GpurunError | None


Event = PullProgress | Ended


@dataclass(frozen=True)
class Source:
    """The source of a pull.

    Attributes:
        name: the upstream host; ``head`` for the head.
        address: where it listens; None = over the SSH channel from the head.
        grant: registers a token at the source.
        alive: False if the source is known not to answer.
        feed: for the SSH channel: the frames of the chunks that a host lacks.
    """

    name: str
    address: tuple[str, int] | None
    grant: Callable[[str], object] = lambda _token: None
    alive: Callable[[], bool] = lambda: True
    feed: Callable[[blobs.Wants], Iterator[bytes]] = lambda _wants: iter(())


class Pull:
    """One pull of one host, in its own thread, which starts immediately.

    Args:
        digests: announced to the host already.
        lane: (number, count): only that lane's stripes of them.
    """

    def __init__(
        self, key: str, generation: int, agent: Agent, transfer: str, source: Source, digests: Sequence[str],
        events: SimpleQueue[Event], lane: tuple[int, int],
    ) -> None:  # fmt: skip
        self.source = source
        self._key, self._generation = key, generation
        self._agent = agent
        self._transfer = transfer
        self._digests = list(digests)
        self._events = events
        self._lane = lane
        self._stream: Stream | None = None
        self._stopped = False
        self._received = 0
        Thread(target=self._run, name=f"pull {key}", daemon=True).start()

    def stop(self) -> None:
        """Stop the pull. The driver ignores its later events."""
        self._stopped = True
        if self._stream is not None:
            with suppress(GpurunError):
                self._stream.close()

    def _run(self) -> None:
        error: GpurunError | None = None
        try:
            self._stream = self._open()
            if self._stopped:
                self._stream.close()
            for item in self._stream:
                self._received = int(item.value["bytes"])
                digest = str(item.value.get("digest", ""))
                self._events.put(PullProgress(self._key, self._generation, self._received, digest))
        except GpurunError as failed:
            error = failed
            if isinstance(failed, RemoteOpFailed) and failed.kind == "link-lost" and not self._source_answers():
                error = RemoteOpFailed(failed.message, kind="no-route", host=failed.host)
        self._events.put(Ended(self._key, self._generation, self._received, error))

    def _source_answers(self) -> bool:
        try:
            return self.source.alive()
        except GpurunError:
            return False

    def _open(self) -> Stream:
        if self.source.address is None:
            missing = self._agent.call(
                "blobs.missing", transfer=self._transfer, digests=self._digests, lane=list(self._lane)
            ).value
            return self._agent.stream("blobs.feed", transfer=self._transfer, payload_in=self.source.feed(missing))
        token = secrets.token_hex(16)
        self.source.grant(token)
        address, port = self.source.address
        return self._agent.stream(
            "blobs.fetch", transfer=self._transfer, address=address, port=port, token=token, digests=self._digests,
            lane=list(self._lane),
        )  # fmt: skip


def agent_answers(agent: Agent, transfer: str) -> bool:
    """Return whether a host of a transfer answers quickly."""
    return agent.alive and bool(agent.call("blobs.status", transfer=transfer, timeout_s=ALIVE_S).value)


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


# One host in one chain: what it pulls, from which source, and its progress. Used by the driver's one thread.


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
