"""A folder's content as one value: the digest of every file, every mode, every link."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpurun.errors import BadInput, GpurunError, HostNotReady
from gpurun.images.export import default_folder
from gpurun.images.ignore import Walk
from gpurun.images.noticed import missed
from gpurun.node.data import data_store
from gpurun.node.transfer.spool import CHUNK
from gpurun.state.path import may_pass

# A file changed this recently may change again within the same time stamp: its digest is not remembered.
RACY_S = 2.0


@dataclass(frozen=True)
class Entry:
    """One name in a folder.

    Attributes:
        path: relative, with ``/``.
        kind: ``file``, ``dir`` or ``link``.
        mode: permission bits; 0 for links.
        digest, size: of a file's content.
        target: of a link, as it is.
    """

    path: str
    kind: str
    mode: int
    mtime_ns: int = 0
    size: int = 0
    digest: str = ""
    target: str = ""

    def as_json(self) -> list[Any]:
        """Return the entry as sent to hosts."""
        return [self.path, self.kind, self.mode, self.mtime_ns, self.size, self.digest, self.target]


def digest_of(entries: Iterable[Entry]) -> str:
    """Return the digest of a folder's content without times. Folders with the same digest have the same content."""
    return data_store.digest_of(entry.as_json() for entry in entries)


class FileTree(ABC):
    """A folder's content, each folder before its entries.

    Attributes:
        files: digest → one file with this content, in the order of the entries.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self.files: Mapping[str, Entry] = {entry.digest: entry for entry in self.entries if entry.kind == "file"}

    @property
    def digest(self) -> str:
        """Return the digest, as `digest_of`."""
        return digest_of(self.entries)

    @abstractmethod
    def content(self, digest: str) -> Iterator[bytes]:
        """Yield the content of one of `files`. The digest is checked after the last piece."""


class FolderTree(FileTree):
    """A folder as it was when gpurun scanned it.

    Args:
        memory: caches the digests of its files.
        left_out: what ignore rules left out and a rank may miss.
    """

    def __init__(
        self, top: Path, entries: Iterable[Entry], memory: DigestMemory, left_out: tuple[str, ...] = ()
    ) -> None:
        super().__init__(entries)
        self._top, self._memory = top, memory
        self.left_out = left_out

    def content(self, digest: str) -> Iterator[bytes]:
        """Yield a file's content, which must still be the scanned one.

        Raises:
            BadInput: it has changed, or cannot be read.
        """
        path = self._top / self.files[digest].path
        seen = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(CHUNK):
                    seen.update(piece)
                    yield piece
        except OSError as error:
            raise unreadable(error, path) from None
        if f"sha256:{seen.hexdigest()}" != digest:
            self._memory.forget()  # or it remembers wrongly
            raise BadInput(
                "the file changed while gpurun read it",
                where=str(path),
                hint="try again when no program writes to the file",
            )


def unreadable(error: OSError, path: Path, what: str = "gpurun cannot read the file or folder") -> GpurunError:
    """Return the error for a user's file on the head: BadInput, or HostNotReady if its disk or file server may return.

    Args:
        path: what was read, if the error does not name a file below it.
    """
    where = str(path) if error.filename is None else os.fsdecode(error.filename)
    if may_pass(error):
        return HostNotReady(
            f"{what} on the head now: {error.strerror}", where=where, hint=f"check the file system of {where}"
        )
    return BadInput(f"{what}: {error.strerror}", where=where)


def scan(top: Path) -> FolderTree:
    """Read a folder, without what git ignores (`gpurun.images.ignore`), and without sockets, FIFOs and devices.

    The user's cache folder keeps the digests of files that have not changed.

    Raises:
        BadInput: the path is not a folder, or something in it cannot be read.
        HostNotReady: its file system does not answer.
    """
    if not top.is_dir():
        raise BadInput("the workdir is not a folder", where=str(top))
    top = top.resolve()
    memory, walk = DigestMemory(top), Walk(top)
    entries: list[Entry] = []
    try:
        for path, found in walk.entries():
            status = found.stat(follow_symlinks=False)
            mode = stat.S_IMODE(status.st_mode) & 0o777
            if stat.S_ISDIR(status.st_mode):
                entries.append(Entry(path, "dir", mode, status.st_mtime_ns))
            elif stat.S_ISLNK(status.st_mode):
                entries.append(Entry(path, "link", 0, target=os.readlink(found.path)))  # noqa: PTH115 - bytes as they are
            elif stat.S_ISREG(status.st_mode):
                digest = memory.digest(path, status, partial(_digest, found.path))
                entries.append(Entry(path, "file", mode, status.st_mtime_ns, status.st_size, digest))
    except OSError as error:
        raise unreadable(error, top) from None
    memory.keep()
    return FolderTree(top, entries, memory, missed(walk.left_out))


class DigestMemory:
    """Caches the digests of a folder's unchanged files in the user's cache folder.

    Args:
        what: separates caches of the same folder for different purposes.
    """

    def __init__(self, top: Path, what: str = "") -> None:
        name = hashlib.sha256(os.fsencode(f"{top}\0{what}" if what else top)).hexdigest()[:32]
        self._place = default_folder().parent / "trees" / f"{name}.json"
        self._known = _load(self._place)
        self._seen: dict[str, list[Any]] = {}

    def digest(self, path: str, status: os.stat_result, read: Callable[[], str]) -> str:
        """Return a file's digest from the cache, or from `read`."""
        mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(path)
        if known is None or known[:-1] != mark:
            digest = read()
            changed_s = max(status.st_mtime, status.st_ctime)
            known = [*(mark if time.time() - changed_s > RACY_S else [-1]), digest]
        self._seen[path] = known
        return str(known[-1])

    def keep(self) -> None:
        """Write the digests that were requested from this object to the cache, and no others."""
        self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._place.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self._seen))
        temporary.replace(self._place)

    def forget(self) -> None:
        """Clear the cache, so that every file is read again."""
        self._place.unlink(missing_ok=True)


def _digest(path: str) -> str:
    whole = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a path of any bytes
        while piece := file.read(1 << 20):
            whole.update(piece)
    return f"sha256:{whole.hexdigest()}"


def _load(memory: Path) -> dict[str, list[Any]]:
    try:
        found = json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = found.items() if isinstance(found, dict) else ()
    return {path: marks for path, marks in known if isinstance(marks, list) and marks and isinstance(marks[-1], str)}
