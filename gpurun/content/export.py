"""Export layers from the head's Docker into the layer store, in the fastest way that this machine allows."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpurun.content.images import Engine, HeadImage
from gpurun.content.store import Hashed, LayerStore, Stored
from gpurun.errors import HostNotReady
from gpurun.node.docker import is_containerd
from gpurun.state import durable, locks

# Read layers directly from Docker's own folder: tar-split's metadata and the overlay2 files.


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


# Read layers from ``docker save``: works for every user with access to Docker.


# Configurations and manifests are small; what is larger is a layer.
MAX_JSON_BYTES = 8 << 20
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


def default_folder() -> Path:
    """Return the default folder of the layer store, below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "gpurun" / "layers"


class Exporter:
    """An image's layers and configuration, from the store or from Docker.

    If this process may read Docker's own folder, it reads only the wanted layers there, one by one. Otherwise one
    ``docker save`` fills the store with all layers. Layers that this exporter returned stay in the store until it is
    closed, even beyond the store's limit.
    """

    def __init__(self, engine: Engine, image: HeadImage, folder: Path | None = None) -> None:
        self._engine = engine
        self._image = image
        self._folder = folder or default_folder()
        self._store = LayerStore(self._folder)
        info = engine.info()
        self._docker_root: str | None = info.get("DockerRootDir")
        self._containerd = is_containerd(info)
        self._layers: dict[str, OverlayLayer] | None = None

    def close(self) -> None:
        """Allow the store to remove the layers again. Idempotent."""
        self._store.close()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each layer's tar: exact for layers in the store, estimated for others."""
        found = {digest: self._store.find(digest) for digest in self._image.layers}
        estimated = self._engine.layer_sizes(self._image)
        return {digest: blob.size if blob else estimated.get(digest, 0) for digest, blob in found.items()}

    def layer(self, digest: str) -> Stored:
        """Return one layer; export it if necessary.

        Raises:
            HostNotReady: Docker fails, or its bytes do not have this digest.
        """
        found = self._store.pin(digest)
        if found is not None:
            return found
        if self._layers is None:
            self._layers = find_layers(self._docker_root, self._image.layers)
        readable = self._layers.get(digest)
        if readable is not None:
            # What cannot be put together again from Docker's folder, docker save may still write.
            with suppress(HostNotReady):
                self._store.add(digest, lambda: tar_of(readable))
        found = self._store.pin(digest)
        if found is None:
            self._save()
            found = self._store.pin(digest)
        if found is None:
            raise HostNotReady(f"docker save of {self._image.reference} on the head did not write the layer {digest}")
        return found

    def discard(self, digest: str) -> None:
        """Discard the store's damaged copy of a layer. The next `layer` exports it again."""
        self._store.remove(digest)

    def config(self) -> bytes:
        """Return the image's configuration, byte for byte.

        Raises:
            HostNotReady: Docker fails.
        """
        path = self._configs() / self._image.id.removeprefix("sha256:")
        if path.exists() and self._is_config(path.read_bytes()):
            return path.read_bytes()
        content = config_of(self._docker_root, self._image.id)
        if content is None:
            self._save()
            return path.read_bytes()
        self._keep_config(content)
        return content

    def config_id(self) -> str:
        """Return the digest of the configuration, which engines with a graph driver use as the image's ID."""
        return f"sha256:{hashlib.sha256(self.config()).hexdigest()}" if self._containerd else self._image.id

    def _save(self) -> None:
        """Run one ``docker save`` and put all its layers into the store. Waits for another process that does the
        same.
        """
        with self._alone():
            if (self._configs() / self._image.id.removeprefix("sha256:")).exists() and all(
                self._store.pin(digest) for digest in self._image.layers
            ):
                return
            self._store.make_room(self._image.size_bytes)
            small = import_save(self._engine.save(self._image.id), self._store, self._folder / "sha256")
            for content in small.values():
                if self._is_config(content):
                    self._keep_config(content)
                    return
            raise HostNotReady(
                f"docker save of {self._image.reference} on the head did not write the image's configuration"
            )

    def _is_config(self, content: bytes) -> bool:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self._containerd and digest != self._image.id:
            return False
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            return False
        rootfs = parsed.get("rootfs") if isinstance(parsed, dict) else None
        return isinstance(rootfs, dict) and rootfs.get("diff_ids") == list(self._image.layers)

    def _keep_config(self, content: bytes) -> None:
        folder = self._configs()
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = folder / f"making-{os.getpid()}"
        temporary.write_bytes(content)
        temporary.replace(folder / self._image.id.removeprefix("sha256:"))

    def _configs(self) -> Path:
        return self._folder / "configs"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with locks.alone(self._folder / f"{self._image.id.removeprefix('sha256:')}.lock"):
            yield
