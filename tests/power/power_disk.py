"""What a file system may show after a power cut, as far as POSIX promises anything.

What was synced is there: a file's bytes after an fsync of the file, a name after an fsync of its folder. Of everything
since, each change may have reached the disk or not, in any combination and in no order: names of one folder, names of
several, the bytes of a file, which may also be there in part, or as zeros that the file's new length left. Nothing
makes a name durable but an fsync of its folder. Only a move is one change, in both of its folders. This is more than
any one file system does (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from power_recording import Op

ALL_SUBSETS_OF = 4
"""With so many changes of names on their way, all combinations are tried; with more, the telling ones and some."""
SAMPLED = 6
LAST = 8
LOSSES = ("kept", "lost", "torn", "zeros", "mixed")


@dataclass(frozen=True)
class Crash:
    """One state that the disk may be in after a cut.

    Attributes:
        at: how many operations of the recording had happened.
        lost: which changes of names did not make it, for a person who wants to know why it is broken.
        files, folders: everything there is, by path.
    """

    at: int
    lost: tuple[str, ...]
    bytes_are: str
    files: dict[str, bytes]
    folders: tuple[str, ...]

    @property
    def digest(self) -> str:
        found = hashlib.sha256(repr((self.folders, sorted(self.files.items()))).encode())
        return found.hexdigest()

    def write(self, root: Path) -> None:
        for folder in self.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path, data in self.files.items():
            (root / path).write_bytes(data)


@dataclass
class _File:
    durable: bytes = b""
    pending: list[Op] = field(default_factory=list)


class Disk:
    """Follows a recording and gives the states that a cut after each operation may leave.

    Args:
        exact: folders directly below the root that lose nothing: they are not on this disk.
    """

    def __init__(self, operations: Sequence[Op], *, exact: Iterable[str], seed: int) -> None:
        self.operations = operations
        self.exact = frozenset(exact)
        self.chance = random.Random(seed)
        self._durable: list[Op] = []
        self._pending: list[Op] = []
        self._files: dict[int, _File] = defaultdict(_File)
        self._elsewhere = {0}
        self._is_folder = {op.node for op in operations if op.is_folder}

    def crashes(self, cuts: Container[int] | None = None) -> Iterator[Crash]:
        """A sample of what may be found after every operation, or after so many of them as `cuts` says."""
        for at, op in enumerate(self.operations, 1):
            self.follow(op)
            if cuts is None or at in cuts:
                for kept in self._subsets():
                    yield self._crash(at, kept)

    def follow(self, op: Op) -> None:
        if op.kind in ("write", "cut"):
            self._files[op.node].pending.append(op)
        elif op.kind == "sync":
            self._sync(op)
        elif self._is_exact(op):
            self._durable.append(op)
            if op.is_folder:
                self._elsewhere.add(op.node)
        else:
            self._pending.append(op)

    def _is_exact(self, op: Op) -> bool:
        return op.folder in self._elsewhere and (op.folder != 0 or op.name in self.exact)

    def _sync(self, sync: Op) -> None:
        """What had ended when the sync began is durable now."""
        file = self._files[sync.node]
        done = [op for op in file.pending if op.ended < sync.began]
        file.durable = _applied(file.durable, done)
        file.pending = [op for op in file.pending if op.ended >= sync.began]
        names = {(sync.node, op.name) for op in self._pending if op.folder == sync.node and op.ended < sync.began}
        names |= {op.source for op in self._pending if op.source[0] == sync.node and op.ended < sync.began}
        self._settle(names, sync.began)

    def _settle(self, names: set[tuple[int, str]], began: int) -> None:
        """Make changes of these names durable, and, as a move is one change, what came before at its other end."""
        while True:
            durable = [op for op in self._pending if op.ended < began and names & {(op.folder, op.name), op.source}]
            if not durable:
                return
            self._durable += durable
            self._pending = [op for op in self._pending if op not in durable]
            names |= {place for op in durable for place in ((op.folder, op.name), op.source)}

    def _subsets(self) -> Iterator[tuple[Op, ...]]:
        """Which of the pending changes of names made it."""
        pending = tuple(self._pending)
        if len(pending) <= ALL_SUBSETS_OF:
            for mask in range(1 << len(pending)):
                yield tuple(op for bit, op in enumerate(pending) if mask >> bit & 1)
            return
        yield pending
        yield ()
        for op in pending[-LAST:]:
            yield tuple(other for other in pending if other is not op)
            yield (op,)
        for count in range(1, LAST):
            yield pending[:-count]
        for _ in range(SAMPLED):
            yield tuple(op for op in pending if self.chance.random() < 0.5)

    def _crash(self, at: int, kept: tuple[Op, ...]) -> Crash:
        entries: dict[int, dict[str, int]] = defaultdict(dict)
        for op in sorted((*self._durable, *kept), key=lambda op: op.ended):
            if op.kind == "move":
                entries[op.source[0]].pop(op.source[1], None)
            if op.kind == "leave":
                entries[op.folder].pop(op.name, None)
            else:
                entries[op.folder][op.name] = op.node
        bytes_are = self.chance.choice(LOSSES)
        files: dict[str, bytes] = {}
        folders: list[str] = []
        self._walk(0, "", entries, bytes_are, files, folders)
        there = set(map(id, kept))
        lost = tuple(f"{op.kind} {op.source[1]} {op.name}" for op in self._pending if id(op) not in there)
        return Crash(at, lost, bytes_are, files, tuple(folders))

    def _walk(
        self, node: int, path: str, entries: dict[int, dict[str, int]], bytes_are: str, files: dict[str, bytes],
        folders: list[str],
    ) -> None:  # fmt: skip
        for name, child in sorted(entries[node].items()):
            below = f"{path}{name}"
            if child in self._is_folder:
                folders.append(below)
                self._walk(child, f"{below}/", entries, bytes_are, files, folders)
            else:
                files[below] = self._content(self._files[child], bytes_are)

    def _content(self, file: _File, bytes_are: str) -> bytes:
        if not file.pending:
            return file.durable
        if bytes_are == "mixed":
            bytes_are = self.chance.choice(LOSSES[:-1])
        if bytes_are == "lost":
            return file.durable
        whole = _applied(file.durable, file.pending)
        if bytes_are == "kept":
            return whole
        safe = min(len(file.durable), len(whole))
        if bytes_are == "torn":
            return whole[: self.chance.randint(safe, len(whole))]
        return whole[:safe] + b"\0" * (len(whole) - safe)


def _applied(content: bytes, operations: Iterable[Op]) -> bytes:
    data = bytearray(content)
    for op in operations:
        if op.kind == "cut":
            data = data[: op.offset].ljust(op.offset, b"\0")
        else:
            data = data.ljust(op.offset, b"\0")
            data[op.offset : op.offset + len(op.data)] = op.data
    return bytes(data)


def everything(operations: Sequence[Op], *, exact: Iterable[str]) -> Crash:
    """What is there when nothing was lost: the folder that was recorded."""
    disk = Disk(operations, exact=exact, seed=0)
    for op in operations:
        disk.follow(op)
    for node in disk._is_folder | {0} | {op.node for op in operations}:
        disk.follow(Op("sync", len(operations) ** 2, len(operations) ** 2, node))
    return disk._crash(len(operations), ())


def distinct(crashes: Iterable[Crash]) -> list[Crash]:
    """One of each that differ in anything."""
    return list({crash.digest: crash for crash in crashes}.values())
