"""A job's code as it was at submit: one file in the job's folder, which every attempt and every join reads.

Its first line is the JSON of the entries, each ``[path, kind, mode, mtime_ns, size, digest, target]``. The contents of
the files follow, each digest once, in the order of the entries. Jobs submitted together with the same workdir share the
file: each job's folder has a hard link to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import accumulate

import msgspec

from gpurun.errors import StateError
from gpurun.images.tree import Entry, FileTree
from gpurun.msgspec_types import ready
from gpurun.node.transfer.spool import CHUNK
from gpurun.state import durable
from gpurun.state.path import StatePath, told

Rows = list[tuple[str, str, int, int, int, str, str]]
"""What `Entry.as_json` gives, of all entries."""


def write_code(path: StatePath, tree: FileTree) -> None:
    """Write a new file and sync it. Its name is durable once its folder is synced.

    Raises:
        BadInput: a file changed while it was read, or cannot be read.
        StateError: it cannot be written, for example because the disk is full.
    """
    first = json.dumps([entry.as_json() for entry in tree.entries]).encode() + b"\n"
    with os.fdopen(path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        try:
            for piece in _pieces(first, tree):
                durable.write_all(file.fileno(), piece)
            os.fsync(file.fileno())
        except OSError as error:
            raise told(error, path, "written") from error


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

    Raises:
        FileNotFoundError: there is no such file.
        StateError: it is damaged.
    """

    def __init__(self, path: StatePath) -> None:
        self._path = path
        with path.reader(linked=True) as file:
            first = file.readline()
        try:
            super().__init__(Entry(*row) for row in msgspec.convert(json.loads(first), ready(Rows)))
        except (ValueError, RecursionError):
            raise self._damaged("gpurun cannot read the list of files") from None
        ends = accumulate((entry.size for entry in self.files.values()), initial=len(first))
        self._starts = dict(zip(self.files, ends, strict=False))

    def content(self, digest: str) -> Iterator[bytes]:
        """Yield the content of one of `files`.

        Raises:
            StateError: it is damaged.
        """
        seen, at, left = hashlib.sha256(), self._starts[digest], self.files[digest].size
        descriptor = self._path.open_file(os.O_RDONLY, linked=True)
        try:
            while left and (piece := os.pread(descriptor, min(CHUNK, left), at)):
                seen.update(piece)
                at, left = at + len(piece), left - len(piece)
                yield piece
        except OSError as error:
            raise told(error, self._path, "read") from error
        finally:
            os.close(descriptor)
        if f"sha256:{seen.hexdigest()}" != digest:
            raise self._damaged(f"the file {self.files[digest].path!r} differs from the submitted file")

    def _damaged(self, why: str) -> StateError:
        return StateError(
            f"the job's copy of its code is damaged: {why}", where=str(self._path), hint="submit the job again"
        )
