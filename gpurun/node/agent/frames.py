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

import json
import struct
from typing import Any, Dict, Iterator, NamedTuple, Union

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
