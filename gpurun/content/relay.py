"""Run one transfer: blobs travel from the head through chains of hosts; gpurun repairs a chain if a host dies or is
slow.

The loop around `Relay.step` takes every decision, in one thread, from events of the pulls. A host pulls from the host
before it; if that host is gone, from the host before that, and so on up to the head. If hosts cannot reach each other
or the head, the head sends over SSH. Hosts keep what has arrived and never ask for it again.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Container, Sequence, Set
from queue import Empty, SimpleQueue
from threading import Thread

from gpurun.content.chain import (
    HEAD,
    HEAD_OVER_SSH,
    MIN_AGE_S,
    ChainLane,
    Event,
    Hop,
    HostPace,
    LinkTrial,
    Pull,
    PullProgress,
    lanes_of,
    slow_host,
)
from gpurun.content.seats import Options, Seats
from gpurun.content.store import Stored
from gpurun.errors import GpurunError, HostFailure, HostNotReady, HostUnreachable
from gpurun.node.transfer.spool import CHUNK
from gpurun.remote import Agent, Fleet, RemoteOpFailed
from gpurun.remote.agent import BAD_ANSWER

# Decide whether the first host of a chain or its link is slow. No host is before it to compare with, so gpurun tries
# the next.


AFTER_S = 3.0
FACTOR = 3.0
# Of what is being transferred, this part is tried with, and at most so much.
PART = 1 / 128
MOST_CHUNKS = 32


class FirstHostTrial:
    """The trial of one chain's first host; made at most once."""

    def __init__(self, number: int, count: int, seats: Seats, fleet: Fleet) -> None:
        self._number = number
        self._count = count
        self._seats = seats
        self._fleet = fleet
        self._thread: Thread | None = None
        self._rate: float | None = None
        self._over = False

    def slow(self, lanes: Sequence[ChainLane], paces: Sequence[HostPace]) -> HostPace | None:
        """Return the first host if the trial has shown that it is slow. Begins the trial when it is time."""
        first = next((pace for pace in paces if pace.upstream is None and pace.followed), None)
        if self._over or first is None or not first.rate:
            return None
        if self._thread is None:
            self._begin(first, lanes)
            return None
        if self._thread.is_alive():
            return None
        self._over = True
        return first if self._rate is not None and self._rate > FACTOR * first.rate else None

    def stop(self) -> None:
        """Make no more trials."""
        self._over = True

    def _begin(self, first: HostPace, lanes: Sequence[ChainLane]) -> None:
        next_one = next((lane for lane in lanes if lane.source == first.host), None)
        if first.age_s < AFTER_S or next_one is None or self._seats.server is None:
            return
        wants = self._wants(next_one)
        if wants:
            self._thread = Thread(target=self._run, args=(next_one.host, wants), daemon=True)
            self._thread.start()

    def _wants(self, lane: ChainLane) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the last chunks of the last blob that the lane pulls, if the transfer is long enough."""
        blobs = [self._seats.blobs[digest] for digest in lane.asked if digest in self._seats.blobs]
        chunks = sum(blob.count for blob in blobs)
        amount = min(MOST_CHUNKS, int(chunks * PART))
        if not amount or self._count > 1:
            return []
        last = blobs[-1].count - 1
        return [(blobs[-1].digest, [(max(0, last - amount + 1), last)])]

    def _run(self, host: str, wants: list[tuple[str, list[tuple[int, int]]]]) -> None:
        token = secrets.token_hex(16)
        source = self._seats.source(HEAD, host)
        assert source.address is not None
        try:
            source.grant(token)
            began = time.monotonic()
            self._fleet.agents[host].call(
                "blobs.fetch", transfer=self._seats.transfer, address=source.address[0], port=source.address[1],
                token=token, digests=[], wants=wants,
            )  # fmt: skip
            amount = sum((last - first + 1) * CHUNK for _, ranges in wants for first, last in ranges)
            self._rate = amount / (time.monotonic() - began)
        except GpurunError:
            self._rate = None


TICK_S = 0.1
MAX_CORRUPT = 3
SETTLE_S = 1.0
# Errors that are the host's own: another upstream end would not help.
_OWN_FAULTS = frozenset(
    {"no-space", "read-only", "denied", "os-error", "internal", "bad-request", "not-found", BAD_ANSWER}
)


class DamagedBlob(HostNotReady):
    """A blob of the head does not match its digest: its file is damaged.

    Attributes:
        digest: the blob's digest.
        receiver: the host that refused a chunk.
    """

    def __init__(self, digest: str, receiver: str) -> None:
        super().__init__(f"the head's copy of the content {digest} is damaged")
        self.digest, self.receiver = digest, receiver


class Relay:
    """One transfer.

    Args:
        chains: the hops of each lane; every host of the transfer is in each of them.
        told: receives the number of bytes that a host has received.
        transfer: its name on the hosts; "" = a new one.
    """

    def __init__(
        self,
        fleet: Fleet,
        chains: Sequence[Sequence[Hop]],
        options: Options,
        told: Callable[[str, int], object] = lambda _host, _bytes: None,
        transfer: str = "",
    ) -> None:
        self.failed: dict[str, GpurunError] = {}
        self.seats = Seats(fleet, options, transfer)
        self.lanes = {
            lane.key: lane for number, hops in enumerate(chains) for lane in lanes_of(hops, number, options.direct)
        }
        self._fleet = fleet
        self._told = told
        self._count = len(chains)
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._announced: dict[str, set[str]] = {}
        self._accusers: dict[str, set[str]] = {}
        self._trials: dict[int, list[LinkTrial]] = {number: [] for number in range(self._count)}
        self._first_hosts = [FirstHostTrial(number, self._count, self.seats, fleet) for number in range(self._count)]

    @property
    def transfer(self) -> str:
        """Return the transfer's name on the hosts."""
        return self.seats.transfer

    @property
    def hosts(self) -> list[str]:
        """Return the remaining hosts."""
        return [host for host in dict.fromkeys(lane.host for lane in self.lanes.values()) if host not in self.failed]

    @property
    def accused(self) -> Set[str]:
        """Return the hosts whose chunks another host refused."""
        return self._accusers.keys()

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the head has sent over TLS."""
        return self.seats.server.sent_bytes if self.seats.server else 0

    # -- the steps ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare every host for the transfer. Hosts that cannot take part are in `failed`."""
        for host, error in self.seats.open(self.hosts).items():
            self.give_up(host, error)

    def announce(self, stored: Stored) -> None:
        """Announce that a blob is ready on the head, so that hosts can pull it."""
        wanting = [host for host in self.hosts if any(stored.digest in lane.hop.digests for lane in self._of(host))]
        failed = self.seats.announce(stored, wanting)
        for host in wanting:
            if host in failed:
                self.give_up(host, failed[host])
            else:
                self._announced.setdefault(host, set()).add(stored.digest)

    def step(self) -> None:
        """Process events, and start pulls that can start; return within about `TICK_S`.

        Raises:
            DamagedBlob: the head's bytes do not match its announcement.
        """
        self._take_events(time.monotonic() + TICK_S)
        for host, agent in self._agents():
            if not agent.alive:
                self.give_up(
                    host, HostUnreachable("gpurun lost the connection while the host received data", host=host)
                )
        self._spare_others_the_slow()
        self._measure_link()
        for lane in self.lanes.values():
            self._start(lane)

    def finished(self, digests: Sequence[str]) -> bool:
        """Return whether every remaining host has everything of `digests` that it should pull."""
        wanted = set(digests)
        return all(
            wanted & set(lane.hop.digests) <= lane.done for lane in self.lanes.values() if lane.host not in self.failed
        )

    def settle(self) -> None:
        """Process the last events of pulls that have just ended, because what they received counts."""
        deadline = time.monotonic() + SETTLE_S
        while any(lane.pull is not None for lane in self.lanes.values()) and time.monotonic() < deadline:
            self.step()

    def give_up(self, host: str, error: GpurunError) -> None:
        """Remove a host from the transfer. The hosts after it pull from the host before it."""
        if host in self.failed:
            return
        self.failed[host] = error
        for lane in self.lanes.values():
            if host in (lane.host, lane.source):
                lane.abandon()

    def close(self, *, keep: Container[str] = ()) -> None:
        """End the transfer everywhere. Idempotent.

        Args:
            keep: hosts that keep what has arrived for the next try.
        """
        for lane in self.lanes.values():
            lane.abandon()
        for trial in self._first_hosts:
            trial.stop()
        self.seats.close(keep=keep)

    # -- events -------------------------------------------------------------------------------------------

    def _take_events(self, deadline: float) -> None:
        """Process events; wait for the first until the deadline."""
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return
            lane = self.lanes[event.key]
            if event.generation == lane.generation:
                self._take(lane, event)
            if self._events.empty():
                return

    def _take(self, lane: ChainLane, event: Event) -> None:
        if isinstance(event, PullProgress):
            lane.progressed(event)
        else:
            source = lane.source or HEAD
            lane.ended(event)
            if event.error is not None:
                self._retry(lane, source, event.error)
        self._told(lane.host, sum(each.received for each in self._of(lane.host)))

    def _retry(self, lane: ChainLane, source: str, error: GpurunError) -> None:
        """After a failed pull: try the same source again, or the next, or give up the host."""
        kind = error.kind if isinstance(error, RemoteOpFailed) else "lost"
        if not self._fleet.agents[lane.host].alive or kind in _OWN_FAULTS:
            self.give_up(lane.host, error)
            return
        if source in self._fleet.agents and not self._fleet.agents[source].alive:
            self.give_up(source, HostUnreachable("gpurun lost the connection while the host sent data", host=source))
        if kind == "corrupt":
            self._accuse(lane, source, error)
        lane.tries += 1
        if kind in ("link-lost", "corrupt") and lane.tries <= 1 and source not in self.failed:
            return
        lane.tries = 0
        if lane.upstreams[0] == source:
            del lane.upstreams[0]
        if not lane.upstreams or lane.corrupt > MAX_CORRUPT:
            why = f"no source could send the data to the host: {error.message}"
            self.give_up(lane.host, HostFailure(why, kind="link-lost", host=lane.host))

    def _accuse(self, lane: ChainLane, source: str, error: GpurunError) -> None:
        """Decide which host is at fault when a host refused a chunk.

        Each chunk's hash is known, so either the source or the refusing host is at fault. If the source is a host,
        gpurun excludes it after reports of two hosts, because one host alone may lie. The head can check its own file.

        Raises:
            DamagedBlob: the head's own file is damaged.
        """
        if source in (HEAD, HEAD_OVER_SSH):
            lane.corrupt += 1
            self._check_own(lane.host, error)
            return
        accusers = self._accusers.setdefault(source, set())
        accusers.add(lane.host)
        if len(accusers) > 1:
            told = " and ".join(sorted(accusers))
            self.give_up(source, HostFailure(f"the host sent wrong data to {told}", host=source))

    def _check_own(self, receiver: str, error: GpurunError) -> None:
        """Check the head's own file after a host refused one of its chunks."""
        detail = error.detail if isinstance(error, RemoteOpFailed) else {}
        digest, index = detail.get("digest"), detail.get("index")
        blob = self.seats.blobs.get(digest) if isinstance(digest, str) else None
        if blob is not None and type(index) is int and 0 <= index < blob.count and not blob.holds(index):
            raise DamagedBlob(blob.digest, receiver)

    def _measure_link(self) -> None:
        """Measure the head's link, until chunks are compressed. A pull waits for nothing but the link and the host."""
        firsts = [lane for lane in self.lanes.values() if lane.source in (HEAD, HEAD_OVER_SSH)]
        paces = [lane.pace(firsts) for lane in firsts]
        rates = [pace.rate for pace in paces if pace.rate is not None and pace.age_s >= MIN_AGE_S]
        if rates and len(rates) == len(paces) and not self.seats.packing.on:
            self.seats.packing.link_bytes_s = sum(rates)

    # -- who pulls from whom ------------------------------------------------------------------------------

    def _of(self, host: str) -> list[ChainLane]:
        return [lane for lane in self.lanes.values() if lane.host == host]

    def _agents(self) -> list[tuple[str, Agent]]:
        return [(host, self._fleet.agents[host]) for host in self.hosts]

    def _start(self, lane: ChainLane) -> None:
        if lane.pull is not None or lane.host in self.failed:
            return
        digests = lane.lacks(self._announced.get(lane.host, set()))
        if not digests:
            return
        lane.upstreams = [name for name in lane.upstreams if name not in self.failed] or [HEAD_OVER_SSH]
        lane.generation += 1
        agent, seats = self._fleet.agents[lane.host], self.seats
        source = seats.source(lane.upstreams[0], lane.host)
        pull = Pull(
            lane.key, lane.generation, agent, seats.transfer, source, digests, self._events,
            (lane.number, self._count),
        )  # fmt: skip
        lane.started(pull, digests)

    def _spare_others_the_slow(self) -> None:
        """Move a slow host to the end, so that it does not slow others; it continues alone."""
        for number, trials in self._trials.items():
            lanes = [lane for lane in self.lanes.values() if lane.number == number and lane.host not in self.failed]
            paces = [lane.pace(lanes) for lane in lanes]
            found = slow_host(paces, trials) or self._first_hosts[number].slow(lanes, paces)
            if found is not None:
                slow = next(lane for lane in lanes if lane.host == found.host)
                trials.append(LinkTrial(found.host, self._demote(slow, lanes, found), found.rate or 0.0))

    def _demote(self, slow: ChainLane, lanes: Sequence[ChainLane], pace: HostPace) -> str | None:
        """Let no host pull from this host any more. Returns the rack in which it was first, if it was."""
        if pace.upstream is None:
            self.seats.packing.link_bytes_s = math.inf  # it was the host that is slow
        first = pace.upstream is None or self.lanes[f"{slow.number}/{pace.upstream}"].hop.rack != slow.hop.rack
        for lane in lanes:
            lane.upstreams = [name for name in lane.upstreams if name != slow.host]
            if lane.source == slow.host:
                lane.abandon()
        mates = [lane for lane in lanes if lane.hop.rack == slow.hop.rack and lane is not slow]
        if first and mates and set(slow.hop.digests) <= set(mates[-1].hop.digests):
            # Behind its rack's last host it costs the rack's uplink nothing.
            slow.upstreams.insert(0, mates[-1].host)
            slow.abandon()
        return slow.hop.rack if first else None
