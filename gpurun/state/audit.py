"""The audit log: ``audit.jsonl`` in the state directory, one appended line for each action.

It records who submitted, cancelled, granted, preempted, ended or adopted a job, cordoned a host, discarded a damaged
lease, or changed the inventory. It leaves out words of the command line that may be secret. A line is one ``write`` to
a file opened for appending, so lines of several processes never mix. Lines are not synced, so a power loss may lose the
last ones.

At 10 MiB gpurun renames the file to ``audit.1.jsonl``, dropping the earlier one, and begins a new file. In a shared
state directory only its owner (root) can do so, at every `gpurun recover`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpurun.errors import StateError
from gpurun.state import durable, locks
from gpurun.state.paths import StatePath, command_name, myself
from gpurun.state.sharing import StateDirectory, append_only

MAX_BYTES = 10 << 20
MAX_COMMAND_CHARS = 1000
MAX_LINE_BYTES = 1 << 20
SECRET_NAME = re.compile(r"token|secret|passw|key|credential|auth", re.IGNORECASE)
ENV_FLAGS = ("-e", "--env")


@dataclass(frozen=True)
class AuditLog:
    """The audit log of a state directory."""

    home: Path

    def file(self) -> StatePath:
        """Where it is kept."""
        return StatePath(self.home) / "audit.jsonl"

    def older_file(self) -> StatePath:
        """Where the lines before those in `file` are."""
        return StatePath(self.home) / "audit.1.jsonl"

    def note(self, what: str, *, job: str | None = None, **fields: object) -> None:
        """Append one line; `fields` must be JSON values. Ignores a failed write."""
        entry = {
            "time_s": round(time.time(), 3),
            "what": what,
            "user": myself(),
            "uid": os.getuid(),
            "sudo_user": os.environ.get("SUDO_USER"),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "command": without_secrets(sys.argv),
            "job": job,
            **fields,
        }
        line = json.dumps({key: value for key, value in entry.items() if value is not None})
        with suppress(FileNotFoundError, StateError):
            durable.append_line(self.file(), line)
            if self.file().stat().st_size >= MAX_BYTES:
                self.bound()

    def bound(self) -> None:
        """Begin a new file if this one is full, and this user may. A process that has the old file open appends to the
        old one.

        Both names exist at every moment, because members of a shared directory's group could not create the file.
        """
        path = self.file()
        with suppress(OSError, StateError):
            descriptor = path.open_file(os.O_WRONLY | os.O_APPEND)
            try:
                found = os.fstat(descriptor)
                may = os.getuid() in (0, self.home.stat().st_uid)
                if not may or found.st_size < MAX_BYTES or not locks.try_take(descriptor):
                    return
                if os.path.samestat(found, path.stat()):  # no other process has replaced it
                    self._begin_anew(found)
            finally:
                os.close(descriptor)

    def _begin_anew(self, found: os.stat_result) -> None:
        """Replace the file by an empty one that is like it."""
        path, older, new = self.file(), self.older_file(), StatePath(self.home) / ".audit.tmp"
        only_grows = append_only(path, on=False)  # else not even root may give it another name
        append_only(older, on=False)
        new.unlink(missing_ok=True)  # of one that was killed: the lock is held
        try:
            made = new.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.fchown(made, found.st_uid, found.st_gid)
                os.fchmod(made, stat.S_IMODE(found.st_mode))
            finally:
                os.close(made)
            older.unlink(missing_ok=True)
            path.link(older)
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)
            if only_grows and StateDirectory(self.home).is_shared():
                append_only(older, on=True)
                append_only(path, on=True)

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Every entry, oldest first; a line that is damaged comes as ``{"what": "damaged", "text": …}``.

        Raises:
            StateError: what lies there is no file, or cannot be read.
        """
        with ExitStack() as stack:
            streams: list[BinaryIO] = []
            for path in (self.file(), self.older_file()):
                with suppress(FileNotFoundError):
                    stream = stack.enter_context(path.reader())
                    if not any(os.path.sameopenfile(stream.fileno(), other.fileno()) for other in streams):
                        streams.insert(0, stream)  # for a moment, both names are those of one file
            for stream in streams:
                while line := stream.readline(MAX_LINE_BYTES):
                    if line.strip():  # else it parts a line from one that seemed torn
                        yield _entry(line)


def _entry(line: bytes) -> Mapping[str, Any]:
    text = line.decode("utf-8", "replace")
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    return entry if isinstance(entry, dict) else {"what": "damaged", "text": text.rstrip("\n")}


def without_secrets(argv: Sequence[str]) -> str:
    """Return a command line for others to read, with ``***`` for what may be secret.

    That is the value of every ``-e`` and of every flag or setting with a name that suggests a secret, passwords in
    URLs, and all arguments of a user's own program (after ``--``), of which only the name is kept.
    """
    words = [command_name(argv[:1]), *argv[1:]]
    program: list[str] = []
    if "--" in words:
        at = words.index("--")
        program = ["--", *words[at + 1 : at + 2], *(["…"] if len(words) > at + 2 else [])]
        words = words[:at]
    shown, previous = [], ""
    for word in words:
        shown.append(_masked(word, previous))
        previous = word
    return " ".join([*shown, *program])[:MAX_COMMAND_CHARS]


def _masked(word: str, previous: str) -> str:
    name, equals, value = word.partition("=")
    if name == "--env" and equals:
        return f"--env={value.partition('=')[0]}=***"
    if previous in ENV_FLAGS or (equals and (name.startswith("-e") or SECRET_NAME.search(name))):
        return f"{name}=***"
    if previous.startswith("--") and "=" not in previous and SECRET_NAME.search(previous):
        return "***"
    return re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1:***@", word)
