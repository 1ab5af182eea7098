"""Answers of ``ssh -G``, kept in memory and in the user's own cache for as long as what decides them stays the same.

What decides them: the files that ``ssh`` read, the files that patterns of ``Include`` name, environment variables that
these files mention, who asks, the machine's name, and the program ``ssh``. gpurun looks at their state, not at their
meaning. An answer that depends on more is not kept: ``ssh`` is asked every time.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pwd
import re
import shlex
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.errors import BadInput
from gpurun.msgspec_types import ready
from gpurun.remote import openssh
from gpurun.remote.openssh import ConfigAnswer, Options, Question
from gpurun.state import own_cache

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
MAX_FILE_BYTES = 4 * 1024 * 1024
_INCLUDE = re.compile(r'^[ \t\f"]*include"?[ \t\f=]+(.*)$', re.MULTILINE | re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{?(\w+)")


@dataclass(frozen=True)
class Sources:
    """What decides the answers about one configuration, besides the question."""

    files: tuple[str, ...]
    patterns: tuple[str, ...]
    variables: tuple[str, ...]

    def state(self) -> tuple[str, int]:
        """A digest that changes with them, and when the last of the files changed (ns)."""
        matches = [sorted(_glob(pattern)) for pattern in self.patterns]
        statuses = [_status(file) for file in (shutil.which("ssh") or "", *self.files)]
        values = [os.environ.get(name) for name in ("HOME", *self.variables)]
        found = (matches, statuses, values, os.getuid(), _person(), socket.gethostname())
        changed_ns = max((part[-1] for status in statuses for part in status), default=0)
        return hashlib.sha256(repr(found).encode(errors="surrogatepass")).hexdigest(), changed_ns


@dataclass(frozen=True)
class _Kept:
    """Answers about one configuration; `code` is the gpurun that kept them."""

    config: str | None
    code: str
    sources: Sources
    state: str
    texts: Mapping[bytes, bytes]


_in_memory: dict[str | None, _Kept] = {}


def answers(questions: Collection[Question]) -> Mapping[Question, Options | BadInput]:
    """What ``ssh -G`` says to each question. Starts no process for an answer that is kept and still holds."""
    found: dict[Question, Options | BadInput] = {}
    for config in {question.config for question in questions}:
        found.update(_answers([question for question in questions if question.config == config], config))
    return found


def _answers(questions: Collection[Question], config: str | None) -> Mapping[Question, Options | BadInput]:
    kept = _still_true(_in_memory.get(config)) or _still_true(_from_disk(config))
    texts = kept.texts if kept else {}
    missing = [question for question in questions if _key(question) not in texts]
    asked: Mapping[Question, ConfigAnswer | BadInput] = {}
    if missing:
        began_ns = time.time_ns()
        asked = openssh.ask_all(missing)
        kept = _with(kept, config, asked, began_ns) or kept
    if kept is not None:
        _in_memory[config] = kept
    found: dict[Question, Options | BadInput] = {}
    for question in questions:
        answer = asked.get(question)
        text = answer.text if isinstance(answer, ConfigAnswer) else texts.get(_key(question), b"")
        found[question] = answer if isinstance(answer, BadInput) else openssh.options(text)
    return found


def _key(question: Question) -> bytes:
    return os.fsencode("\0".join(question.arguments()))


def _still_true(kept: _Kept | None) -> _Kept | None:
    return kept if kept is not None and kept.sources.state()[0] == kept.state else None


def _with(
    kept: _Kept | None, config: str | None, asked: Mapping[Question, ConfigAnswer | BadInput], began_ns: int
) -> _Kept | None:
    """What is kept, with the answers that can be; None if there is nothing to add."""
    answered = {question: answer for question, answer in asked.items() if isinstance(answer, ConfigAnswer)}
    first = next(iter(answered.values()), None)
    sources = _sources(config, first) if first is not None else None
    if first is None or sources is None:
        return None
    state, changed_ns = sources.state()
    new = {
        _key(question): answer.text
        for question, answer in answered.items()
        if answer.repeatable and (answer.read, answer.unmatched) == (first.read, first.unmatched)
    }
    # A file that changed since, or just before, may have been read as it was.
    if not new or not own_cache.is_settled(changed_ns, began_ns):
        return None
    same = kept is not None and (kept.sources, kept.state) == (sources, state)
    whole = _Kept(config, _code(), sources, state, {**(kept.texts if kept and same else {}), **new})
    place = _place(config)
    with suppress(UnicodeEncodeError):  # a file's name that is not UTF-8 stays in memory
        if place is not None:
            own_cache.keep(place, msgspec.msgpack.encode(whole))
    return whole


def _from_disk(config: str | None) -> _Kept | None:
    place = _place(config)
    payload = own_cache.read(place) if place is not None else None
    try:
        kept = msgspec.msgpack.decode(payload or b"", type=ready(_Kept))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return kept if (kept.config, kept.code) == (config, _code()) else None


def _place(config: str | None) -> Path | None:
    folder = own_cache.folder(os.environ, "ssh")
    return own_cache.place(folder, config or "") if folder is not None else None


def _code() -> str:
    return own_cache.code_stamp(Path(__file__).parent)


def _sources(config: str | None, answer: ConfigAnswer) -> Sources | None:
    """What decided an answer. None if gpurun does not find the very files that ``ssh`` read, or cannot watch them."""
    waiting = [config] if config else [f"{_person()[1]}/.ssh/config", SYSTEM_CONFIG]
    files: dict[str, None] = {}
    read, patterns, unmatched, variables = set[str](), dict[str, None](), set[str](), set[str]()
    while waiting:
        file = waiting.pop()
        if file in files:
            continue
        files[file] = None
        try:
            text = _text(file)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        read.add(file)
        included = _patterns(text, "/etc/ssh" if file.startswith("/etc/ssh/") else "~/.ssh")
        if included is None or "localnetwork" in text.lower():
            return None
        for pattern in included:
            patterns[pattern] = None
            named = _glob(pattern)
            waiting += named
            unmatched.update([] if named else [pattern])
        variables.update(_VARIABLE.findall(text))
    if _normal(read) != _normal(answer.read) or _normal(unmatched) != _normal(answer.unmatched):
        return None
    return Sources(tuple(files), tuple(patterns), tuple(sorted(variables)))


def _text(file: str) -> str:
    """A regular file of bearable size. Raises OSError for any other."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise PermissionError(file)
        return opened.read(MAX_FILE_BYTES).decode(errors="surrogateescape")


def _patterns(text: str, base: str) -> list[str] | None:
    """What lines with ``Include`` name; None if only ``ssh`` can tell."""
    found: list[str] = []
    for line in _INCLUDE.findall(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            return None
        if any(letter in line for letter in "$%\\"):
            return None
        found += [word if word.startswith(("/", "~")) else f"{base}/{word}" for word in words]
    return found


def _glob(pattern: str) -> list[str]:
    return glob.glob(os.path.expanduser(pattern))  # noqa: PTH111, PTH207 - as glob(3) expands it


def _normal(paths: Iterable[str]) -> set[str]:
    return {os.path.normpath(path) for path in paths}


def _status(file: str) -> tuple[tuple[int, ...], ...]:
    """The states of a link and of the file it leads to."""
    try:
        both = os.lstat(file), os.stat(file)  # noqa: PTH116
    except (OSError, ValueError):
        return ()
    return tuple((s.st_dev, s.st_ino, s.st_mode, s.st_uid, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in both)


def _person() -> tuple[str, str]:
    """Name and home folder as ``ssh`` sees them, which does not look at ``$HOME``."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), "/"
    return entry.pw_name, entry.pw_dir
