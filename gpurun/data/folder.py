"""A folder of the head as a data set: its content, and how gpurun sends it without a copy.

A data set holds every file of the folder, also files that git ignores (unlike code: `gpurun.images.tree.scan`). gpurun
makes modes equal: everybody may read a file, and execute it if somebody may execute it. So the same content has the
same digest for every user, and a job can read every file on its hosts.
"""

from __future__ import annotations

import os
import posixpath
import stat
from functools import partial
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.images.tree import DigestMemory, Entry, digest_of, unreadable
from gpurun.node.data import data_store
from gpurun.node.folder import below
from gpurun.node.folder.holes import ContentDigest, blocks
from gpurun.node.folder.walk import Found, walk
from gpurun.node.transfer.many_files import FilesBlob, ManyFiles
from gpurun.node.transfer.spool import ChunkHashes
from gpurun.state import own_cache

FOLDER_MODE, FILE_MODE, PROGRAM_MODE = 0o555, 0o444, 0o555
CHANGED = "the data changed after gpurun read it"
HINT = "try again when no program writes to the data"


class DataFolder:
    """A folder as a data set, as it was when gpurun read it.

    Attributes:
        top: the folder.
        entries: what it holds, each folder before its entries.
    """

    def __init__(self, top: Path, entries: list[Entry], memory: DigestMemory) -> None:
        self.top, self.entries, self._memory = top, tuple(entries), memory

    @property
    def digest(self) -> str:
        """Return the set's digest."""
        return digest_of(self.entries)

    @property
    def size(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(entry.size for entry in self.entries)

    def blob(self, name: str, hashes: bytes) -> FilesBlob:
        """Return all contents one after the other, for sending. Receivers refuse content that has changed since."""
        top = below.open_top(str(self.top))
        files = [(entry.path, entry.size) for entry in self.entries if entry.kind == "file"]
        return _SourceBlob(name, hashes, ManyFiles(top, files), os.dup(top), complete=True)

    def chunk_hashes(self) -> bytes:
        """Return the SHA-256 of each chunk of `blob`, one after the other.

        Raises:
            BadInput: a file has changed, or cannot be read.
        """
        chunks, top = ChunkHashes(), below.open_top(str(self.top))
        try:
            with below.Cursor(top) as cursor:
                for entry in self.entries:
                    if entry.kind == "file":
                        self._add(cursor, entry, chunks)
        finally:
            os.close(top)
        return chunks.hashes()

    def _add(self, cursor: below.Cursor, entry: Entry, chunks: ChunkHashes) -> None:
        """Add a file's bytes."""
        parts, whole = below.parts_of(entry.path), ContentDigest(like=entry.digest)
        try:
            descriptor, status = below.open_regular(cursor.at(parts[:-1]), parts[-1])
            try:
                for zeros, piece in blocks(descriptor, status.st_size):
                    whole.add(zeros, piece)
                    chunks.skip(zeros)
                    chunks.add(piece)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unreadable(OSError(error.errno, error.strerror), self.top / entry.path) from None
        if (str(whole), whole.size) != (entry.digest, entry.size):
            self._memory.forget()  # or it remembers wrongly
            raise BadInput("the file changed while gpurun read it", where=str(self.top / entry.path), hint=HINT)


class _SourceBlob(FilesBlob):
    """A missing or shortened file reads as zeros, so its chunks do not match the announced hashes."""

    def _read_at(self, descriptor: int, view: memoryview, position: int) -> int:
        try:
            count = super()._read_at(descriptor, view, position)
        except OSError:
            count = 0
        if count == 0:
            view[:] = bytes(len(view))
        return count or len(view)


def read_folder(top: Path) -> DataFolder:
    """Read a folder as a data set. The user's cache keeps digests of files that have not changed.

    Raises:
        BadInput: the path is not a folder; or the folder holds a socket, FIFO or device, a link that leads out of it,
            something unreadable, or more entries than hosts take.
        HostNotReady: its file system does not answer.
    """
    try:
        resolved = top.resolve()
        memory = DigestMemory(resolved, "data")
        descriptor = below.open_top(str(resolved))
        try:
            entries = [_entry(resolved, found, memory) for found in walk(descriptor)]
        finally:
            os.close(descriptor)
        memory.keep()
    except OSError as error:
        raise unreadable(error, top, "gpurun cannot read the data") from None
    if len(entries) > data_store.MOST_ENTRIES:
        raise BadInput(
            f"the folder holds {len(entries):,} files, folders and links; "
            f"a data set can hold at most {data_store.MOST_ENTRIES:,}",
            where=str(top), hint="pack the files into archives, or mount a folder of each host with host:/path",
        )  # fmt: skip
    return DataFolder(resolved, entries, memory)


def _entry(top: Path, found: Found, memory: DigestMemory) -> Entry:
    path, status = below.text_of_path(found.parts), found.status
    if status is None:
        raise BadInput(f"gpurun cannot read the data: {found.why}", where=f"{top}/{path}")
    kind = below.kind_of(status.st_mode)
    if kind == "dir":
        return Entry(path, kind, FOLDER_MODE, status.st_mtime_ns)
    if kind == "link":
        target = os.fsdecode(os.readlink(found.parts[-1], dir_fd=found.above))
        if _leads_out(path, target):
            raise BadInput(
                f"the link points to {target}, which is outside the data set, so gpurun would not copy "
                f"{target} to hosts",
                where=f"{top}/{path}",
                hint="replace the link by a copy of the target, or make the target a second data set",
            )  # fmt: skip
        return Entry(path, kind, 0, target=target)
    if kind != "file":
        raise BadInput(
            f"the path is a {kind}; a data set can hold only files, folders and links", where=f"{top}/{path}"
        )
    mode = PROGRAM_MODE if status.st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH) else FILE_MODE
    digest = memory.digest(path, status, partial(_digest, top, found))
    return Entry(path, kind, mode, status.st_mtime_ns, status.st_size, digest)


def _leads_out(path: str, target: str) -> bool:
    """Return whether a link's target is outside the folder, judged by names alone."""
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return target.startswith("/") or meant == ".." or meant.startswith("../")


def _digest(top: Path, found: Found) -> str:
    whole = ContentDigest()
    descriptor, before = below.open_regular(found.above, found.parts[-1])
    try:
        for zeros, piece in blocks(descriptor, before.st_size):
            whole.add(zeros, piece)
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    ):
        where = f"{top}/{below.text_of_path(found.parts)}"
        raise BadInput("the file changed while gpurun read it", where=where, hint=HINT)
    return str(whole)


def hashes_of(tree: DataFolder) -> bytes:
    """Return the SHA-256 of each chunk of a set's blob, one after the other. Reads the files once for each content.

    Raises:
        BadInput: a file has changed.
    """
    known = known_hashes(tree.digest)
    if known is None:
        known = tree.chunk_hashes()
        if (kept := own_cache.folder(os.environ, "data")) is not None:
            own_cache.keep(own_cache.place(kept, tree.digest), known)
    return known


def known_hashes(digest: str) -> bytes | None:
    """Return the cached result of `hashes_of` for a set of this digest, if there is one."""
    kept = own_cache.folder(os.environ, "data")
    return None if kept is None else own_cache.read(own_cache.place(kept, digest))
