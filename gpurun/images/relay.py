"""Drive one transfer: blobs from the head through chains of hosts, repaired when a host dies or drags.

The loop in `Relay.run` takes every decision, in one thread, from events that pulls send it. A host pulls from the one
before it. When that one is gone, it pulls from the one before that, and so on up to the head; when hosts cannot reach
each other or the head, the head feeds it over SSH. Nothing that has arrived is asked for again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from gpurun.errors import GpurunError, HostFailure, HostUnreachable
from gpurun.images.certificate import make_certificate
from gpurun.images.chain import Hop
from gpurun.images.pulls import Ended, Event, Progress, Pull, Source, agent_answers
from gpurun.images.slow import Pace, Trial, rate_of, slow_host
from gpurun.images.store import Stored
from gpurun.node import links
from gpurun.node.spool import Blob
from gpurun.remote import Agent, Fleet, RemoteOpFailed

TICK_S = 0.1
MAX_CORRUPT = 3
SETTLE_S = 1.0
RATE_WINDOW_S = 3.0
HEAD = "head"
HEAD_OVER_SSH = "head over SSH"
# Errors that are the host's own: another upstream end would not help.
_OWN_FAULTS = frozenset({"no-space", "read-only", "denied", "os-error", "internal", "bad-request", "not-found"})


@dataclass(frozen=True)
class Seat:
    """Where a host of the transfer listens, and how it sees the head."""

    address: str
    port: int
    head: str


@dataclass
class _Lane:
    """One host in one chain: what it pulls, from whom, how far it is."""

    hop: Hop
    number: int
    upstreams: list[str]
    tries: int = 0
    corrupt: int = 0
    generation: int = 0
    pull: Pull | None = None
    asked: tuple[str, ...] = ()
    done: set[str] = field(default_factory=set)
    started_s: float = 0.0
    before_bytes: int = 0
    pull_bytes: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.number}/{self.hop.host}"

    @property
    def received(self) -> int:
        return self.before_bytes + self.pull_bytes


@dataclass(frozen=True)
class Options:
    """How to transfer.

    Attributes:
        rate_bytes_s: what the head and each host may send; None = as fast as it goes.
        interfaces: host → network interface to listen on.
        addresses: host → address to listen on, over the interface's.
        host_to_host: False: hosts may not talk to each other; the head serves each.
        direct: False: the head's port is not to be tried, only SSH.
    """

    rate_bytes_s: float | None = None
    interfaces: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    direct: bool = True


class Relay:
    """One transfer.

    Args:
        chains: the hops of each lane; every host of the transfer is in each of them.
        told: told how many bytes a host has received.
    """

    def __init__(
        self,
        fleet: Fleet,
        chains: Sequence[Sequence[Hop]],
        options: Options,
        told: Callable[[str, int, str], object] = lambda _host, _bytes, _digest: None,
    ) -> None:
        self.transfer = secrets.token_hex(8)
        self.failed: dict[str, GpurunError] = {}
        self._fleet = fleet
        self._options = options
        self._told = told
        self._certificate = make_certificate()
        self._pace = links.Pace(options.rate_bytes_s)
        self._blobs: dict[str, Blob] = {}
        self._server: links.Server | None = None
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._announced: dict[str, set[str]] = {}
        self._seats: dict[str, Seat] = {}
        self._lanes = {
            lane.key: lane for number, hops in enumerate(chains) for lane in _lanes(hops, number, options.direct)
        }
        self._count = len(chains)
        self._trials: dict[int, list[Trial]] = {}

    @property
    def hosts(self) -> list[str]:
        """The hosts still in it."""
        return [
            host for host in dict.fromkeys(lane.hop.host for lane in self._lanes.values()) if host not in self.failed
        ]

    @property
    def sent_bytes(self) -> int:
        """What the head has sent over TLS."""
        return self._server.sent_bytes if self._server else 0

    # -- the steps ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make every host part of the transfer. One that cannot be is in `failed`."""

        def join(agent: Agent) -> Seat:
            answer = agent.call(
                "blobs.open", transfer=self.transfer, certificate=self._certificate.certificate,
                payload=self._certificate.key.encode(), interface=self._options.interfaces.get(agent.host),
                address=self._options.addresses.get(agent.host), rate_bytes_s=self._options.rate_bytes_s,
            ).value  # fmt: skip
            return Seat(answer["address"], answer["port"], answer["head"])

        results = self._fleet.map(join, self.hosts)
        self._seats.update(results.ok)
        if self._options.direct and results.ok:
            self._server = self._listen({seat.head for seat in results.ok.values()})
        for host, error in results.failed.items():
            self._drop(host, error)

    def _listen(self, heads: set[str]) -> links.Server:
        """The head's own end of the transfer, on the one address that hosts know it by, if there is one."""
        any_address = "::" if any(":" in head for head in heads) else "0.0.0.0"  # noqa: S104 - they differ: behind NAT, or jumps
        for bind in [*(heads if len(heads) == 1 else ()), any_address]:
            try:
                return links.Server(
                    bind, self._certificate.certificate, self._certificate.key, self._blobs.get, self._pace
                )
            except OSError:
                continue
        raise HostFailure("no address to listen on", host=HEAD)

    def announce(self, stored: Stored) -> None:
        """A blob is ready on the head: tell the hosts that will pull it, and let them."""
        self._blobs[stored.digest] = stored.open()
        wanting = [host for host in self.hosts if stored.digest in self._wanted(host)]

        def tell(agent: Agent) -> None:
            agent.call(
                "blobs.expect", transfer=self.transfer, digest=stored.digest, size=stored.size, payload=stored.hashes
            )

        results = self._fleet.map(tell, wanting)
        for host in results.ok:
            self._announced.setdefault(host, set()).add(stored.digest)
        for host, error in results.failed.items():
            self._drop(host, error)

    def step(self) -> None:
        """Take what has happened, start the pulls that can start; returns within `TICK_S` or so."""
        deadline = time.monotonic() + TICK_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            lane = self._lanes[event.key]
            if event.generation == lane.generation:
                self._progress(lane, event) if isinstance(event, Progress) else self._ended(lane, event)
            if self._events.empty():
                break
        for host, agent in self._agents():
            if not agent.alive:
                self._drop(host, HostUnreachable("it was lost while it received", host=host))
        self._demote_the_slow()
        for lane in self._lanes.values():
            self._start(lane)

    def give_up(self, host: str, error: GpurunError) -> None:
        """Take a host out that failed for a reason of its own."""
        self._drop(host, error)

    def finished(self, digests: Sequence[str]) -> bool:
        """Whether every host that is left has everything of `digests` that it is to pull."""
        return all(
            set(digests) & set(lane.hop.digests) <= lane.done
            for lane in self._lanes.values()
            if lane.hop.host not in self.failed
        )

    def settle(self) -> None:
        """Hear the last words of pulls that have just ended: what they brought counts."""
        deadline = time.monotonic() + SETTLE_S
        while any(lane.pull is not None for lane in self._lanes.values()) and time.monotonic() < deadline:
            self.step()

    def close(self, *, keep: bool) -> None:
        """End the transfer everywhere. Idempotent.

        Args:
            keep: leave what has arrived on the hosts for the next try.
        """
        for lane in self._lanes.values():
            if lane.pull is not None:
                lane.generation += 1
                lane.pull.stop()
        if self._server is not None:
            self._server.close()
        for blob in self._blobs.values():
            blob.close()
        hosts = [host for host in self._seats if self._fleet.agents[host].alive]
        self._fleet.map(lambda agent: agent.call("blobs.close", transfer=self.transfer, keep=keep), hosts)

    # -- decisions ----------------------------------------------------------------------------------------

    def _agents(self) -> list[tuple[str, Agent]]:
        return [(host, self._fleet.agents[host]) for host in self.hosts]

    def _wanted(self, host: str) -> set[str]:
        return {digest for lane in self._lanes.values() if lane.hop.host == host for digest in lane.hop.digests}

    def _start(self, lane: _Lane) -> None:
        host = lane.hop.host
        if lane.pull is not None or host in self.failed:
            return
        announced = self._announced.get(host, set())
        digests = tuple(digest for digest in lane.hop.digests if digest in announced and digest not in lane.done)
        if not digests:
            return
        lane.generation += 1
        lane.asked = digests
        lane.started_s = time.monotonic()
        lane.marks = []
        lane.pull = Pull(
            lane.key, lane.generation, self._fleet.agents[host], self.transfer, self._source(lane), digests,
            self._events, self._blobs.get, self._pace, (lane.number, self._count),
        )  # fmt: skip

    def _source(self, lane: _Lane) -> Source:
        """Where a lane pulls from now."""
        name = self._upstream(lane)
        if name == HEAD_OVER_SSH or (name == HEAD and self._server is None):
            return Source(HEAD_OVER_SSH, None, lambda _token: None)
        if name == HEAD and self._server is not None:
            return Source(name, (self._seats[lane.hop.host].head, self._server.port), self._server.grant)
        agent, seat = self._fleet.agents[name], self._seats[name]
        return Source(
            name,
            (seat.address, seat.port),
            lambda token: agent.call("blobs.grant", transfer=self.transfer, token=token, timeout_s=10.0),
            lambda: agent_answers(agent, self.transfer),
        )

    def _upstream(self, lane: _Lane) -> str:
        """The first that is left of those it may pull from."""
        lane.upstreams = [name for name in lane.upstreams if name not in self.failed] or [HEAD_OVER_SSH]
        return lane.upstreams[0]

    def _progress(self, lane: _Lane, event: Progress) -> None:
        lane.pull_bytes = event.bytes
        now = time.monotonic()
        lane.marks = [*[mark for mark in lane.marks if mark[0] > now - RATE_WINDOW_S], (now, lane.received)]
        lane.tries = 0
        self._tell(lane.hop.host, event.digest)

    def _tell(self, host: str, digest: str) -> None:
        self._told(host, sum(lane.received for lane in self._lanes.values() if lane.hop.host == host), digest)

    def _ended(self, lane: _Lane, event: Ended) -> None:
        source = lane.pull.source.name if lane.pull else ""
        lane.pull = None
        lane.before_bytes += event.bytes
        lane.pull_bytes = 0
        self._tell(lane.hop.host, "")
        if event.error is None:
            lane.done |= set(lane.asked)
            lane.tries = 0
            return
        self._retry(lane, source, event.error)

    def _retry(self, lane: _Lane, source: str, error: GpurunError) -> None:
        """A pull failed: the same source again, the next one, or the host is out."""
        host = lane.hop.host
        kind = error.kind if isinstance(error, RemoteOpFailed) else "lost"
        if not self._fleet.agents[host].alive or kind in _OWN_FAULTS:
            self._drop(host, error)
            return
        if source in self._fleet.agents and not self._fleet.agents[source].alive:
            self._drop(source, HostUnreachable("it was lost while it sent", host=source))
        lane.corrupt += kind == "corrupt"
        lane.tries += 1
        same_again = kind in ("link-lost", "corrupt") and lane.tries <= 1
        if same_again and source not in self.failed:
            return
        lane.tries = 0
        if lane.upstreams[0] == source:
            lane.upstreams = lane.upstreams[1:]
        if not lane.upstreams or lane.corrupt > MAX_CORRUPT:
            self._drop(host, HostFailure(f"nothing could be brought to it: {error.message}", host=host))

    def _drop(self, host: str, error: GpurunError) -> None:
        """Take a host out; those after it pull from the one before it."""
        if host in self.failed:
            return
        self.failed[host] = error
        for lane in self._lanes.values():
            if lane.hop.host == host and lane.pull is not None:
                lane.generation += 1
                lane.pull.stop()
                lane.pull = None
            elif lane.pull is not None and lane.pull.source.name == host:
                self._abandon(lane)

    def _abandon(self, lane: _Lane) -> None:
        """Stop a pull to start it again from elsewhere; what it has brought stays."""
        assert lane.pull is not None
        lane.generation += 1
        lane.pull.stop()
        lane.pull = None
        lane.before_bytes += lane.pull_bytes
        lane.pull_bytes = 0

    def _demote_the_slow(self) -> None:
        """Take a host that drags others out of their way; it goes on by itself."""
        for number in range(self._count):
            lanes = [
                lane for lane in self._lanes.values() if lane.number == number and lane.hop.host not in self.failed
            ]
            trials = self._trials.setdefault(number, [])
            found = slow_host([self._pace_of(lane, lanes) for lane in lanes], trials)
            if found is not None:
                self._demote(next(lane for lane in lanes if lane.hop.host == found.host), lanes, found, trials)

    def _pace_of(self, lane: _Lane, lanes: Sequence[_Lane]) -> Pace:
        source = lane.pull.source.name if lane.pull else None
        return Pace(
            host=lane.hop.host,
            rack=lane.hop.rack,
            upstream=source if source in self._fleet.agents else None,
            received=lane.received,
            rate=rate_of(lane.marks),
            age_s=time.monotonic() - lane.started_s if lane.pull else 0.0,
            followed=any(other.pull is not None and other.pull.source.name == lane.hop.host for other in lanes),
        )

    def _demote(self, slow: _Lane, lanes: Sequence[_Lane], pace: Pace, trials: list[Trial]) -> None:
        first = slow.hop.rack != self._lanes[f"{slow.number}/{pace.upstream}"].hop.rack
        trials.append(Trial(slow.hop.host, slow.hop.rack if first else None, pace.rate or 0.0))
        for lane in lanes:
            lane.upstreams = [name for name in lane.upstreams if name != slow.hop.host]
            if lane.pull is not None and lane.pull.source.name == slow.hop.host:
                self._abandon(lane)
        mates = [lane for lane in lanes if lane.hop.rack == slow.hop.rack and lane is not slow]
        if first and mates and set(slow.hop.digests) <= set(mates[-1].hop.digests):
            # Behind its rack's last host it costs the rack's uplink nothing.
            slow.upstreams = [mates[-1].hop.host, *slow.upstreams]
            self._abandon(slow)


def _lanes(hops: Sequence[Hop], number: int, direct: bool) -> list[_Lane]:
    """The lanes of a chain, each with those it may pull from: the hosts before it, nearest first, then the head."""
    ways_to_head = [HEAD, HEAD_OVER_SSH] if direct else [HEAD_OVER_SSH]
    before: dict[str, list[str]] = {}
    lanes: list[_Lane] = []
    for hop in hops:
        upstreams = [hop.upstream, *before[hop.upstream]] if hop.upstream is not None else []
        before[hop.host] = upstreams
        lanes.append(_Lane(hop, number, [*upstreams, *ways_to_head]))
    return lanes
