"""A job's code as it was at submit: one file in the job's folder, which every attempt and every join reads."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import msgspec

from gpurun import faults
from gpurun.content.tree import FileTree
from gpurun.errors import GpurunError, StateError
from gpurun.jobs.folder import CODES
from gpurun.msgspec_types import ready
from gpurun.node.folder.below import Entry
from gpurun.node.transfer.spool import CHUNK, Blob, ChunkHashes
from gpurun.state import durable
from gpurun.state.paths import StatePath, state_error

Entries = list[Entry]


def write_code(path: StatePath, tree: FileTree) -> None:
    """Write a new file and sync it. Its name is durable once its folder is synced.

    Raises:
        BadInput: a file changed while it was read, or cannot be read.
        StateError: it cannot be written, for example because the disk is full.
    """
    first = json.dumps(tree.entries).encode() + b"\n"
    with os.fdopen(path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        try:
            for piece in _pieces(first, tree):
                durable.write_all(file.fileno(), piece)
            os.fsync(file.fileno())
        except OSError as error:
            raise state_error(error, path, "written") from error


def _pieces(first: bytes, tree: FileTree) -> Iterator[bytes]:
    yield first
    for digest in tree.files:
        yield from tree.content(digest)


def kept_code(path: StatePath) -> Callable[[StatePath], None]:
    """Return a function that gives another job this code: by a hard link, or by a copy."""

    def add(new: StatePath) -> None:
        try:
            path.link(new)
        except StateError:  # a file system without links, or with too many of this file
            write_code(new, Code(path))

    return add


class Code(FileTree):
    """The code that a job keeps.

    Args:
        digest: what the job was submitted with; "" = whatever is there.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: it is damaged, or has another digest.
    """

    def __init__(self, path: StatePath, digest: str = "") -> None:
        self._path = path
        with path.reader(linked=True) as file:
            try:
                first = file.readline()
            except OSError as error:
                raise state_error(error, path, "read") from error
        try:
            super().__init__(msgspec.convert(json.loads(first), ready(Entries)))
        except (ValueError, RecursionError):
            raise self._damaged("gpurun cannot read the list of files") from None
        if digest and self.digest != digest:
            raise self._damaged("the list of files differs from the submitted list")
        ends = accumulate((entry.size for entry in self.files.values()), initial=len(first))
        self._starts = dict(zip(self.files, ends, strict=False))

    def content(self, digest: str) -> Iterator[bytes]:
        """Yield the content of one of `files`.

        Raises:
            StateError: it is damaged.
        """
        descriptor = self._path.open_file(os.O_RDONLY, linked=True)
        try:
            yield from self._content(descriptor, digest)
        finally:
            os.close(descriptor)

    @property
    def changed(self) -> GpurunError:
        """Return the error for content that is not the submitted one."""
        return self._damaged("it differs from the submitted files")

    def blob(self, name: str, hashes: bytes) -> Blob:
        """Return the contents of all files one after the other, for sending."""
        files = [entry for entry in self.entries if entry.kind == "file" and entry.size]
        return _CodeBlob(name, hashes, self._path, [(self._starts[entry.digest], entry.size) for entry in files])

    def chunk_hashes(self) -> bytes:
        """Return the SHA-256 of each chunk of `blob`, one after the other.

        Raises:
            StateError: a content is damaged.
        """
        chunks = ChunkHashes()
        for entry in self.entries:
            if entry.kind == "file":
                for piece in self.content(entry.digest):
                    chunks.add(piece)
        return chunks.hashes()

    def compare(self, tree: FileTree) -> None:
        """Read both to their ends.

        Raises:
            BadInput: a file of the tree changed after its scan, or cannot be read.
            StateError: this is not the tree's code, apart from times, or it cannot be read.
        """
        if _untimed(self) != _untimed(tree):
            raise self._damaged("the list of files differs from the submitted list")
        descriptor, is_same = self._path.open_file(os.O_RDONLY, linked=True), True
        try:
            for digest, start in self._starts.items():
                at = start
                for piece in tree.content(digest):  # its end tells a change of the tree from damage here
                    is_same = is_same and self._read(descriptor, len(piece), at) == piece
                    at += len(piece)
        finally:
            os.close(descriptor)
        if not is_same:
            raise self._damaged("it differs from the submitted files")

    def _content(self, descriptor: int, digest: str) -> Iterator[bytes]:
        seen, at, left = hashlib.sha256(), self._starts[digest], self.files[digest].size
        while left and (piece := self._read(descriptor, min(CHUNK, left), at)):
            seen.update(piece)
            at, left = at + len(piece), left - len(piece)
            yield piece
        if f"sha256:{seen.hexdigest()}" != digest:
            raise self._damaged(f"the file {self.files[digest].path!r} differs from the submitted file")

    def _read(self, descriptor: int, size: int, at: int) -> bytes:
        try:
            return os.pread(descriptor, size, at)
        except OSError as error:
            raise state_error(error, self._path, "read") from error

    def _damaged(self, why: str) -> StateError:
        return StateError(
            f"the job's copy of its code is damaged: {why}", where=str(self._path), hint="submit the job again"
        )


class _CodeBlob(Blob):
    """The contents of code's files, one after the other.

    Args:
        parts: where in the file each content lies, and its size.
    """

    def __init__(self, name: str, hashes: bytes, path: StatePath, parts: Sequence[tuple[int, int]]) -> None:
        self._ends = list(accumulate(size for _, size in parts))
        self._parts = parts
        descriptor = path.open_file(os.O_RDONLY, linked=True)
        super().__init__(name, self._ends[-1] if parts else 0, hashes, descriptor, complete=True)

    def _read_at(self, descriptor: int, view: memoryview, position: int) -> int:
        number = bisect.bisect_right(self._ends, position)
        start, size = self._parts[number]
        view = view[: self._ends[number] - position]
        count = super()._read_at(descriptor, view, start + position - (self._ends[number] - size))
        if count == 0:  # cut since `chunk_hashes`: no chunk of zeros matches an announced hash
            view[:] = bytes(len(view))
        return count or len(view)


def _untimed(tree: FileTree) -> list[Entry]:
    return [entry._replace(mtime_ns=0) for entry in tree.entries]


class CodeStore:
    """The code of a user's jobs: each content once. Jobs, sweeps and campaigns have hard links to its file.

    A name in the store keeps no code: `JobStore.sweep` removes the names of files that have no other name. So a process
    that is killed at any step leaves at most a second copy of the code.
    """

    def __init__(self, home: Path) -> None:
        self._folder = StatePath(home) / "jobs" / f"{CODES}{os.getuid()}"

    def add(self, path: StatePath, tree: FileTree) -> None:
        """Give a new job this code: by a hard link to the stored file, else by a new file, which is then stored.

        Compares the stored file with the tree first: a damaged file is replaced, for the jobs that come from now on.

        Raises:
            BadInput, StateError: as `write_code`.
        """
        digest = tree.digest
        if self._link(digest, tree, path):
            return
        write_code(path, tree)
        faults.point()
        with suppress(FileNotFoundError, StateError):  # a file system without links: each job has its copy
            with suppress(FileExistsError):
                self._folder.mkdir(0o700)
            if _is_mine_alone(self._folder):
                self._keep(digest, path)

    def _link(self, digest: str, tree: FileTree, path: StatePath) -> bool:
        """Link the stored file, if there is one and it is sound. No longer offers one that cannot be used."""
        kept = self._folder / digest.removeprefix("sha256:")
        try:
            if not _is_mine_alone(self._folder):
                return False
            Code(kept).compare(tree)
            kept.link(path)
        except FileNotFoundError:
            return False
        except StateError:
            with suppress(FileNotFoundError, StateError):
                kept.unlink()
            return False
        return True

    def _keep(self, digest: str, path: StatePath) -> None:
        """Store a job's file; if another submission was quicker, let the job have that one's."""
        try:
            path.link(self._folder / digest.removeprefix("sha256:"))
        except FileExistsError:
            quicker = path.sibling(f"{path.name}.new")
            if self._link(digest, Code(path), quicker):
                quicker.rename(path)


def _is_mine_alone(folder: StatePath) -> bool:
    """Return whether a folder is this user's, and nobody else can write there. Raises FileNotFoundError."""
    found = folder.stat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
