"""The folders of a job's outputs on this host, as one tree: what ranks write to ``outputs``, and, below `BESIDE`, what
they write beside their code (`gpurun.node.job.layer`).
"""

import os
import posixpath
import stat
from typing import Dict, Iterable, Iterator, Optional, Set, Tuple

from gpurun.node.folder import below, listings
from gpurun.node.folder.batches import Item
from gpurun.node.folder.contents import Listed
from gpurun.node.folder.listings import Rows
from gpurun.node.job import job_parts
from gpurun.node.job.layer_rules import BESIDE, CODE, FILLED, is_rubbish

_BESIDE = os.fsencode(BESIDE)
_COPIED = ("file", "dir", "link")
_TAKEN = "stays on its host, because gpurun itself uses its name in the outputs"


def written_folder(job: str) -> str:
    """Return the folder of what ranks write beside their code, if the head copies that."""
    return os.path.join(job_parts.kept_layer(job), "written")


class Tops:
    """The open folders of a job's outputs. A context manager.

    Args:
        need: rights that we must have in every folder (`gpurun.node.folder.below.Cursor`).

    Raises:
        FileNotFoundError: the job has no outputs here.
    """

    def __init__(self, job: str, need: int) -> None:
        self._job = job
        self._need = need
        self._opened = [below.open_top(job_parts.outputs_folder(job), need=need)]
        self._cursors = [below.Cursor(self._opened[0], need)]
        try:
            self._opened.append(below.open_top(written_folder(job), need=need))
            self._cursors.append(below.Cursor(self._opened[1], need))
        except FileNotFoundError:
            pass
        except OSError:
            os.close(self._opened[0])
            raise

    def at(self, parts: below.Parts) -> Tuple[int, bytes]:
        """Return the folder of an entry, valid until the next call, and the entry's name in it.

        Raises:
            OSError: there is no such folder.
        """
        if len(self._opened) > 1 and len(parts) > 1 and parts[0] == _BESIDE:
            return self._cursors[1].at(parts[1:-1]), parts[-1]
        return self._cursors[0].at(parts[:-1]), parts[-1]

    def told(self, known: Dict[Rows, str]) -> Iterator[Item]:
        """Yield the list of everything, as `gpurun.node.folder.listings.told`."""
        force = bool(self._need)
        if len(self._opened) == 1:
            yield from listings.told(self._opened[0], force, known)
            return
        yield from listings.told(self._opened[0], force, known, "", lambda parts, *_: parts[0] == _BESIDE)
        if os.access(_BESIDE, os.F_OK, dir_fd=self._opened[0], follow_symlinks=False):
            yield Listed(BESIDE, "unreadable", why=_TAKEN).header(), b""
        yield Listed(BESIDE, "dir", 0o755, os.fstat(self._opened[1]).st_mtime_ns).header(), b""
        with _Code(self._job) as code:
            found = listings.told(self._opened[1], force, known, BESIDE, code.leaves_out)
            yield from _with_their_folders(found, code.folders)

    def __enter__(self) -> "Tops":
        return self

    def __exit__(self, *_: object) -> None:
        for cursor in self._cursors:
            cursor.__exit__()
        for descriptor in self._opened:
            os.close(descriptor)


class _Code:
    """The code of a job here: what is still as it was there has not been written. A context manager.

    Attributes:
        folders: those that the code has, too, by their paths in the list.
    """

    def __init__(self, job: str) -> None:
        self.folders: Set[str] = set()
        self._top: Optional[int] = None
        self._cursor: Optional[below.Cursor] = None
        self._filled = _times(os.path.join(job_parts.kept_layer(job), FILLED))
        for folder in (os.path.join(job_parts.folder(job), CODE), os.path.join(job_parts.kept_layer(job), CODE)):
            try:
                self._top = below.open_top(folder)
            except FileNotFoundError:
                continue
            self._cursor = below.Cursor(self._top, below.READ)
            return

    def leaves_out(self, parts: below.Parts, above: int, status: Optional[os.stat_result]) -> bool:
        """Return whether something was not written by the program, or is nothing that it needs again."""
        if status is None or is_rubbish(parts):
            return status is not None
        kind, before = below.kind_of(status.st_mode), self._status(parts)
        if kind not in _COPIED:
            return True
        if before is None or stat.S_IFMT(before.st_mode) != stat.S_IFMT(status.st_mode):
            return False
        if kind == "dir":
            self.folders.add(below.text_of_path((_BESIDE, *parts)))
            return False
        if kind == "link":
            return self._target(parts) == _target(above, parts[-1])
        return _is_same(before, status) and self._is_copied(status)

    def _is_copied(self, status: os.stat_result) -> bool:
        """Return whether gpurun made a file. A program may set a file's mtime, as ``cp -p`` does, but not its ctime."""
        return self._filled is None or self._filled[0] <= status.st_ctime_ns <= self._filled[1]

    def _status(self, parts: below.Parts) -> Optional[os.stat_result]:
        try:
            return None if self._cursor is None else os.lstat(parts[-1], dir_fd=self._cursor.at(parts[:-1]))
        except OSError:
            return None

    def _target(self, parts: below.Parts) -> bytes:
        return b"" if self._cursor is None else _target(self._cursor.at(parts[:-1]), parts[-1])

    def __enter__(self) -> "_Code":
        return self

    def __exit__(self, *_: object) -> None:
        if self._cursor is not None and self._top is not None:
            self._cursor.__exit__()
            os.close(self._top)


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns, one.st_mode) == (other.st_size, other.st_mtime_ns, other.st_mode)


def _times(path: str) -> Optional[Tuple[int, int]]:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns


def _target(above: int, name: bytes) -> bytes:
    try:
        return os.readlink(name, dir_fd=above)
    except OSError:
        return b""


def _with_their_folders(items: Iterable[Item], known: Set[str]) -> Iterator[Item]:
    """Leave out folders of the code in which nothing was written. A folder comes before its content."""
    waiting: Dict[str, Item] = {}
    for item in items:
        header, _ = item
        path = str(header.get("in", header.get("p")))
        if header.get("k") == "dir" and path in known:
            waiting[path] = item
            continue
        folder = path if "in" in header else posixpath.dirname(path)
        above = []
        while folder in waiting:
            above.append(waiting.pop(folder))
            folder = posixpath.dirname(folder)
        yield from reversed(above)
        yield item
