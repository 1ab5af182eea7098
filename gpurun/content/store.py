"""The head's layer store: content-addressed files with checked digests, limited in size.

``layers/sha256/HEX`` is a layer's uncompressed tar, ``HEX.chunks`` the hashes of its chunks. Several ships share the
work: one exports a layer, the others wait. If the store needs space, it removes the least recently used layers, but
never a layer that a ship is sending.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.errors import HostNotReady
from gpurun.node.transfer.spool import CHUNK, Blob, ChunkHashes, checked_digest
from gpurun.state import durable, locks

# Never more than this share of the file system, and never so much that less than the reserve stays free.
SHARE = 0.25
RESERVE_BYTES = 2 << 30
# What an export that was killed has left behind.
STALE_S = 24 * 3600.0

Content = Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class Stored:
    """A blob in the store.

    Attributes:
        hashes: the SHA-256 of each chunk.
    """

    digest: str
    size: int
    hashes: bytes
    path: Path

    def open(self) -> Blob:
        """Open the blob for sending. It cannot be removed until it is closed.

        Raises:
            FileNotFoundError: it was removed.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            locks.take(descriptor, shared=True)
            os.utime(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        return Blob(self.digest, self.size, self.hashes, descriptor, complete=True)


class Hashed:
    """Computes the digest of a content and of each of its chunks in one pass."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._chunks = ChunkHashes()

    def update(self, piece: bytes) -> None:
        """Add the next piece, of any size."""
        self._whole.update(piece)
        self._chunks.add(piece)

    @property
    def size(self) -> int:
        """Return how many bytes came."""
        return self._chunks.size

    @property
    def digest(self) -> str:
        """Return ``sha256:…`` of the whole content."""
        return f"sha256:{self._whole.hexdigest()}"

    @property
    def chunks(self) -> bytes:
        """Return the SHA-256 of each chunk, one after the other."""
        return self._chunks.hashes()


class LayerStore:
    """The store in a folder.

    Args:
        folder: created if missing.
        limit_bytes: the largest size; None = a quarter of the file system.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self._folder = folder / "sha256"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pinned: dict[str, Blob] | None = {}
        self._limit_bytes = limit_bytes if limit_bytes is not None else int(shutil.disk_usage(folder).total * SHARE)

    @property
    def limit_bytes(self) -> int:
        """Return the largest size of the store."""
        return self._limit_bytes

    def find(self, digest: str) -> Stored | None:
        """Return a blob if the store has it."""
        path = self._path(digest)
        try:
            size = path.stat().st_size
            hashes = path.with_suffix(".chunks").read_bytes()
        except FileNotFoundError:
            return None
        return Stored(digest, size, hashes, path) if len(hashes) == -(-size // CHUNK) * 32 else None

    def pin(self, digest: str) -> Stored | None:
        """Return a blob if the store has it, and keep it until this store is closed: no process removes it to free
        space.
        """
        found = self.find(digest)
        if found is None or self._pinned is None or digest in self._pinned:
            return found
        try:
            self._pinned[digest] = found.open()
        except FileNotFoundError:  # it was removed just now
            return None
        return found

    def close(self) -> None:
        """Release the pinned blobs. Idempotent."""
        pinned, self._pinned = self._pinned or {}, None
        for blob in pinned.values():
            blob.close()

    def add(self, digest: str, content: Content) -> Stored:
        """Return a blob that stays until this store is closed; call `content` to make it if the store lacks it. Waits
        for another process that makes the same blob.

        Args:
            content: called at most once; the bytes it yields must have the digest.

        Raises:
            HostNotReady: the content has another digest, or the disk is full.
        """
        with self.making(digest):
            found = self.pin(digest)
            return found if found is not None else self._write(content(), digest)

    @contextmanager
    def making(self, digest: str) -> Iterator[None]:
        """Hold the lock of this digest among all processes."""
        with locks.alone(self._path(digest).with_suffix(".lock")):
            yield

    def put(self, pieces: Iterable[bytes]) -> Stored:
        """Store a blob of any content, which stays until this store is closed.

        Raises:
            HostNotReady: the disk is full.
        """
        return self._write(pieces, None)

    def _write(self, pieces: Iterable[bytes], digest: str | None) -> Stored:
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, prefix="making-")
            temporary = Path(name)
            try:
                seen = Hashed()
                with os.fdopen(handle, "wb", buffering=0) as file:
                    for piece in pieces:
                        seen.update(piece)
                        durable.write_all(file.fileno(), piece)
                if digest not in (None, seen.digest):
                    raise HostNotReady(f"the head's Docker gave a layer that does not match its digest {digest}")
                return self.keep(temporary, seen)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise HostNotReady(
                f"gpurun cannot write to the head's layer store: {error.strerror}",
                where=str(self._folder),
                hint="free some space, or set XDG_CACHE_HOME to a folder on another disk",
            ) from error

    def keep(self, file: Path, seen: Hashed) -> Stored:
        """Move a file into the store, and keep it until this store is closed. `seen` has already hashed its content.

        If the store has this content, that file stays: another process may keep it, and its lock is on that file.
        """
        self.make_room(seen.size, sparing=seen.digest)
        with self._naming():
            stored = self.find(seen.digest)
            if stored is None or stored.hashes != seen.chunks:
                made = Stored(seen.digest, seen.size, seen.chunks, file)
                held = made.open()  # before it has a name by which it is removed
                try:
                    stored = replace(made, path=self._path(seen.digest))
                    _write_whole(stored.path.with_suffix(".chunks"), seen.chunks)
                    file.replace(stored.path)
                except BaseException:
                    held.close()
                    raise
            else:
                held = stored.open()
                file.unlink(missing_ok=True)
        self._hold(held)
        return stored

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Hold the lock without which no process gives a blob its name or removes one."""
        with locks.alone(self._folder / "names.lock"):
            yield

    def _hold(self, blob: Blob) -> None:
        if self._pinned is None:
            blob.close()
            return
        if (earlier := self._pinned.pop(blob.digest, None)) is not None:
            earlier.close()
        self._pinned[blob.digest] = blob

    def remove(self, digest: str) -> None:
        """Remove a blob. A process that sends it keeps it open. Idempotent."""
        if self._pinned and (pinned := self._pinned.pop(digest, None)):
            pinned.close()
        path = self._path(digest)
        path.unlink(missing_ok=True)
        path.with_suffix(".chunks").unlink(missing_ok=True)

    def make_room(self, size: int, *, sparing: str = "") -> None:
        """Remove least recently used blobs until `size` more bytes fit the limit and the disk."""
        blobs = sorted(self._blobs())
        used = sum(held for _, held, _ in blobs)
        for _, held, path in blobs:
            free = shutil.disk_usage(self._folder).free
            if used + size <= self._limit_bytes and free >= RESERVE_BYTES:
                return
            if path != self._path(sparing or "sha256:" + "0" * 64) and self._evict(path):
                used -= held
        self._sweep()

    def _sweep(self) -> None:
        for path in self._folder.glob("making-*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()

    def _blobs(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last used, size, path) of the blobs that are there."""
        for path in self._folder.iterdir():
            if len(path.name) == 64 and not path.suffix:
                with suppress(FileNotFoundError):  # another process has just removed it
                    status = path.stat()
                    yield status.st_mtime, status.st_size, path

    def _evict(self, path: Path) -> bool:
        """Remove a blob unless a process holds it; return whether it is gone."""
        with self._naming():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return True
            try:
                if not locks.try_take(descriptor):
                    return False
                path.unlink()
                path.with_suffix(".chunks").unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        return True

    def _path(self, digest: str) -> Path:
        return self._folder / checked_digest(digest)[len("sha256:") :]


def _write_whole(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="making-")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(name).replace(path)
