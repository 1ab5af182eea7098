"""Read layers directly from Docker's own folder: tar-split's metadata and the overlay2 files.

For each layer Docker keeps everything of the tar except the files' content (``tar-split.json.gz``: headers and padding
byte for byte), so gpurun can rebuild exactly the same tar. Source: github.com/vbatts/tar-split and moby
``layer/layer_store.go``. This needs permission to read Docker's folder, that is, root on the head. Damage there leads
to another digest, which the store refuses.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.errors import HostNotReady

PIECE_BYTES = 1 << 20
_SEGMENT, _FILE = 2, 1


@dataclass(frozen=True)
class OverlayLayer:
    """The location of a layer.

    Attributes:
        metadata: ``tar-split.json.gz``.
        content: the layer's own files.
    """

    metadata: Path
    content: Path


def find_layers(root: str | None, layers: Sequence[str]) -> dict[str, OverlayLayer]:
    """Return diffID → location, for those layers of an image that this process can read. Needs no Docker.

    Args:
        root: Docker's ``DockerRootDir``; only that of the overlay2 driver works.
    """
    found: dict[str, OverlayLayer] = {}
    base = Path(root or "/nonexistent")
    for diff_id, chain_id in zip(layers, chain_ids(layers), strict=True):
        layer = base / "image/overlay2/layerdb/sha256" / chain_id.removeprefix("sha256:")
        try:
            if (layer / "diff").read_text().strip() != diff_id:
                continue
            cache_id = (layer / "cache-id").read_text().strip()
            content = base / "overlay2" / cache_id / "diff"
            if cache_id.isalnum() and os.access(layer / "tar-split.json.gz", os.R_OK) and os.access(content, os.R_OK):
                found[diff_id] = OverlayLayer(layer / "tar-split.json.gz", content)
        except OSError:
            continue
    return found


def config_of(root: str | None, image_id: str) -> bytes | None:
    """Return an image's configuration byte for byte, if Docker's folder can be read. Its SHA-256 is the ID."""
    path = Path(root or "/nonexistent") / "image/overlay2/imagedb/content/sha256" / image_id.removeprefix("sha256:")
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if f"sha256:{hashlib.sha256(content).hexdigest()}" == image_id else None


def chain_ids(layers: Sequence[str]) -> list[str]:
    """Return the name of each layer on its parents: OCI image-spec, config.md, "Layer ChainID"."""
    ids: list[str] = []
    for diff_id in layers:
        ids.append("sha256:" + hashlib.sha256(f"{ids[-1]} {diff_id}".encode()).hexdigest() if ids else diff_id)
    return ids


def tar_of(layer: OverlayLayer) -> Iterator[bytes]:
    """Yield the layer's tar in pieces.

    Raises:
        HostNotReady: something in Docker's folder is damaged.
    """
    try:
        yield from _tar_of(layer)
    except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
        raise HostNotReady(
            f"gpurun cannot read a layer in the folder of the head's Docker: {error}", where=str(layer.content)
        ) from error


def _tar_of(layer: OverlayLayer) -> Iterator[bytes]:
    pieces = bytearray()
    root = os.open(layer.content, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with gzip.open(layer.metadata, "rb") as lines:
            for line in lines:
                entry = json.loads(line)
                if entry["type"] == _SEGMENT:
                    pieces += base64.b64decode(entry["payload"])
                elif entry["type"] == _FILE and entry.get("size"):
                    yield from _file(root, entry, pieces)
                if len(pieces) >= PIECE_BYTES:
                    yield bytes(pieces)
                    pieces.clear()
    finally:
        os.close(root)
    yield bytes(pieces)


def _file(root: int, entry: dict[str, Any], pieces: bytearray) -> Iterator[bytes]:
    """Handle a file's content: add small files to `pieces`; yield large files after the content of `pieces`."""
    raw = entry.get("name_raw")
    name = base64.b64decode(raw) if raw else os.fsencode(entry["name"])
    # O_NOFOLLOW and O_NONBLOCK: an image's author may have put anything at this name.
    descriptor = os.open(name.lstrip(b"/"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
    try:
        left = int(entry["size"])
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{name!r} is not a regular file")
        while left:
            piece = os.read(descriptor, min(left, PIECE_BYTES))
            if not piece:
                raise OSError(f"{name!r} is shorter than the size that the layer records")
            left -= len(piece)
            if len(piece) < PIECE_BYTES:
                pieces += piece
            else:
                if pieces:
                    yield bytes(pieces)
                    pieces.clear()
                yield piece
            if len(pieces) >= PIECE_BYTES:
                yield bytes(pieces)
                pieces.clear()
    finally:
        os.close(descriptor)
