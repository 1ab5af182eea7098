"""Send the items of a stream, each a header and bytes, in batches: small items share a frame and its digest.

A frame ``{"all": [[header, length], …], "sha": SHA-256 of its payload}`` holds many items. Any other frame is one item.
"""

import hashlib
import time
from typing import Any, Dict, Iterable, Iterator, List, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError

Item = Tuple[Dict[str, Any], frames.Bytes]

SMALL = 16 << 10
"""Smaller items share a frame: each frame costs both sides some microseconds."""
TOGETHER_BYTES, MOST_TOGETHER = 64 << 10, 256
"""Items share a frame until they have so many bytes, or are so many."""
LONGEST = 1 << 20
FLUSH_S = 5.0
"""What a batch holds is sent after this long: silence means that the host hangs."""


def packed(items: Iterable[Item]) -> Iterator[frames.Bytes]:
    """Yield items as frames, as payloads of a stream."""
    batch, since_s = bytearray(), time.monotonic()
    heads: List[Tuple[Dict[str, Any], int]] = []
    small = bytearray()
    for header, payload in items:
        size = len(payload)
        if size >= SMALL:
            batch += _together(heads, small)
            heads, small = [], bytearray()
            batch += frames.prefix_of(header, size)
            batch += payload
        else:
            heads.append((header, size))
            small += payload
            if len(small) >= TOGETHER_BYTES or len(heads) == MOST_TOGETHER:
                batch += _together(heads, small)
                heads, small = [], bytearray()
        now_s = time.monotonic()
        if len(batch) >= frames.PIECE or now_s - since_s > FLUSH_S:
            batch += _together(heads, small)
            heads, small = [], bytearray()
            yield from _sent(batch)
            batch, since_s = bytearray(), now_s
    batch += _together(heads, small)
    yield from _sent(batch)


def _sent(batch: bytearray) -> Iterator[frames.Bytes]:
    if 0 < len(batch) <= LONGEST:
        yield batch
    else:
        yield from frames.pieces(batch, LONGEST)  # long names make long frames


def _together(heads: List[Tuple[Dict[str, Any], int]], payload: bytearray) -> bytes:
    if not heads:
        return b""
    together: Dict[str, Any] = {"all": heads}
    if payload:
        together["sha"] = hashlib.sha256(payload).hexdigest()
    try:
        return frames.encode(together, payload)
    except frames.FrameError:
        if len(heads) == 1:
            raise
    half = len(heads) // 2  # names may be very long
    first = sum(size for _, size in heads[:half])
    return _together(heads[:half], payload[:first]) + _together(heads[half:], payload[first:])


def unpacked(pieces: Iterable[frames.Bytes]) -> Iterator[frames.Frame]:
    """Yield the items that `packed` packed.

    Raises:
        OpError: ``corrupt``: these are not such frames, or the last one is incomplete.
    """
    decoder = frames.Decoder()
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                if "all" in frame.header:
                    yield from _apart(frame)
                else:
                    yield frame
    except frames.FrameError as error:
        raise OpError("corrupt", "%s" % error) from None
    if decoder.waits:
        raise OpError("corrupt", "the last frame is incomplete")


def _apart(together: frames.Frame) -> Iterator[frames.Frame]:
    heads, payload = together.header["all"], together.payload
    if payload and together.header.get("sha") != hashlib.sha256(payload).hexdigest():
        raise OpError("corrupt", "a frame does not match its digest")
    position = 0
    for head in heads if isinstance(heads, list) else [heads]:
        if not (isinstance(head, list) and len(head) == 2 and isinstance(head[0], dict) and type(head[1]) is int):
            raise OpError("corrupt", "a frame of several files is damaged")
        header, size = head
        if not 0 <= size <= len(payload) - position:
            raise OpError("corrupt", "a frame has a wrong size, %d bytes" % len(payload))
        yield frames.Frame(header, payload[position : position + size])
        position += size
    if position != len(payload):
        raise OpError("corrupt", "a frame has a wrong size, %d bytes" % len(payload))
