"""Read a data set of this host again, and compare it with the set's digest."""

import hashlib
import os
from typing import Iterator, List

from gpurun.node.agent.call import OpError
from gpurun.node.data import data_store
from gpurun.node.data.data_store import ENTRIES, HASHES, TREE, Row
from gpurun.node.folder import below
from gpurun.node.transfer.spool import CHUNK

_KINDS = frozenset(("dir", "file", "link"))


def damage(path: str, digest: str) -> Iterator[int]:
    """Read everything in the folder `path` of a set; yield how many bytes of files have been read.

    Raises:
        OpError: ``corrupt``: a file, folder or link, the list of them or the hashes are not the set's.
    """
    rows = _rows(path, digest)
    hashes = _content(os.path.join(path, HASHES))
    chunks = _Chunks()
    try:
        top = below.open_top(os.path.join(path, TREE))
    except OSError as error:
        raise OpError("corrupt", "its files cannot be read: %s" % error.strerror) from None
    try:
        with below.Cursor(top) as cursor:
            for row in rows:
                try:
                    yield from _entry(cursor, row, chunks)
                except OSError as error:
                    raise OpError("corrupt", "%.200r: %s" % (row[0], error.strerror)) from None
    finally:
        os.close(top)
    if chunks.hashes() != hashes:
        raise OpError("corrupt", "the hashes of its chunks are others")


def _rows(path: str, digest: str) -> List[Row]:
    rows = data_store.unpacked(_content(os.path.join(path, ENTRIES)))
    if data_store.digest_of(rows) != digest or not {row[1] for row in rows} <= _KINDS:
        raise OpError("corrupt", "its list of files is not what the digest of the set says")
    return rows


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise OpError("corrupt", "%s: %s" % (os.path.basename(path), error.strerror)) from None


def _entry(cursor: below.Cursor, row: Row, chunks: "_Chunks") -> Iterator[int]:
    path, kind, _, _, size, digest, target = row
    parts = below.parts_of(path)
    above = cursor.at(parts[:-1])
    if kind == "dir":
        cursor.at(parts)
    elif kind == "link":
        if os.readlink(parts[-1], dir_fd=above) != target.encode("utf-8", "surrogateescape"):
            raise OpError("corrupt", "%.200r leads elsewhere" % path)
    else:
        descriptor, whole = below.open_file(above, parts[-1]), hashlib.sha256()
        before = chunks.size
        try:
            for piece in iter(lambda: os.read(descriptor, CHUNK), b""):
                whole.update(piece)
                chunks.add(piece)
                yield chunks.size
        finally:
            os.close(descriptor)
        if "sha256:" + whole.hexdigest() != digest or chunks.size - before != size:
            raise OpError("corrupt", "%.200r is not what the digest of the set says" % path)


class _Chunks:
    """The hashes of the chunks of a set's blob, while the files are read one after the other."""

    def __init__(self) -> None:
        self.size = 0
        self._done = bytearray()
        self._chunk = hashlib.sha256()

    def add(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            part = view[: CHUNK - self.size % CHUNK]
            self._chunk.update(part)
            self.size, view = self.size + len(part), view[len(part) :]
            if self.size % CHUNK == 0:
                self._done += self._chunk.digest()
                self._chunk = hashlib.sha256()

    def hashes(self) -> bytes:
        """Return the hashes. Call it once, at the end."""
        return bytes(self._done) + (self._chunk.digest() if self.size % CHUNK else b"")
