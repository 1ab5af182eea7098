"""Frames of the agent channel: a JSON header and a binary payload, both length-prefixed.

Both sides use this file: the head imports it as it is, the host from the zip that it was sent. One frame is
``!II`` (bytes of header, bytes of payload), the header as UTF-8 JSON, the payload. The header's ``t`` says
what the frame is:

========== ============== =============================================================================
``t``      direction      meaning
========== ============== =============================================================================
hello      host → head    first frame: the agent stands; ``python``, ``host``, ``user``, ``pid``
req        head → host    start operation ``op`` with ``params``; ``more``: the payload comes as `in` frames
in, eof    head → host    a piece of a request's payload, and its end
out        host → head    one item of a stream: ``v`` and payload
part       host → head    a piece of a large reply payload
done       host → head    the operation ended: ``v`` and the (last piece of the) payload
err        host → head    it failed: ``kind``, ``message``, ``detail``
cancel     head → host    stop operation ``id``
credit     both           the receiver of ``id`` has consumed ``n`` bytes; as many more may be sent
ping, pong both           a sign of life
========== ============== =============================================================================

Back-pressure: for each operation and direction at most `WINDOW` bytes are under way that the other side has not
yet consumed, so a slow reader of one stream holds up only that stream.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Union

PREFIX = struct.Struct("!II")
MAX_HEADER = 16 << 20
MAX_PAYLOAD = 4 << 20
# One payload piece. Larger pieces would hold up other operations' frames for longer than they gain.
PIECE = 128 << 10
WINDOW = 1 << 20
# Announces the first frame, after whatever the login shell's start files printed. A per-connection nonce follows.
MAGIC = b"\x00gpurun-agent:"

Bytes = Union[bytes, bytearray, memoryview]


class Frame(NamedTuple):
    """One frame: its header and its payload (empty when there is none)."""

    header: Dict[str, Any]
    payload: Any


class FrameError(ValueError):
    """The data are not a frame: a length beyond the limits, or a header that is not a JSON object."""


def encode(header: Dict[str, Any], payload: Bytes = b"") -> bytes:
    """Return one frame as bytes.

    Raises:
        FrameError: the header or the payload is larger than a frame may carry.
    """
    return b"".join((prefix_of(header, len(payload)), payload))


def prefix_of(header: Dict[str, Any], payload_bytes: int) -> bytes:
    """Return the bytes before a payload of this size.

    Raises:
        FrameError: as `encode`.
    """
    head = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(head) > MAX_HEADER or payload_bytes > MAX_PAYLOAD:
        raise FrameError("a frame of %d + %d bytes is too large" % (len(head), payload_bytes))
    return PREFIX.pack(len(head), payload_bytes) + head


class Decoder:
    """Turns bytes into frames; keeps incomplete frames.

    Attributes:
        frame_bytes: the size of the last frame in bytes.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.frame_bytes = 0

    @property
    def waits(self) -> bool:
        """Return True if it holds part of a frame."""
        return bool(self._buffer)

    def feed(self, data: Bytes) -> Iterator[Frame]:
        """Yield every frame that `data` completes.

        Raises:
            FrameError: the peer sent invalid data; nothing after it can be trusted.
        """
        data = self._gathered(data)
        view, position = memoryview(data), 0
        try:
            while len(view) - position >= PREFIX.size:
                head, payload = PREFIX.unpack_from(view, position)
                if head > MAX_HEADER or payload > MAX_PAYLOAD:
                    raise FrameError("a frame of %d + %d bytes is too large" % (head, payload))
                start = position + PREFIX.size
                if len(view) < start + head + payload:
                    break
                position = start + head + payload
                self.frame_bytes = PREFIX.size + head + payload
                yield Frame(header_of(bytes(view[start : start + head])), bytes(view[start + head : position]))
        finally:
            view.release()
            if position or data is not self._buffer:
                self._buffer = bytearray(data[position:])

    def _gathered(self, data: Bytes) -> Bytes:
        """Return the bytes to decode. Does not copy a complete frame that arrives alone."""
        if not self._buffer:
            return data
        self._buffer += data
        return self._buffer


def header_of(raw: Bytes) -> Dict[str, Any]:
    """Parse a frame's header.

    Raises:
        FrameError: it is not a JSON object.
    """
    try:
        header = json.loads(bytes(raw))
    except (ValueError, RecursionError):
        raise FrameError("a frame's header is not JSON") from None
    if not isinstance(header, dict):
        raise FrameError("a frame's header is not a JSON object")
    return header


def pieces(payload: Bytes, size: int = PIECE) -> Iterator[memoryview]:
    """Yield the payload in pieces of at most `size` bytes; nothing for an empty one."""
    view = memoryview(payload)
    for start in range(0, len(view), size):
        yield view[start : start + size]


# One running operation on a host: the argument of its function, and the errors it may raise.


Send = Callable[[Dict[str, Any], Bytes], None]

# A request's payload that is asked for as one bytes object may not be larger than this.
MAX_WHOLE_PAYLOAD = 64 << 20


class OpReply(NamedTuple):
    """A JSON value and bytes."""

    value: Any = None
    payload: Bytes = b""


class OpError(Exception):
    """An operation failed in a way that its caller should recognise.

    Args:
        kind: one word for the head: ``not-found``, ``no-space``, ``bad-request``, …
        message: what failed and why, for people.
        detail: JSON values that belong to it.
    """

    def __init__(self, kind: str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class Cancelled(OpError):
    """The head no longer wants this operation, or is gone."""

    def __init__(self) -> None:
        super().__init__("cancelled", "cancelled")


class Call:
    """The host's side of one request. Thread-safe."""

    def __init__(self, ident: int, send: Send, more: bool, payload: bytes) -> None:
        self.id = ident
        self._send = send
        self._condition = threading.Condition()
        self._cancelled = False
        self._hooks: List[Callable[[], object]] = []
        self._room = WINDOW
        self._incoming: List[bytes] = [payload] if payload else []
        self._ended = not more
        self._credited = more

    # -- for operations -----------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Return True if nobody waits for the result any more."""
        return self._cancelled

    def check(self) -> None:
        """Raise `Cancelled` if nobody waits for the result any more."""
        if self._cancelled:
            raise Cancelled()

    def wait(self, timeout_s: float) -> None:
        """Sleep for `timeout_s` seconds; raise `Cancelled` as soon as nobody waits any more."""
        with self._condition:
            self._condition.wait_for(lambda: self._cancelled, timeout_s)
        self.check()

    def on_cancel(self, hook: Callable[[], object]) -> None:
        """Run `hook` when the operation is cancelled, or now if it was: close a socket, kill a child."""
        with self._condition:
            if not self._cancelled:
                self._hooks.append(hook)
                return
        hook()

    def chunks(self) -> Iterator[bytes]:
        """Yield the request's payload in pieces as it arrives."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._incoming or self._ended or self._cancelled)
                if self._cancelled:
                    raise Cancelled()
                if not self._incoming:
                    return
                piece = self._incoming.pop(0)
            if self._credited:
                self._send({"t": "credit", "id": self.id, "n": len(piece)}, b"")
            yield piece

    @property
    def payload(self) -> bytes:
        """Return the whole payload of the request; at most 64 MiB. Can be read once."""
        return self.whole(MAX_WHOLE_PAYLOAD)

    def whole(self, most_bytes: int) -> bytes:
        """Return the whole payload of the request. Can be read once.

        Raises:
            OpError: ``bad-request``: it is larger than `most_bytes`.
        """
        whole = bytearray()
        for piece in self.chunks():
            whole += piece
            if len(whole) > most_bytes:
                raise OpError("bad-request", "the payload is larger than %d bytes" % most_bytes)
        return bytes(whole)

    def send(self, value: Any = None, payload: Bytes = b"") -> None:
        """Send one stream item; wait if the head reads slowly. The payload may have any size up to 4 MiB."""
        self._spend(len(payload))
        self._send({"t": "out", "id": self.id, "v": value}, payload)

    # -- for the agent ------------------------------------------------------------------------------------

    def finish(self, reply: OpReply) -> None:
        """Send the final reply, a large payload in pieces."""
        parts = list(pieces(reply.payload))
        for part in parts[:-1]:
            self._spend(len(part))
            self._send({"t": "part", "id": self.id}, part)
        last = parts[-1] if parts else b""
        self._send({"t": "done", "id": self.id, "v": reply.value}, last)

    def fail(self, error: OpError) -> None:
        """Send the error that ended the operation."""
        header = {"t": "err", "id": self.id, "kind": error.kind, "message": error.message, "detail": error.detail}
        self._send(header, b"")

    def cancel(self) -> None:
        """Mark the call as cancelled, wake all waiting threads, run the hooks. Idempotent."""
        with self._condition:
            self._cancelled = True
            hooks, self._hooks = self._hooks, []
            self._condition.notify_all()
        for hook in hooks:
            try:
                hook()
            except OSError:
                pass  # a socket or process that is already gone is what the hook was for

    def feed(self, piece: Optional[bytes]) -> None:
        """Add a piece of the request's payload; None is its end."""
        with self._condition:
            if piece is None:
                self._ended = True
            else:
                self._incoming.append(piece)
            self._condition.notify_all()

    def credit(self, amount: int) -> None:
        """Record that the head has consumed `amount` bytes more."""
        with self._condition:
            self._room += amount
            self._condition.notify_all()

    def _spend(self, amount: int) -> None:
        """Wait until the head's window has space. Allows one item larger than the whole window."""
        with self._condition:
            wanted = min(amount, WINDOW)
            self._condition.wait_for(lambda: self._room >= wanted or self._cancelled)
            if self._cancelled:
                raise Cancelled()
            self._room -= amount


def text_of(error: BaseException) -> str:
    """Return an exception as one line. What the operating system refused reads ``No space left on device: '/x'``."""
    if isinstance(error, OSError) and error.strerror:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return error.strerror if name is None else "%s: %r" % (error.strerror, name)
    return "%s: %s" % (type(error).__name__, error)
