"""Measure how much of the head's disk each job's folder takes: one walk below a descriptor, one look at each file.

Counts the bytes that the file system has allocated (``st_blocks``), so a sparse file counts less than its size. Counts
a file with several hard links once. Containers made some of these trees, so the walk follows no link, and reports what
it cannot read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.errors import StateError
from gpurun.node.folder import below
from gpurun.node.folder.walk import walk
from gpurun.state.path import StatePath

Kind = Literal["outputs", "logs", "other"]
KINDS: tuple[Kind, ...] = ("outputs", "logs", "other")
OUTPUTS = (b"outputs", b"outputs.whole", b"outputs.arriving", b"outputs.replaced")
"""The head's copy; its last whole state; what arrives for the next one; a copy that an older gpurun was replacing."""
LOGS = (b"log", b"events.jsonl", b"supervisor.log", b"launch.jsonl")
DOOMED = ".doomed-"
"""How the name of something begins that `gpurun prune` removes: another prune removes what a crash left of it."""
BLOCK_BYTES = 512
"""The unit of ``st_blocks``, whatever the file system's own block is (stat(2))."""

Inode = tuple[int, int]


@dataclass(frozen=True)
class LinkedFile:
    """A file with several hard links.

    Attributes:
        names: the number of its links in the folder.
        of: the number of all its links.
    """

    kind: Kind
    size: int
    names: int
    of: int


@dataclass(frozen=True)
class FolderUsage:
    """Disk usage of one folder.

    Attributes:
        sizes: bytes on disk by kind, without `linked`.
        files: the number of entries that are not folders.
        linked: files with several hard links.
        unread: what could not be read, so that the true sizes may be larger.
    """

    sizes: Mapping[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    files: int = 0
    linked: Mapping[Inode, LinkedFile] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the bytes without `linked`."""
        return sum(self.sizes.values())

    def outputs_alone(self) -> FolderUsage:
        """Return the usage of the outputs only."""
        linked = {inode: each for inode, each in self.linked.items() if each.kind == "outputs"}
        return replace(self, sizes={**dict.fromkeys(KINDS, 0), "outputs": self.sizes["outputs"]}, linked=linked)


def measure(path: StatePath) -> FolderUsage:
    """Measure a folder. A folder that disappears meanwhile takes nothing; an unreadable one is reported."""
    try:
        top = path.open_folder()
    except FileNotFoundError:
        return FolderUsage()
    except StateError as error:
        return FolderUsage(unread=(str(error),))
    try:
        return _measured(top)
    except OSError as error:
        return FolderUsage(unread=(f"{path}: {error.strerror}",))
    finally:
        os.close(top)


def _measured(top: int) -> FolderUsage:
    sizes: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    linked: dict[Inode, LinkedFile] = {}
    unread: list[str] = []
    files = 0
    sizes["other"] += os.fstat(top).st_blocks * BLOCK_BYTES
    for found in walk(top):
        status = found.status
        if status is None:
            unread.append(f"{below.text_of_path(found.parts)[-200:]!r}: {found.why}")
            continue
        kind, size = _kind_of(found.parts[0]), status.st_blocks * BLOCK_BYTES
        is_folder = stat.S_ISDIR(status.st_mode)
        files += not is_folder
        if is_folder or status.st_nlink <= 1:
            sizes[kind] += size
            continue
        inode = status.st_dev, status.st_ino
        before = linked.get(inode)
        linked[inode] = LinkedFile(kind, size, before.names + 1 if before else 1, status.st_nlink)
    return FolderUsage(sizes, files, linked, tuple(unread))


def _kind_of(name: bytes) -> Kind:
    if name in OUTPUTS or name.startswith(DOOMED.encode()):
        return "outputs"
    return "logs" if name in LOGS else "other"


def each_counted_once(usages: Iterable[FolderUsage]) -> list[FolderUsage]:
    """Return the usages, with each hard-linked file counted in the first folder that has a link to it."""
    counted, seen = [], set[Inode]()
    for usage in usages:
        sizes = dict(usage.sizes)
        for inode, each in usage.linked.items():
            if inode not in seen:
                sizes[each.kind] += each.size
        seen |= usage.linked.keys()
        counted.append(replace(usage, sizes=sizes, linked={}))
    return counted


class Freed:
    """Computes the bytes that the removal of folders frees. A hard-linked file is freed with its last link."""

    def __init__(self) -> None:
        self.size = 0
        self._names: dict[Inode, int] = {}

    def add(self, usage: FolderUsage) -> int:
        """Add one removed folder; return the bytes that this frees."""
        before = self.size
        self.size += usage.total
        for inode, each in usage.linked.items():
            self._names[inode] = names = self._names.get(inode, 0) + each.names
            if names >= each.of:
                self.size += each.size
        return self.size - before
