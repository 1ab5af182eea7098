"""Read layers from ``docker save``: works for every user with access to Docker.

Docker always writes the whole image, so gpurun splits the stream and puts each layer into the store immediately. It
reads both formats: that of the graph drivers (``manifest.json``, ``ID/layer.tar``) and the OCI layout of newer engines
(``blobs/sha256/…``, uncompressed or gzip).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gpurun.errors import HostNotReady
from gpurun.images.store import Hashed, LayerStore
from gpurun.state import durable

# Configurations and manifests are small; what is larger is a layer.
MAX_JSON_BYTES = 8 << 20
PIECE_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class _Reader(io.RawIOBase):
    """Makes a readable file of an iterable of pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def import_save(pieces: Iterable[bytes], store: LayerStore, folder: Path) -> dict[str, bytes]:
    """Put every layer of a ``docker save`` stream into the store, and keep it there until the store is closed.

    Args:
        folder: for temporary files, on the store's file system.

    Returns:
        digest → content of every small file, that is, of the configurations.

    Raises:
        HostNotReady: the stream is not an image, or the disk is full.
    """
    small: dict[str, bytes] = {}
    source: Any = io.BufferedReader(_Reader(pieces), PIECE_BYTES)
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for entry in archive:
                file = archive.extractfile(entry) if entry.isreg() else None
                if file is not None:
                    _take(file, entry.size, store, folder, small)
    except tarfile.TarError as error:
        raise HostNotReady(f"docker save on the head wrote an invalid tar file: {error}") from None
    return small


def _take(file: IO[bytes], size: int, store: LayerStore, folder: Path, small: dict[str, bytes]) -> None:
    """Take one file of the stream: keep it in memory if it may be a configuration, else store it as a layer."""
    start = file.read(MAX_JSON_BYTES if size <= MAX_JSON_BYTES else PIECE_BYTES)
    if size <= MAX_JSON_BYTES and _is_json(start):
        small[f"sha256:{hashlib.sha256(start).hexdigest()}"] = start
        return
    handle, name = tempfile.mkstemp(dir=folder, prefix="making-")
    seen = Hashed()
    try:
        with os.fdopen(handle, "wb", buffering=0) as out:
            for piece in _unpacked(start, file):
                seen.update(piece)
                durable.write_all(out.fileno(), piece)
        with store.making(seen.digest):
            if store.pin(seen.digest) is None:
                store.keep(Path(name), seen)
                store.pin(seen.digest)
    except OSError as error:
        raise HostNotReady(
            f"gpurun cannot write to the head's layer store: {error.strerror}", where=str(folder)
        ) from error
    finally:
        Path(name).unlink(missing_ok=True)


def _is_json(content: bytes) -> bool:
    if content[:1] not in (b"{", b"["):
        return False
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _unpacked(start: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """Yield a layer that begins with `start`, unpacked if it is gzip.

    Raises:
        HostNotReady: it is compressed with zstd.
    """
    if start.startswith(_ZSTD_MAGIC):
        raise HostNotReady(
            "docker save on the head wrote layers that are compressed with zstd, which gpurun cannot read",
            hint="build the image with: "
            "docker buildx build --output type=docker,compression=gzip,force-compression=true",
        )
    if not start.startswith(_GZIP_MAGIC):
        yield start
        while piece := file.read(PIECE_BYTES):
            yield piece
        return
    unpacker = zlib.decompressobj(wbits=31)
    piece = start
    while piece:
        while piece:
            yield unpacker.decompress(piece, PIECE_BYTES)
            piece = unpacker.unconsumed_tail
            if unpacker.eof:  # gzip files may have several members
                piece, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)
        piece = file.read(PIECE_BYTES)
