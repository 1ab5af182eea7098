"""How much of the head's disk each job's folder takes: one walk below a descriptor, one look at each file.

What counts is what the file system has allocated (``st_blocks``), not the size that a file says: a sparse file takes
less. A file with several names (hard links) counts once. Containers made some of these trees, so no link is followed,
and what cannot be read is named.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.errors import StateError
from gpurun.node import below
from gpurun.node.walk import walk
from gpurun.state.path import StatePath

Kind = Literal["outputs", "logs", "other"]
KINDS: tuple[Kind, ...] = ("outputs", "logs", "other")
OUTPUTS = (b"outputs", b"outputs.arriving", b"outputs.replaced")
"""The head's copy; what arrives for the next one; a copy that an older gpurun was replacing."""
LOGS = (b"log", b"events.jsonl", b"supervisor.log", b"launch.jsonl")
DOOMED = ".doomed-"
"""How the name of something begins that `gpurun prune` removes: another prune removes what a crash left of it."""
BLOCK_BYTES = 512
"""The unit of ``st_blocks``, whatever the file system's own block is (stat(2))."""

Inode = tuple[int, int]


@dataclass(frozen=True)
class LinkedFile:
    """A file with several names.

    Attributes:
        names: how many of its names the folder holds.
        of: how many names it has.
    """

    kind: Kind
    size: int
    names: int
    of: int


@dataclass(frozen=True)
class FolderUsage:
    """What one folder takes.

    Attributes:
        sizes: bytes on disk by kind, without `linked`.
        files: everything that is no folder.
        linked: files with several names.
        unread: what could not be read, so that the true sizes may be larger.
    """

    sizes: Mapping[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    files: int = 0
    linked: Mapping[Inode, LinkedFile] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes, without `linked`."""
        return sum(self.sizes.values())

    def outputs_alone(self) -> FolderUsage:
        """What of it are outputs."""
        linked = {inode: each for inode, each in self.linked.items() if each.kind == "outputs"}
        return replace(self, sizes={**dict.fromkeys(KINDS, 0), "outputs": self.sizes["outputs"]}, linked=linked)


def measure(path: StatePath) -> FolderUsage:
    """What a folder takes. One that vanishes meanwhile takes nothing; one that cannot be read says so."""
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
    """The same, with each file of several names among the sizes of the first folder that has a name of it."""
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
    """How many bytes the removal of folders frees. A file with several names goes with the last of them."""

    def __init__(self) -> None:
        self.size = 0
        self._names: dict[Inode, int] = {}

    def add(self, usage: FolderUsage) -> int:
        """Remove one more; the bytes that this frees."""
        before = self.size
        self.size += usage.total
        for inode, each in usage.linked.items():
            self._names[inode] = names = self._names.get(inode, 0) + each.names
            if names >= each.of:
                self.size += each.size
        return self.size - before
