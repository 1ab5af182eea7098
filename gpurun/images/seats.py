"""The participants of a transfer and how to reach them: the head's end, and a seat for every host."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpurun.errors import GpurunError, HostFailure
from gpurun.images.certificate import make_certificate
from gpurun.images.lane import HEAD, HEAD_OVER_SSH
from gpurun.images.pulls import Source, agent_answers
from gpurun.images.store import Stored
from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.transfer import links
from gpurun.node.transfer.pace import Pace
from gpurun.node.transfer.packing import Packing
from gpurun.node.transfer.spool import CHUNK, Blob
from gpurun.remote import Agent, Fleet
from gpurun.remote.agent import bad_answer


@dataclass(frozen=True)
class Options:
    """Options of a transfer.

    Attributes:
        rate_bytes_s: highest sending rate of the head and of each host; None = no limit.
        interfaces: host → network interface to listen on.
        addresses: host → address to listen on; overrides the interface.
        direct: False: use only SSH to the head, not its port.
    """

    rate_bytes_s: float | None = None
    interfaces: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    direct: bool = True


@dataclass(frozen=True)
class Seat:
    """The address where a host of the transfer listens, and the head's address as that host sees it."""

    address: str
    port: int
    head: str


class Seats:
    """The endpoints of one transfer."""

    def __init__(self, fleet: Fleet, options: Options) -> None:
        self.transfer = secrets.token_hex(8)
        self.blobs: dict[str, Blob] = {}
        self.packing = Packing()
        self._pace = Pace(options.rate_bytes_s)
        self.certificate = make_certificate()
        self.server: links.Server | None = None
        self.by_host: dict[str, Seat] = {}
        self._fleet = fleet
        self._options = options

    def open(self, hosts: Iterable[str]) -> Mapping[str, GpurunError]:
        """Give every host its seat, and open the head's end; return the hosts that failed."""

        def join(agent: Agent) -> Seat:
            answer = agent.call(
                "blobs.open",
                transfer=self.transfer,
                certificate=self.certificate.certificate,
                payload=self.certificate.key.encode(),
                interface=self._options.interfaces.get(agent.host),
                address=self._options.addresses.get(agent.host),
                rate_bytes_s=self._options.rate_bytes_s,
            ).value
            return Seat(answer["address"], answer["port"], answer["head"])

        results = self._fleet.map(join, hosts)
        self.by_host.update(results.ok)
        if self._options.direct and results.ok:
            self.server = self._listen({seat.head for seat in results.ok.values()})
        return results.failed

    def announce(self, stored: Stored, hosts: Iterable[str]) -> Mapping[str, GpurunError]:
        """Tell these hosts that a blob is ready on the head; return the hosts that failed."""
        self.blobs[stored.digest] = stored.open()

        def tell(agent: Agent) -> None:
            agent.call(
                "blobs.expect", transfer=self.transfer, digest=stored.digest, size=stored.size, payload=stored.hashes
            )

        return self._fleet.map(tell, hosts).failed

    def source(self, name: str, host: str) -> Source:
        """Return how `host` pulls from `name`, which is a host, `HEAD` or `HEAD_OVER_SSH`."""
        if name == HEAD and self.server is not None:
            return Source(HEAD, (self.by_host[host].head, self.server.port), self.server.grant)
        if name in (HEAD, HEAD_OVER_SSH):
            return Source(HEAD_OVER_SSH, None, feed=lambda wants: self._feed(host, wants))
        agent, seat = self._fleet.agents[name], self.by_host[name]
        return Source(
            name,
            (seat.address, seat.port),
            lambda token: agent.call("blobs.grant", transfer=self.transfer, token=token, timeout_s=10.0),
            lambda: agent_answers(agent, self.transfer),
        )

    def _feed(self, host: str, wants: links.Wants) -> Iterator[bytes]:
        """Yield the chunks that a host lacks, as frames for its SSH channel.

        Raises:
            RemoteOpFailed: the host asks for a chunk that does not exist, or for a blob twice.
        """
        buffer = memoryview(bytearray(CHUNK))
        left = dict(self.blobs)
        for digest, ranges in wants:
            blob = left.pop(digest, None)
            if blob is None:
                raise bad_answer(
                    host, f"the host's answer to blobs.missing asks for {digest}, which the host does not need"
                )
            try:
                for first, last in links.checked_ranges(blob, ranges):
                    for index in range(first, last + 1):
                        header, piece = links.chunk_frame(blob, index, buffer, self.packing)
                        self._pace.spend(len(piece))
                        yield frames.encode(header, piece)
            except OpError as error:
                raise bad_answer(host, f"blobs.missing: {error.message}") from None

    def close(self, *, keep: Container[str]) -> None:
        """Close every end. Idempotent.

        Args:
            keep: hosts that keep what has arrived for the next try.
        """
        if self.server is not None:
            self.server.close()
        for blob in self.blobs.values():
            blob.close()
        hosts = [host for host in self.by_host if self._fleet.agents[host].alive]
        self._fleet.map(lambda agent: agent.call("blobs.close", transfer=self.transfer, keep=agent.host in keep), hosts)

    def _listen(self, heads: set[str]) -> links.Server:
        """Open the head's own end, on the one address by which hosts know it, if there is one."""
        # They differ behind address translation or jump hosts; certificate and tokens guard the door either way.
        anywhere = "::" if any(":" in head for head in heads) else "0.0.0.0"  # noqa: S104
        for bind in [*(heads if len(heads) == 1 else ()), anywhere]:
            try:
                return links.Server(
                    bind, self.certificate.certificate, self.certificate.key, self.blobs.get, self._pace, self.packing
                )
            except OSError:
                continue
        raise HostFailure("gpurun cannot listen on any address of the head", host=HEAD)
