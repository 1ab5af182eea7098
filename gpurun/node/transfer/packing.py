"""Compress chunks: the head compresses a chunk once, hosts pass on the compressed bytes and decompress for themselves.

zlib is the one codec that every host's python3 has. Whether it helps depends on the links and is measured: see
`gpurun.images.packing`. Hosts always verify the chunk itself, never its compressed form.
"""

import threading
import zlib
from collections import OrderedDict
from typing import Optional, Protocol, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.transfer.spool import CHUNK, Blob

LEVEL = 1
# A chunk that shrinks by less than this is sent as it is.
WORTH = 0.9
# Packed chunks a host remembers for those it passes them on to; who is further behind gets them unpacked.
MEMORY_BYTES = 8 << 20


class Packs(Protocol):
    """Gives a server a chunk's compressed form, if there is one."""

    def get(self, blob: Blob, index: int, piece: frames.Bytes) -> Optional[bytes]:
        """Return the compressed form of `piece`, which is chunk `index` of `blob`; None = send it uncompressed."""


class Remembered:
    """A host's cache of the last compressed chunks. Thread-safe."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._packs: "OrderedDict[Tuple[str, int], bytes]" = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, digest: str, index: int, packed: bytes) -> None:
        """Add one."""
        with self._lock:
            if (digest, index) not in self._packs:
                self._packs[digest, index] = packed
                self._bytes += len(packed)
            while self._bytes > self._limit_bytes:
                self._bytes -= len(self._packs.popitem(last=False)[1])

    def get(self, blob: Blob, index: int, piece: frames.Bytes) -> Optional[bytes]:  # noqa: ARG002, D102 - of Packs
        with self._lock:
            return self._packs.get((blob.digest, index))


class Packing(Remembered):
    """The head's: compresses chunks while it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def get(self, blob: Blob, index: int, piece: frames.Bytes) -> Optional[bytes]:  # noqa: D102 - of Packs
        if not self.on:
            return None
        known = super().get(blob, index, piece)
        if known is None:
            known = pack(piece)
            self.put(blob.digest, index, known or b"")
        return known or None


def pack(piece: frames.Bytes) -> Optional[bytes]:
    """Return a chunk's compressed form; None if it hardly shrinks."""
    packed = zlib.compress(piece, LEVEL)
    return packed if len(packed) < WORTH * len(piece) else None


def unpack(packed: frames.Bytes) -> bytes:
    """Return the chunk; never more than a chunk, whatever the compressed bytes say.

    Raises:
        OpError: ``corrupt``: it is not a compressed chunk.
    """
    unpacker = zlib.decompressobj()
    try:
        piece = unpacker.decompress(packed, CHUNK)
    except zlib.error as error:
        raise OpError("corrupt", "a chunk cannot be unpacked: %s" % error) from None
    if not unpacker.eof:
        raise OpError("corrupt", "a chunk is too long after unpacking")
    return piece
