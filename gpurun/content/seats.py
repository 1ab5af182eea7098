"""The participants of a transfer and how to reach them: the head's end, and a seat for every host."""

from __future__ import annotations

import math
import secrets
import time
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from gpurun.content.chain import HEAD, HEAD_OVER_SSH, Source, agent_answers
from gpurun.content.store import Stored
from gpurun.errors import GpurunError, HostFailure
from gpurun.node.agent import frames
from gpurun.node.agent.frames import OpError
from gpurun.node.transfer import blobs
from gpurun.node.transfer.spool import CHUNK, Blob, Pace, Remembered
from gpurun.remote import Agent, Fleet
from gpurun.remote.agent import bad_answer

if TYPE_CHECKING:
    from gpurun.inventory.model import Fabric, Inventory


# The certificate of one transfer: made on the head, sent to its hosts over SSH, valid for nothing else.


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: str
    key: str = ""

    def __repr__(self) -> str:
        return "Certificate(***)"


def make_certificate() -> Certificate:
    """Return a new key (P-256) and certificate.

    Its dates have no meaning, because hosts' clocks may be wrong. Hosts trust it because it is pinned, and only during
    its transfer.
    """
    from cryptography import x509  # noqa: PLC0415 - only where a transfer begins
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gpurun transfer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=timezone.utc))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=timezone.utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


# Compress chunks for a slow link of the head.


LEVEL = 1
# A chunk that shrinks by less than this is sent as it is.
WORTH = 0.9
# Compression pays for slower links: one of 25 MB/s carries more than twice as much, one of 50 MB/s less (0077).
SLOW_BYTES_S = 30e6
# So many chunks are not tried after one that hardly shrinks, or that takes longer to pack than to send as it is.
NOT_TRIED = 7


class Packing(Remembered):
    """Compresses chunks while the head's link is slow.

    Attributes:
        link_bytes_s: what the link carries; infinite = unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.link_bytes_s = math.inf
        self._not_tried = 0

    @property
    def on(self) -> bool:
        """Return whether chunks are compressed."""
        return self.link_bytes_s < SLOW_BYTES_S

    def get(self, blob: Blob, index: int, piece: frames.Bytes) -> bytes | None:  # noqa: D102
        if not self.on:
            return None
        known = super().get(blob, index, piece)
        if known is None and self._not_tried:
            self._not_tried -= 1
        elif known is None:
            began_s = time.monotonic()
            known = pack(piece)
            if known is None or len(piece) < self.link_bytes_s * (time.monotonic() - began_s):
                self._not_tried = NOT_TRIED
            if known is not None:
                self.put(blob.digest, index, known)
        return known


def pack(piece: frames.Bytes) -> bytes | None:
    """Return a chunk's compressed form; None if it hardly shrinks."""
    packed = zlib.compress(piece, LEVEL)
    return packed if len(packed) < WORTH * len(piece) else None


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

    def __init__(self, fleet: Fleet, options: Options, transfer: str = "") -> None:
        self.transfer = transfer or secrets.token_hex(8)
        self.blobs: dict[str, Blob] = {}
        self.packing = Packing()
        self._pace = Pace(options.rate_bytes_s)
        self.certificate = make_certificate()
        self.server: blobs.Server | None = None
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

    def _feed(self, host: str, wants: blobs.Wants) -> Iterator[bytes]:
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
                for first, last in blobs.checked_ranges(blob, ranges):
                    for index in range(first, last + 1):
                        header, piece = blobs.chunk_frame(blob, index, buffer, self.packing)
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

    def _listen(self, heads: set[str]) -> blobs.Server:
        """Open the head's own end, on the one address by which hosts know it, if there is one."""
        # They differ behind address translation or jump hosts; certificate and tokens guard the door either way.
        anywhere = "::" if any(":" in head for head in heads) else "0.0.0.0"  # noqa: S104
        for bind in [*(heads if len(heads) == 1 else ()), anywhere]:
            try:
                return blobs.Server(
                    bind, self.certificate.certificate, self.certificate.key, self.blobs.get, self._pace, self.packing
                )
            except OSError:
                continue
        raise HostFailure("gpurun cannot listen on any address of the head", host=HEAD)


# Facts of the inventory for transfers between hosts.


def rack_of(inventory: Inventory | None, host: str) -> str:
    """Return a host's rack. All hosts that the inventory does not know share one."""
    known = inventory.by_name.get(host) if inventory else None
    return known.rack if known else ""


def fabrics_of(inventory: Inventory | None, hosts: Iterable[str]) -> list[Fabric]:
    """Return the fabrics of hosts that the inventory knows."""
    if inventory is None:
        return []
    return [inventory.fabric_of(inventory.by_name[host]) for host in hosts if host in inventory.by_name]


def options_for(inventory: Inventory | None, hosts: Iterable[str], rate_bytes_s: float | None = None) -> Options:
    """Return where each host listens: at its fabric address, else on its fabric's interface."""
    known = [inventory.by_name[host] for host in hosts if host in inventory.by_name] if inventory else []
    return Options(
        rate_bytes_s=rate_bytes_s,
        interfaces={host.name: inventory.fabric_of(host).interface for host in known} if inventory else {},
        addresses={host.name: host.fabric_address for host in known if host.fabric_address},
    )


def host_to_host(inventory: Inventory | None, hosts: Iterable[str]) -> bool:
    """Return whether all these hosts may open connections to each other."""
    return all(fabric.host_to_host for fabric in fabrics_of(inventory, hosts))


def lanes(inventory: Inventory | None, hosts: Iterable[str]) -> int:
    """Return the number of parallel chains: the lowest that a fabric of the hosts allows."""
    return max(1, min((fabric.chains for fabric in fabrics_of(inventory, hosts)), default=1))
