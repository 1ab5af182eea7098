"""Find which files of a folder are code: those that git does not ignore. Source: gitignore(5).

Reads ``.gitignore`` in every folder up to the repository's root, and ``.git/info/exclude``. Never ignores tracked
files; always ignores ``.git`` itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


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


def parse(text: str, base: str) -> tuple[Rule, ...]:
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
        rules = [*parse(_text(repository / ".git/info/exclude"), "")]
        for depth in range(len(relative.parts)):
            folder = Path(*relative.parts[:depth])
            base = "" if depth == 0 else f"{folder}/"
            rules += parse(_text(repository / folder / ".gitignore"), base)
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
            rules = (*rules, *parse(_text(self._top / inside / ".gitignore"), self._prefix + inside))
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
        rules = (*rules, *parse(_text(folder / ".gitignore"), self._prefix + inside))
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
        return file.read_text(errors="surrogateescape")
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


parse = lru_cache(maxsize=512)(parse)
