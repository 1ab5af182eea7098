"""Read a data set of this host again, and compare it with the set's digest."""

import os
from typing import Iterator, List

from gpurun.node.agent.call import OpError
from gpurun.node.data import data_store
from gpurun.node.data.data_store import ENTRIES, HASHES, TREE, Row
from gpurun.node.folder import below
from gpurun.node.folder.holes import ContentDigest, blocks
from gpurun.node.transfer.spool import ChunkHashes

_KINDS = frozenset(("dir", "file", "link"))


def damage(path: str, digest: str) -> Iterator[int]:
    """Read everything in the folder `path` of a set; yield how many bytes of files have been read.

    Raises:
        OpError: ``corrupt``: a file, folder or link, the list of them or the hashes are not the set's.
    """
    rows = _rows(path, digest)
    hashes = _content(os.path.join(path, HASHES))
    chunks = ChunkHashes()
    try:
        top = below.open_top(os.path.join(path, TREE))
    except OSError as error:
        raise OpError("corrupt", "the data set's files cannot be read: %s" % error.strerror) from None
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
        raise OpError("corrupt", "the data set's chunks do not match their hashes")


def _rows(path: str, digest: str) -> List[Row]:
    rows = data_store.unpacked(_content(os.path.join(path, ENTRIES)))
    if data_store.digest_of(rows) != digest or not {row[1] for row in rows} <= _KINDS:
        raise OpError("corrupt", "the list of files does not match the digest of the data set")
    return rows


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise OpError("corrupt", "%s: %s" % (os.path.basename(path), error.strerror)) from None


def _entry(cursor: below.Cursor, row: Row, chunks: ChunkHashes) -> Iterator[int]:
    path, kind, _, _, size, digest, target = row
    parts = below.parts_of(path)
    above = cursor.at(parts[:-1])
    if kind == "dir":
        cursor.at(parts)
    elif kind == "link":
        if os.readlink(parts[-1], dir_fd=above) != target.encode("utf-8", "surrogateescape"):
            raise OpError("corrupt", "the link %.200r has another target" % path)
    else:
        descriptor, whole = below.open_file(above, parts[-1]), ContentDigest(like=digest)
        try:
            is_right = os.fstat(descriptor).st_size == size
            for zeros, piece in blocks(descriptor, size if is_right else 0):
                whole.add(zeros, piece)
                chunks.skip(zeros)
                chunks.add(piece)
                yield chunks.size
        finally:
            os.close(descriptor)
        if not is_right or str(whole) != digest:
            raise OpError("corrupt", "%.200r does not match the digest of the data set" % path)
