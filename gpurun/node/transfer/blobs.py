"""Move blobs between hosts: the operations with which the head controls a transfer.

``blobs.open`` adds a host to a transfer, ``blobs.expect`` announces a blob, ``blobs.grant`` admits one neighbour,
``blobs.fetch`` pulls from a neighbour, ``blobs.feed`` takes chunks from the head over the SSH channel, and
``blobs.close`` ends it. A transfer that is never closed ends with the agent.
"""

from __future__ import annotations

import fcntl
import os
import socket
import ssl
import struct
import threading
import time
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Sequence, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.folder.contents import write_all
from gpurun.node.transfer.spool import CHUNK, Blob, Pace, Remembered, Spool, unpack_bytes

# Chunks from host to host: TLS 1.3 in which both ends show the transfer's one certificate.


CONNECT_TIMEOUT_S = 4.0
# An upstream end with nothing to send sends `wait` this often …
WAIT_EVERY_S = 1.5
# … so after this long a silence, the peer or its network counts as dead.
SILENCE_S = 6.0
MAX_UNPROVEN = 64
ACCEPT_AGAIN_S = 0.1
MOST_RANGES = 1 << 16
"""Enough for a blob of 32 GiB with every second chunk missing. More ranges are an invalid request."""

Wants = List[Tuple[str, List[Tuple[int, int]]]]


def context(server: bool, certificate: str, key: str) -> ssl.SSLContext:
    """Return a TLS 1.3 context that trusts and shows exactly one certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the certificate is the transfer's, not a host's
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=certificate)
    if server:
        made.num_tickets = 0
    # OpenSSL reads keys only from files: one in memory, which is gone when it is closed.
    memory = os.memfd_create("gpurun-tls")
    try:
        write_all(memory, (key + certificate).encode("ascii"), 0)
        made.load_cert_chain("/proc/self/fd/%d" % memory)
    finally:
        os.close(memory)
    return made


class Server:
    """The upstream end: sends chunks to peers with the certificate and a token.

    Args:
        find: returns the blob of a digest, None while it is not announced.
        packs: the source of chunks' compressed forms.
    """

    def __init__(
        self,
        bind: str,
        certificate: str,
        key: str,
        find: Callable[[str], Optional[Blob]],
        pace: Pace,
        packs: Remembered,
    ) -> None:
        self._context = context(True, certificate, key)
        self._find = find
        self._pace = pace
        self._packs = packs
        self._tokens: List[str] = []
        self._lock = threading.Lock()
        self._closed = False
        self._unproven = 0
        self._connections: List[socket.socket] = []
        self.sent_bytes = 0
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((bind, 0))
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def grant(self, token: str) -> None:
        """Admit one connection with this token."""
        with self._lock:
            self._tokens.append(token)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for connection in [self._socket, *connections]:
            _hang_up(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed; or one connection failed, or this machine has no descriptor just now
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                refused = self._closed or self._unproven >= MAX_UNPROVEN
                if not refused:
                    self._unproven += 1
                    self._connections.append(connection)
            if refused:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no thread can start just now
                with self._lock:
                    self._unproven -= 1
                    self._connections.remove(connection)
                connection.close()

    def _serve(self, raw: socket.socket) -> None:
        connection = raw
        try:
            try:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.settimeout(CONNECT_TIMEOUT_S)
                connection = self._context.wrap_socket(raw, server_side=True)
                with self._lock:  # wrapping took the descriptor from the plain one
                    self._connections.remove(raw)
                    self._connections.append(connection)
                incoming = _frames_of(connection)
                self._prove(next(incoming, None))
            finally:
                with self._lock:
                    self._unproven -= 1
            wants = _read_wants(incoming)
            connection.settimeout(None)
            self._send_all(connection, wants)
        except (OSError, OpError, frames.FrameError):
            pass  # the downstream end sees a broken connection, and the head hears of it from there
        finally:
            with self._lock:
                self._connections.remove(connection)
            connection.close()

    def _prove(self, frame: Optional[frames.Frame]) -> None:
        """Check and use up the connection's token."""
        token = frame.header.get("token") if frame is not None and frame.header.get("t") == "hi" else None
        with self._lock:
            if not isinstance(token, str) or token not in self._tokens:
                raise OpError("denied", "a connection came without a valid token")
            self._tokens.remove(token)

    def _send_all(self, connection: socket.socket, wants: Wants) -> None:
        buffer = memoryview(bytearray(CHUNK))
        for digest, ranges in wants:
            blob = self._await_blob(connection, digest)
            for first, last in checked_ranges(blob, ranges):
                for index in range(first, last + 1):
                    while not blob.wait(index, WAIT_EVERY_S):
                        _send(connection, {"t": "wait"})
                    header, piece = chunk_frame(blob, index, buffer, self._packs)
                    self._pace.spend(len(piece))
                    _send(connection, header, piece)
                    self.sent_bytes += len(piece)
        _send(connection, {"t": "end"})

    def _await_blob(self, connection: socket.socket, digest: str) -> Blob:
        while not self._closed:
            blob = self._find(digest)
            if blob is not None:
                return blob
            _send(connection, {"t": "wait"})
            time.sleep(0.02)
        raise OpError("closed", "the transfer has ended")


def checked_ranges(blob: Blob, ranges: Iterable[Tuple[int, int]]) -> Iterator[Tuple[int, int]]:
    """Yield the wanted ranges of chunks of a blob, each chunk at most once.

    Raises:
        OpError: ``bad-request``: the blob has no such chunks.
    """
    behind = -1
    for first, last in ranges:
        if not behind < first <= last < blob.count:
            raise OpError(
                "bad-request",
                "%s has %d chunks: the range %d to %d is not valid" % (blob.digest, blob.count, first, last),
            )
        behind = last
        yield first, last


def chunk_of(header: Dict[str, Any]) -> Tuple[str, int]:
    """Return (digest, index) of the chunk in a ``chunk`` frame.

    Raises:
        OpError: ``corrupt``: the frame does not say.
    """
    digest, index = header.get("d"), header.get("i")
    if not isinstance(digest, str) or type(index) is not int or index < 0:
        raise OpError("corrupt", "a chunk has an invalid place, %.60r in %.90r" % (index, digest))
    return digest, index


def chunk_frame(blob: Blob, index: int, buffer: memoryview, packs: Remembered) -> Tuple[Dict[str, Any], frames.Bytes]:
    """Return the frame of a chunk, compressed if that form exists."""
    piece = blob.read_into(index, buffer)
    packed = packs.get(blob, index, piece)
    header = {"t": "chunk", "d": blob.digest, "i": index}
    return (header, piece) if packed is None else ({**header, "z": 1}, packed)


def fetch_link(
    address: Tuple[str, int],
    certificate: str,
    key: str,
    token: str,
    wants: Wants,
    opened: Callable[[socket.socket], object],
) -> Iterator[frames.Frame]:
    """The downstream end: connect, ask, yield the chunks' frames as they arrive.

    A payload is a view that is valid until the next one is requested.

    Args:
        opened: receives the socket, so that another thread can interrupt the transfer.

    Raises:
        OpError: ``no-route`` if there is no connection or the other end is not part of this transfer; ``link-lost`` if
            the connection breaks or falls silent.
    """
    connection = _connect(address, certificate, key)
    opened(connection)
    try:
        _send(connection, {"t": "hi", "token": token})
        for digest, ranges in wants:
            _send(connection, {"t": "want", "d": digest, "r": ranges})
        _send(connection, {"t": "go"})
        connection.settimeout(SILENCE_S)
        for frame in _frames_of(connection):
            kind = frame.header.get("t")
            if kind == "chunk":
                yield frame
            elif kind == "end":
                return
        raise OpError("link-lost", "%s closed the connection" % address[0])
    except (OSError, frames.FrameError, ValueError) as error:
        raise OpError("link-lost", "the connection to %s broke: %s" % (address[0], error)) from None
    finally:
        connection.close()


def _connect(address: Tuple[str, int], certificate: str, key: str) -> ssl.SSLSocket:
    try:
        raw = socket.create_connection(address, CONNECT_TIMEOUT_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context(False, certificate, key).wrap_socket(raw)
    except OSError as error:
        raise OpError("no-route", "no connection to %s port %d: %s" % (address[0], address[1], error)) from None


def _send(connection: socket.socket, header: Dict[str, Any], payload: frames.Bytes = b"") -> None:
    connection.sendall(frames.prefix_of(header, len(payload)))
    if payload:
        connection.sendall(payload)


def _frames_of(connection: socket.socket) -> Iterator[frames.Frame]:
    """Yield frames as they arrive; end when the other end closes.

    A payload is a view of one buffer that the next frame overwrites: a new mebibyte for each would cost more in page
    faults than its hash.
    """
    buffer = memoryview(bytearray(CHUNK))
    while _fill(connection, buffer[: frames.PREFIX.size]):
        head, payload = frames.PREFIX.unpack_from(buffer)
        if head > 1 << 16 or payload > CHUNK:
            raise frames.FrameError("a frame of %d + %d bytes is too large" % (head, payload))
        _fill(connection, buffer[:head])
        header = frames.header_of(buffer[:head])
        _fill(connection, buffer[:payload])
        yield frames.Frame(header, buffer[:payload])


def _fill(connection: socket.socket, view: memoryview) -> bool:
    """Fill the view; return False if the connection ended before the first byte."""
    left = view
    while left:
        count = connection.recv_into(left)
        if count == 0:
            if len(left) == len(view):
                return False
            raise OSError("the data ended in the middle of a frame")
        left = left[count:]
    return True


def _read_wants(incoming: Iterator[frames.Frame]) -> Wants:
    wants: Wants = []
    left = MOST_RANGES
    for frame in incoming:
        if frame.header.get("t") == "go":
            return wants
        if frame.header.get("t") != "want":
            break
        found = frame.header.get("r")
        if not isinstance(found, list) or not all(_is_range(one) for one in found):
            break
        left -= max(1, len(found))
        if left < 0:
            raise frames.FrameError("more than %d ranges" % MOST_RANGES)
        wants.append((str(frame.header.get("d")), [(first, last) for first, last in found]))
    raise frames.FrameError("the list of wanted chunks is damaged or not complete")


def _is_range(said: Any) -> bool:
    return isinstance(said, list) and len(said) == 2 and all(type(number) is int for number in said)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


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
        self.server = Server(bind, certificate, key, self.blobs.get, Pace(rate_bytes_s), self.packs)

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


def find_transfer(ident: str) -> Transfer:
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
    here = find_transfer(transfer)
    if digest not in here.blobs:
        here.blobs[digest] = here.spool.open(digest, size, hashes)
    return {"have_bytes": here.blobs[digest].have_bytes}


def grant(call: Call, transfer: str, token: str) -> None:
    """Admit one connection of a neighbour."""
    find_transfer(transfer).server.grant(token)


def missing(call: Call, transfer: str, digests: List[str], lane: Sequence[int] = (0, 1)) -> Wants:
    """Return ``[[digest, [[first, last], …]], …]`` of the chunks that this host lacks.

    Args:
        lane: (number, count): only that lane's share of them.
    """
    here = find_transfer(transfer)
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
    wants: Optional[Wants] = None,
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
    here = find_transfer(transfer)
    wants = missing(call, transfer, digests, lane) if wants is None else wants
    source = fetch_link(
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
    here = find_transfer(transfer)

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
        (digest, index), piece = chunk_of(frame.header), frame.payload
        blob = here.blobs.get(digest)
        if blob is None or index >= blob.count:  # who sent it is at fault, not this host
            raise OpError("corrupt", "chunk %d of %.90s was not announced" % (index, digest))
        if frame.header.get("z"):
            packed, piece = bytes(piece), unpack_bytes(piece)
            here.packs.put(digest, index, packed)  # before it is there to be asked for
        if blob.write(index, piece):
            received += len(piece)
        call.check()
        if time.monotonic() - told >= PROGRESS_EVERY_S:
            told = time.monotonic()
            yield {"bytes": received, "digest": digest}
    return {"bytes": received}


def transfer_status(call: Call, transfer: str) -> Dict[str, Any]:
    """Return ``{"blobs": {digest: bytes here}, "sent_bytes"}``."""
    here = find_transfer(transfer)
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
    "status": transfer_status,
    "close": close,
}
