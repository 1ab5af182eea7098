"""Move blobs between hosts: the operations with which the head controls a transfer.

``blobs.open`` adds a host to a transfer, ``blobs.expect`` announces a blob, ``blobs.grant`` admits one neighbour,
``blobs.fetch`` pulls from a neighbour, ``blobs.feed`` takes chunks from the head over the SSH channel, and
``blobs.close`` ends it. A transfer that is never closed ends with the agent.
"""

import fcntl
import os
import socket
import struct
import threading
import time
from typing import Any, Dict, Generator, Iterator, List, Optional, Sequence, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.call import Call, OpError
from gpurun.node.transfer import links
from gpurun.node.transfer.pace import Pace
from gpurun.node.transfer.packing import Remembered, unpack
from gpurun.node.transfer.spool import Blob, Spool

PROGRESS_EVERY_S = 0.25
# How many chunks in a row go over one lane.
STRIPE = 64
_SIOCGIFADDR = 0x8915


class Transfer:
    """This host's part of one transfer."""

    def __init__(self, ident: str, certificate: str, key: str, bind: str, rate_bytes_s: Optional[float]) -> None:
        self.spool = Spool(spool_folder(), ident)
        self.certificate = certificate
        self.key = key
        self.blobs: Dict[str, Blob] = {}
        self.packs = Remembered()
        self.server = links.Server(bind, certificate, key, self.blobs.get, Pace(rate_bytes_s), self.packs)

    def blob(self, digest: str) -> Blob:
        """Return an announced blob."""
        try:
            return self.blobs[digest]
        except KeyError:
            raise OpError("not-found", "%s was not announced" % digest) from None

    def close(self, keep: bool) -> None:
        """Close every connection; remove the blobs' files unless `keep`."""
        self.server.close()
        for digest, blob in list(self.blobs.items()):
            blob.close()
            if not keep:
                self.spool.forget(digest)
        self.spool.drop_private()


_transfers: Dict[str, Transfer] = {}
_lock = threading.Lock()


def spool_folder() -> str:
    """Return the folder where blobs arrive, below the user's cache folder on the host."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "gpurun", "spool")


def find(ident: str) -> Transfer:
    """Return an open transfer.

    Raises:
        OpError: ``not-found``.
    """
    with _lock:
        transfer = _transfers.get(ident)
    if transfer is None:
        raise OpError("not-found", "this host has no transfer %s" % ident)
    return transfer


def address_of(interface: Optional[str]) -> str:
    """Return the address at which neighbours reach this host: the interface's, else the one that SSH used."""
    if interface:
        name = interface.encode()[:15]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name))
                return socket.inet_ntoa(answer[20:24])
            except OSError:
                pass  # it has no IPv4 address: SSH's will do
    return ssh_ends()[1]


def ssh_ends() -> Tuple[str, str]:
    """Return (the head's address as this host sees it, this host's address as the head sees it)."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return (parts[0], parts[2]) if len(parts) == 4 else ("127.0.0.1", "127.0.0.1")


def open_(
    call: Call,
    transfer: str,
    certificate: str,
    interface: Optional[str] = None,
    address: Optional[str] = None,
    rate_bytes_s: Optional[float] = None,
) -> Dict[str, Any]:
    """Join a transfer; the payload is its private key.

    Args:
        interface: to listen on; `address` overrides it.
        rate_bytes_s: this host's highest sending rate.

    Returns:
        ``{"address", "port", "head", "spool", "free_bytes"}``: where neighbours connect to, and the head's address as
        this host sees it.
    """
    key = call.payload.decode("ascii")
    bind = address or address_of(interface)
    made = Transfer(transfer, certificate, key, bind, rate_bytes_s)
    with _lock:
        _transfers[transfer] = made
    status = os.statvfs(made.spool.folder)
    return {
        "address": bind,
        "port": made.server.port,
        "head": ssh_ends()[0],
        "spool": made.spool.folder,
        "free_bytes": status.f_bavail * status.f_frsize,
    }


def expect(call: Call, transfer: str, digest: str, size: int) -> Dict[str, Any]:
    """Announce a blob; the payload is the SHA-256 of each of its chunks.

    Returns:
        ``{"have_bytes"}``: what an earlier transfer left of it.
    """
    hashes = call.payload
    here = find(transfer)
    if digest not in here.blobs:
        here.blobs[digest] = here.spool.open(digest, size, hashes)
    return {"have_bytes": here.blobs[digest].have_bytes}


def grant(call: Call, transfer: str, token: str) -> None:
    """Admit one connection of a neighbour."""
    find(transfer).server.grant(token)


def missing(call: Call, transfer: str, digests: List[str], lane: Sequence[int] = (0, 1)) -> links.Wants:
    """Return ``[[digest, [[first, last], …]], …]`` of the chunks that this host lacks.

    Args:
        lane: (number, count): only that lane's share of them.
    """
    here = find(transfer)
    wants = [(digest, list(_share(here.blob(digest).missing(), *lane))) for digest in digests]
    return [want for want in wants if want[1]]


def _share(ranges: List[Tuple[int, int]], lane: int, lanes: int) -> Iterator[Tuple[int, int]]:
    """Yield every `lanes`-th stripe of chunks."""
    if lanes == 1:
        yield from ranges
        return
    for first, last in ranges:
        for stripe in range(first // STRIPE, last // STRIPE + 1):
            if stripe % lanes == lane:
                yield max(first, stripe * STRIPE), min(last, (stripe + 1) * STRIPE - 1)


def fetch(
    call: Call,
    transfer: str,
    address: str,
    port: int,
    token: str,
    digests: List[str],
    lane: Sequence[int] = (0, 1),
    wants: Optional[links.Wants] = None,
) -> Generator[Dict[str, Any], None, Dict[str, Any]]:
    """Pull missing chunks of some blobs from a neighbour; yields ``{"bytes", "digest"}`` repeatedly.

    Args:
        lane: as in `missing`.
        wants: these chunks, instead of all that are missing.

    Returns:
        ``{"bytes"}``: received by this call.

    Raises:
        OpError: ``no-route``, ``link-lost``; ``corrupt`` if the neighbour sends chunks that were not requested, or
            omits some; ``no-space`` (as an OSError) if the disk is full.
    """
    here = find(transfer)
    wants = missing(call, transfer, digests, lane) if wants is None else wants
    source = links.fetch(
        (address, port), here.certificate, here.key, token, wants,
        lambda connection: call.on_cancel(lambda: connection.shutdown(socket.SHUT_RDWR)),
    )  # fmt: skip
    done = yield from _keep(call, here, source)
    for digest, ranges in wants:
        if any(here.blob(digest).lacks(first, last) for first, last in ranges):
            raise OpError("corrupt", "%s ended the transfer before it had sent all of %s" % (address, digest))
    return done


def feed(call: Call, transfer: str) -> Generator[Dict[str, Any], None, Dict[str, Any]]:
    """Take chunks from the head: the payload is a sequence of ``chunk`` frames; yields as `fetch`."""
    here = find(transfer)

    def source() -> Iterator[frames.Frame]:
        decoder = frames.Decoder()
        for piece in call.chunks():
            yield from decoder.feed(piece)

    return (yield from _keep(call, here, source()))


def _keep(
    call: Call, here: Transfer, source: Iterator[frames.Frame]
) -> Generator[Dict[str, Any], None, Dict[str, Any]]:
    """Write the chunks of frames; yield and return how many bytes were new."""
    received, told = 0, time.monotonic()
    for frame in source:
        (digest, index), piece = links.place_of(frame.header), frame.payload
        blob = here.blobs.get(digest)
        if blob is None or index >= blob.count:  # who sent it is at fault, not this host
            raise OpError("corrupt", "chunk %d of %.90s was not announced" % (index, digest))
        if frame.header.get("z"):
            packed, piece = bytes(piece), unpack(piece)
            here.packs.put(digest, index, packed)  # before it is there to be asked for
        if blob.write(index, piece):
            received += len(piece)
        call.check()
        if time.monotonic() - told >= PROGRESS_EVERY_S:
            told = time.monotonic()
            yield {"bytes": received, "digest": digest}
    return {"bytes": received}


def status(call: Call, transfer: str) -> Dict[str, Any]:
    """Return ``{"blobs": {digest: bytes here}, "sent_bytes"}``."""
    here = find(transfer)
    return {
        "blobs": {digest: blob.have_bytes for digest, blob in list(here.blobs.items())},
        "sent_bytes": here.server.sent_bytes,
    }


def close(call: Call, transfer: str, keep: bool = False) -> None:
    """Leave a transfer. Idempotent.

    Args:
        keep: keep what has arrived for the next transfer of the same blobs.
    """
    with _lock:
        here = _transfers.pop(transfer, None)
    if here is not None:
        here.close(keep)


OPS = {
    "open": open_,
    "expect": expect,
    "grant": grant,
    "missing": missing,
    "fetch": fetch,
    "feed": feed,
    "status": status,
    "close": close,
}
