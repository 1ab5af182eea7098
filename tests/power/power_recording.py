"""Every system call with which real processes change a folder, in order: strace, read into operations on inodes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TRACED = (
    "open,openat,creat,write,pwrite64,writev,lseek,truncate,ftruncate,rename,renameat,renameat2,link,linkat,unlink,"
    "unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,fsync,fdatasync,sync,syncfs,copy_file_range,sendfile,clone,clone3"
)
LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>)?(.*)")
WHOLE = re.compile(r"(\w*)\((.*)\) += (-?\d+)(?:<([^>]*)>)?.*")
WORD = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
FD = re.compile(r"(AT_FDCWD|\d+)<([^>]*)>")
UNSUPPORTED = ("truncate", "symlink", "symlinkat", "sync", "syncfs", "copy_file_range", "sendfile", "writev")


@dataclass(frozen=True)
class Op:
    """One change, or one sync, that succeeded.

    Attributes:
        kind: ``enter``, ``leave`` and ``move`` change names; ``write`` and ``cut`` a file; ``sync``.
        began: an operation that began before another one ended may not be counted on by it.
        node: the inode that is written, synced, or gets the name.
        folder, name: where the name is entered or left; of ``move``: where to.
        source: of ``move``: folder and name it had before.
        offset, data: of ``write``; ``cut`` makes the file `offset` bytes long.
    """

    kind: str
    began: int
    ended: int
    node: int
    folder: int = 0
    name: str = ""
    source: tuple[int, str] = (0, "")
    offset: int = 0
    data: bytes = b""
    is_folder: bool = False


NEEDS = "needs strace and leave to trace its children (ptrace): apt-get install strace"


def available() -> bool:
    """Whether processes can be recorded here."""
    return shutil.which("strace") is not None and subprocess.run(
        ["strace", "-f", "-e", "trace=none", "true"], capture_output=True
    ).returncode == 0  # fmt: skip


def record(argv: Sequence[str], root: Path, output: Path, environ: Mapping[str, str]) -> list[Op]:
    """Run a command and its children to their end; what they did below `root`, which is empty before."""
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "1000000", "-e", "signal=none"]
    with output.with_suffix(".stderr").open("wb") as said:
        subprocess.run(
            [*strace, "-e", f"trace={TRACED}", "-o", str(output), "--", *argv], env=environ, check=True, stderr=said,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    with output.open() as lines:
        return list(_Reader(str(root)).read(lines))


@dataclass
class _Node:
    """An inode, as the processes that run see it."""

    number: int
    entries: dict[str, _Node] | None = None
    size: int = 0


EVERYWHERE = ("<unfinished", "resumed>", "clone", "sync(")
"""In lines that matter whatever path they name."""


@dataclass
class _Reader:
    root: str
    nodes: int = 0
    threads: dict[str, str] = field(default_factory=dict)
    positions: dict[tuple[str, str], int] = field(default_factory=dict)
    pending: dict[str, tuple[int, str]] = field(default_factory=dict)

    def read(self, lines: Iterator[str] | Sequence[str]) -> Iterator[Op]:
        self.tree = _Node(0, {})
        self.below = _decoded(self.root)
        for at, line in enumerate(lines):
            if not any(word in line for word in (self.below, *EVERYWHERE)):
                continue
            found = LINE.match(line.rstrip("\n"))
            if found is None:
                continue
            pid, _, rest = found.groups()
            began = at
            if rest.endswith("<unfinished ...>"):
                self.pending[pid] = (at, rest.removesuffix("<unfinished ...>"))
                continue
            if found[2]:
                began, head = self.pending.pop(pid)
                rest = head.rstrip(" ") + rest
            call = WHOLE.fullmatch(rest)
            if call is not None and not call[3].startswith("-"):
                yield from self._call(pid, call[1], call[2], call[3], began, at)

    def _call(self, pid: str, name: str, text: str, result: str, began: int, at: int) -> Iterator[Op]:
        who = self.threads.get(pid, pid)
        if name in ("clone", "clone3"):
            if "CLONE_THREAD" in text:
                self.threads[result] = who
            return
        if self.below not in text and name != "sync":
            return
        if name in UNSUPPORTED:
            raise NotImplementedError(f"{name}({text})")
        if name in ("open", "openat", "creat"):
            yield from self._open(who, name, text, result, began, at)
        elif name in ("write", "pwrite64", "lseek", "ftruncate"):
            yield from self._data(who, name, text, result, began, at)
        elif name in ("fsync", "fdatasync"):
            node = self._find(_fd(text)[1])
            if node is not None:
                yield Op("sync", began, at, node.number)
        else:
            yield from self._names(name, text, began, at)

    def _open(self, who: str, name: str, text: str, result: str, began: int, at: int) -> Iterator[Op]:
        path = _paths(text)[0]
        parent, last = self._parent(path)
        if parent is None:
            return
        assert parent.entries is not None
        self.positions[who, result] = -1 if "O_APPEND" in text else 0
        node = parent.entries.get(last)
        if node is None:
            if "O_CREAT" in text:
                node = parent.entries[last] = self._new(folder=False)
                yield Op("enter", began, at, node.number, parent.number, last)
        elif "O_TRUNC" in text and node.size:
            node.size = 0
            yield Op("cut", began, at, node.number)

    def _data(self, who: str, name: str, text: str, result: str, began: int, at: int) -> Iterator[Op]:
        fd, path = _fd(text)
        node = self._find(path)
        if node is None or node.entries is not None:
            return
        key = (who, fd)
        if name == "lseek":
            self.positions[key] = int(result)
            return
        if name == "ftruncate":
            node.size = int(text.rpartition(", ")[2])
            yield Op("cut", began, at, node.number, offset=node.size)
            return
        found = WORD.search(text)
        data = bytes.fromhex(found[1].replace("\\x", "")) if found else b""
        data = data[: int(result)]
        position = self.positions.get(key, -1)
        offset = int(text.rpartition(", ")[2]) if name == "pwrite64" else node.size if position < 0 else position
        if name == "write" and position >= 0:
            self.positions[key] = offset + len(data)
        node.size = max(node.size, offset + len(data))
        yield Op("write", began, at, node.number, offset=offset, data=data)

    def _names(self, name: str, text: str, began: int, at: int) -> Iterator[Op]:
        paths = _paths(text)
        places = [self._parent(path) for path in paths]
        if name.startswith(("rename", "link")):
            (old, was), (new, last) = places
            if old is None or new is None:
                raise NotImplementedError(f"into or out of {self.root}: {paths}")
            assert old.entries is not None
            assert new.entries is not None
            if was not in old.entries:  # strace may tell of two processes' calls in the wrong order
                return
            node = new.entries[last] = old.entries[was]
            if name.startswith("rename"):
                del old.entries[was]
                yield Op("move", began, at, node.number, new.number, last, (old.number, was))
            else:
                yield Op("enter", began, at, node.number, new.number, last)
            return
        ((parent, last),) = places
        if parent is None:
            return
        assert parent.entries is not None
        if not name.startswith("mkdir") and last not in parent.entries:
            return
        if name.startswith("mkdir"):
            node = parent.entries[last] = self._new(folder=True)
            yield Op("enter", began, at, node.number, parent.number, last, is_folder=True)
        else:
            node = parent.entries.pop(last)
            yield Op("leave", began, at, node.number, parent.number, last)

    def _new(self, *, folder: bool) -> _Node:
        self.nodes += 1
        return _Node(self.nodes, {} if folder else None)

    def _find(self, path: str) -> _Node | None:
        if path == self.root:
            return self.tree
        parent, last = self._parent(path)
        return parent.entries.get(last) if parent is not None and parent.entries is not None else None

    def _parent(self, path: str) -> tuple[_Node | None, str]:
        if not path.startswith(self.root + "/"):
            return None, ""
        *above, last = path[len(self.root) + 1 :].split("/")
        node: _Node | None = self.tree
        for name in above:
            node = node.entries.get(name) if node is not None and node.entries is not None else None
        return node, last


def _decoded(path: str) -> str:
    """As strace -xx writes it."""
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(path))


def _text(hexed: str) -> str:
    return os.fsdecode(bytes.fromhex(hexed.replace("\\x", ""))) if "\\x" in hexed else hexed


def _fd(text: str) -> tuple[str, str]:
    found = FD.match(text)
    return (found[1], _text(found[2])) if found else ("", "")


def _paths(text: str) -> list[str]:
    """The paths that a call names: each beside its folder's descriptor, if it has one."""
    paths = []
    for found in re.finditer(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:\\x[0-9a-f]{2})*)"', text):
        folder, name = _text(found[1] or ""), _text(found[2])
        paths.append(os.path.normpath(name if name.startswith("/") else f"{folder}/{name}"))
    return paths
