"""A folder's content as one value: the digest of every file, every mode, every link."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from gpurun.content.export import default_folder
from gpurun.errors import BadInput, GpurunError, HostNotReady
from gpurun.node.folder.below import LIKE, Entry, digest_of, digest_of_file, timed_digest_of
from gpurun.node.transfer.spool import CHUNK
from gpurun.state.paths import may_pass

# Find which files of a folder are code: those that git does not ignore. Source: gitignore(5).


@dataclass(frozen=True)
class Rule:
    """One line of a ``.gitignore``.

    Attributes:
        base: the folder of the ``.gitignore``, relative to the top, ``""`` or ending in ``/``.
        regex: matches paths relative to `base`.
        keep: the line begins with ``!``.
        folders_only: the line ends in ``/``.
    """

    base: str
    regex: re.Pattern[str]
    keep: bool
    folders_only: bool

    def matches(self, path: str, is_folder: bool) -> bool:
        """Return whether the rule matches a path, relative to the top."""
        if self.folders_only and not is_folder:
            return False
        return path.startswith(self.base) and self.regex.fullmatch(path[len(self.base) :]) is not None


def parse_ignore_file(text: str, base: str) -> tuple[Rule, ...]:
    """Return the rules of one file, in its order."""
    return tuple(rule for line in text.splitlines() if (rule := _rule(line, base)) is not None)


def _rule(line: str, base: str) -> Rule | None:
    line = re.sub(r"(?<!\\)((?:\\\\)*)[ \t]+$", r"\1", line.rstrip("\r"))
    keep = line.startswith("!")
    pattern = line[1:] if keep else line
    if not pattern or pattern.startswith("#"):
        return None
    folders_only = pattern.endswith("/")
    pattern = pattern.rstrip("/") if folders_only else pattern
    anchored = "/" in pattern
    pattern = pattern.removeprefix("/")
    if not pattern:
        return None
    translated = _translate(pattern)
    if translated is None:
        return None
    try:
        regex = re.compile(translated if anchored else f"(?:.*/)?{translated}", re.DOTALL)
    except re.error:  # a range whose end is before its beginning holds no character, so nothing matches
        return None
    return Rule(base, regex, keep, folders_only)


def _translate(pattern: str) -> str | None:
    """Return a pattern as a regular expression; None if it can match nothing (an unclosed bracket, a lone
    backslash).
    """
    out: list[str] = []
    position = 0
    while position < len(pattern):
        rest = pattern[position:]
        letter = rest[0]
        if rest.startswith("**/") and (position == 0 or pattern[position - 1] == "/"):
            out.append("(?:.*/)?")
            position += 3
            continue
        if rest == "**" and position > 0 and pattern[position - 1] == "/":
            out.append(".+")
            break
        step = 1
        if letter == "*":
            out.append("[^/]*")
        elif letter == "?":
            out.append("[^/]")
        elif letter == "[":
            bracket = _bracket(rest)
            if bracket is None:
                return None
            out.append(bracket[0])
            step = bracket[1]
        elif letter == "\\":
            if len(rest) == 1:
                return None
            out.append(re.escape(rest[1]))
            step = 2
        else:
            out.append(re.escape(letter))
        position += step
    return "".join(out)


_CLASSES = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \\t", "digit": "0-9", "lower": "a-z", "punct": "!-/:-@\\[-`{-~",
    "space": "\\s", "upper": "A-Z", "xdigit": "0-9a-fA-F",
}  # fmt: skip


def _bracket(rest: str) -> tuple[str, int] | None:
    """Return ``[…]`` at the start of a pattern as (regular expression, its length there)."""
    end = 1
    negated = rest[end : end + 1] in ("!", "^")
    end += negated
    inner: list[str] = []
    first = True
    while end < len(rest) and (rest[end] != "]" or first):
        first = False
        named = re.match(r"\[:(\w+):\]", rest[end:])
        if named:
            if named.group(1) not in _CLASSES:
                return None
            inner.append(_CLASSES[named.group(1)])
            end += named.end()
            continue
        if rest[end] == "\\":
            end += 1
            if end >= len(rest):
                return None
            inner.append(re.escape(rest[end]))
        else:
            inner.append("-" if rest[end] == "-" and inner and rest[end + 1 : end + 2] != "]" else re.escape(rest[end]))
        end += 1
    if end >= len(rest):
        return None
    return f"(?!/)[{'^' if negated else ''}{''.join(inner)}]", end + 1


def ignored(path: str, is_folder: bool, rules: Sequence[Rule]) -> bool:
    """Return whether a path is ignored: the last matching rule decides."""
    for rule in reversed(rules):
        if rule.matches(path, is_folder):
            return not rule.keep
    return False


class Walk:
    """The files, folders and links of a folder that are not ignored.

    Attributes:
        left_out: what `entries` has left out so far, relative to the folder: folders without what is in them.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self.left_out: list[str] = []
        repository = _repository(top)
        self._prefix = ""
        self._rules: tuple[Rule, ...] = ()
        self._tracked: frozenset[str] = frozenset()
        self._tracked_folders: frozenset[str] = frozenset()
        if repository is not None:
            self._above(repository)

    def _above(self, repository: Path) -> None:
        """Read the repository's rules from outside the folder."""
        relative = self._top.relative_to(repository)
        self._prefix = "" if relative == Path() else f"{relative}/"
        rules = [*parse_ignore_file(_text(repository / ".git/info/exclude"), "")]
        for depth in range(len(relative.parts)):
            folder = Path(*relative.parts[:depth])
            base = "" if depth == 0 else f"{folder}/"
            rules += parse_ignore_file(_text(repository / folder / ".gitignore"), base)
        self._rules = tuple(rules)
        self._tracked = _tracked(self._top)
        self._tracked_folders = frozenset(name[: at.start()] for name in self._tracked for at in re.finditer("/", name))

    def entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield (path relative to the folder, entry), folders before their content, names sorted.

        Raises:
            OSError: a folder cannot be read.
        """
        yield from self._entries("", self._rules, out=False)

    def leaves_out(self, path: str) -> bool:
        """Return whether the rules leave out a path of the folder, which is no link."""
        inside, rules, out, parts = "", self._rules, False, path.split("/")
        for at, name in enumerate(parts, start=1):
            rules = (*rules, *parse_ignore_file(_text(self._top / inside / ".gitignore"), self._prefix + inside))
            is_folder = at < len(parts) or (self._top / path).is_dir()
            out = out or ignored(self._prefix + inside + name, is_folder, rules)
            tracked = self._tracked_folders if is_folder else self._tracked
            if name == ".git" or (out and inside + name not in tracked):
                return True
            inside += name + "/"
        return False

    def _entries(self, inside: str, rules: tuple[Rule, ...], *, out: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield entries. `out`: the folder is ignored; yield only its tracked files."""
        folder = self._top / inside
        rules = (*rules, *parse_ignore_file(_text(folder / ".gitignore"), self._prefix + inside))
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = inside + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == ".git":
                continue
            left_out = out or ignored(self._prefix + path, is_folder, rules)
            if left_out and path not in (self._tracked_folders if is_folder else self._tracked):
                self.left_out.append(path)
                continue
            yield path, entry
            if is_folder:
                yield from self._entries(path + "/", rules, out=left_out)


def _repository(top: Path) -> Path | None:
    return next((folder for folder in (top, *top.parents) if (folder / ".git").exists()), None)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape") if file.is_file() else ""  # a pipe would never end
    except OSError:
        return ""


def _tracked(top: Path) -> frozenset[str]:
    """Return the files that git tracks below a folder, relative to it; none if git is not installed."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=top, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return (
        frozenset(os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
        if done.returncode == 0
        else frozenset()
    )


parse_ignore_file = lru_cache(maxsize=512)(parse_ignore_file)


# What a person may not expect of a job's code: what ignore rules leave out, where links lead, and sizes.


MOST_COUNTED = 20_000
"""How many files and folders that are left out are counted at most: a folder of data may have millions."""
MOST_KEPT = 200
_JUNK = re.compile(
    r"(?:.*/)?(?:__pycache__|\.venv|venv|node_modules|\.(?:mypy|pytest|ruff)_cache|\.ipynb_checkpoints|\.idea|\.vscode"
    r"|\.tox|\.DS_Store|[^/]*\.(?:py[co]|egg-info|sw[op]))"
)
"""What no rank misses."""


@dataclass(frozen=True)
class LeftOut:
    """What ignore rules left out, but for what no rank misses.

    Attributes:
        names: files, and folders without what is in them.
        files: all files in them, as far as they were counted.
        is_all: all were counted.
    """

    names: tuple[str, ...] = ()
    files: int = 0
    size_bytes: int = 0
    is_all: bool = True


@dataclass(frozen=True)
class Copied:
    """What is copied: path → size of each file, and path → target of each link."""

    sizes: dict[str, int]
    links: dict[str, str]


def look_at_folder(top: Path) -> tuple[Copied, LeftOut]:
    """Return what gpurun copies of a folder, and what it leaves out, without reading a file.

    Raises:
        OSError: the folder cannot be read.
    """
    walk, sizes, links = Walk(top.resolve()), {}, {}
    for path, entry in walk.entries():
        if not is_text(path):
            continue
        if entry.is_symlink():
            links[path] = os.fsencode(os.readlink(entry.path)).decode(errors="replace")  # noqa: PTH115 - any bytes
        elif entry.is_file():
            sizes[path] = entry.stat().st_size
    return Copied(sizes, links), counted(top, walk.left_out)


def missed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a rank may miss, those nearest to the top first; not all of very many."""
    wanted = (name for name in names if not _JUNK.fullmatch(name) and is_text(name))
    return tuple(sorted(wanted, key=lambda name: (name.count("/"), name))[:MOST_KEPT])


def is_text(name: str) -> bool:
    """Return whether a job's record can keep a name: it is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def counted(top: Path, names: Iterable[str]) -> LeftOut:
    """Count files and bytes of what is left out."""
    kept = missed(names)
    files = size = seen = 0
    for path in _paths(top / name for name in kept):
        seen += 1
        if seen > MOST_COUNTED:
            return LeftOut(kept, files, size, is_all=False)
        try:
            status = path.lstat()
        except OSError:
            continue
        files, size = files + 1, size + status.st_size
    return LeftOut(kept, files, size)


def _paths(tops: Iterable[Path]) -> Iterable[Path]:
    for top in tops:
        if top.is_symlink() or not top.is_dir():
            yield top
            continue
        for folder, _, files in os.walk(top):
            yield from (Path(folder, name) for name in files)


# A file changed this recently may change again within the same time stamp: its digest is not remembered.
RACY_S = 2.0
HINT = "try again when no program writes to the file"


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

    @property
    def timed_digest(self) -> str:
        """Return the digest with times, as `timed_digest_of`: the name of code on hosts."""
        return timed_digest_of(self.entries)

    @property
    def size(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(entry.size for entry in self.entries)

    @abstractmethod
    def content(self, digest: str) -> Iterator[bytes]:
        """Yield the content of one of `files`. The digest is checked after the last piece."""


class FolderTree(FileTree):
    """A folder as it was when gpurun scanned it.

    Args:
        memory: caches the digests of its files.

    Attributes:
        top: the folder.
        left_out: what ignore rules left out and a rank may miss.
    """

    def __init__(
        self, top: Path, entries: Iterable[Entry], memory: DigestMemory, left_out: tuple[str, ...] = ()
    ) -> None:
        super().__init__(entries)
        self.top, self.memory = top, memory
        self.left_out = left_out

    def content(self, digest: str) -> Iterator[bytes]:
        """Yield a file's content, which must still be the scanned one.

        Raises:
            BadInput: it has changed, or cannot be read.
        """
        path = self.top / self.files[digest].path
        seen = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(CHUNK):
                    seen.update(piece)
                    yield piece
        except OSError as error:
            raise unreadable(error, path) from None
        if f"sha256:{seen.hexdigest()}" != digest:
            self.memory.forget()  # or it remembers wrongly
            raise changed(path, HINT)


def changed(path: Path, hint: str) -> BadInput:
    """Return the error for a user's file that a program changes at the moment."""
    return BadInput("the file changed while gpurun read it", where=str(path), hint=hint)


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
    """Read a folder, without what git ignores (`gpurun.content.tree`), and without sockets, FIFOs and devices.

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
                digest = memory.digest(path, status, partial(_digest, found.path, status))
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
        mark = _marks(status)
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


def _digest(path: str, status: os.stat_result) -> str:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a path of any bytes
        digest = digest_unchanged(file.fileno(), status, LIKE)
    if digest is None:
        raise changed(Path(path), HINT)
    return digest


def digest_unchanged(descriptor: int, status: os.stat_result, like: str = "") -> str | None:
    """Return the digest of an open file; None if the file is no longer as `status` says."""
    digest, after = digest_of_file(descriptor, like), os.fstat(descriptor)
    return digest if _marks(status) == _marks(after) else None


def _marks(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _load(memory: Path) -> dict[str, list[Any]]:
    try:
        found = json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = found.items() if isinstance(found, dict) else ()
    return {path: marks for path, marks in known if isinstance(marks, list) and marks and isinstance(marks[-1], str)}
