"""Every change of an inventory file: who, when, by which command, and both texts, so that it can be undone.

One folder a file. ``000012.json`` is a change, ``texts/SHA256`` what the file said before or after one. A change
is recorded before the file is replaced: one that crashed in between is found by its texts and dropped. What
somebody changed by hand is recorded when it is noticed, so that the record has no holes. Who may read the file may read
its history: it has the file's mode and group, whatever the umask of who changes it.

Members of a shared state directory can all write in the folder of histories, also those who may not change the file. So
no link is followed there, and a record counts only if its owner may change the file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

import msgspec

from gpurun.errors import BadInput, StateError
from gpurun.inventory.load import MAX_BYTES
from gpurun.msgspec_types import ready
from gpurun.state import durable
from gpurun.state.path import StatePath

KEPT_CHANGES = 1000
MAX_RECORD_BYTES = 8 * MAX_BYTES
"""A diff holds both texts, and JSON may write a character as six."""
BY_HAND = "changed without gpurun"


@dataclass(frozen=True)
class RecordedChange:
    """One change.

    Attributes:
        when_s: seconds since the epoch; of a change by hand, when it was noticed.
        before: SHA-256 of the file before, in hexadecimal; None = there was no file.
        diff: unified, both texts' lines as they are.
        undoes: the change that this one took back.
    """

    number: int
    when_s: float
    who: str
    command: str
    before: str | None
    after: str
    diff: str
    undoes: int | None = None


@dataclass(frozen=True)
class Author:
    """Who changes an inventory, and how."""

    who: str
    command: str
    when_s: float


class History:
    """The changes of one inventory file. Only used while that file is locked; reading needs no lock."""

    def __init__(self, home: Path, inventory: Path) -> None:
        real = os.path.realpath(inventory)
        self._inventory = Path(real)
        self.folder = StatePath(home) / "inventory" / hashlib.sha256(os.fsencode(real)).hexdigest()[:16]

    def changes(self) -> tuple[RecordedChange, ...]:
        """All changes, the oldest first. Raises StateError naming a damaged record."""
        writers = self._writers()
        found = []
        for path in self._records():
            try:
                with path.reader() as stream:
                    if writers is not None and os.fstat(stream.fileno()).st_uid not in writers:
                        continue
                    found.append(msgspec.json.decode(stream.read(MAX_RECORD_BYTES + 1), type=ready(RecordedChange)))
            except FileNotFoundError:
                continue  # forgotten meanwhile
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise StateError(f"is not a readable change: {error}", where=str(path)) from error
        return tuple(found)

    def _writers(self) -> tuple[int, ...] | None:
        """Who may change the file: its owner and root; None if its group or everybody may."""
        try:
            found = [path.stat() for path in (self._inventory, self._inventory.parent)]
        except OSError:
            return None  # there is no file, so there is nothing that a record could undo
        if any(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not _is_sticky(status) for status in found):
            return None
        return (0, *(status.st_uid for status in found))

    def text(self, digest: str) -> bytes:
        """What a file said. Raises StateError if that is not kept any more, or damaged."""
        path = self.folder / "texts" / digest
        try:
            with path.reader() as stream:
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise StateError(f"cannot read the text of that change: {error.strerror}", where=str(path)) from error
        if _digest(data) != digest:
            raise StateError("the text of that change is damaged", where=str(path))
        return data

    def catch_up(self, now: bytes | None, author: Author) -> None:
        """Brings the record to what the file says now: drops a change that crashed, notes one made by hand."""
        changes = self.changes()
        if not changes or now is None:
            return
        last, digest = changes[-1], _digest(now)
        if last.after == digest:
            return
        if last.before == digest:
            self._record(last.number).unlink()
            return
        self.record(self.text(last.after), now, Author("?", BY_HAND, author.when_s))

    def record(self, before: bytes | None, after: bytes, author: Author, undoes: int | None = None) -> RecordedChange:
        """Notes a change that is about to be made."""
        numbers = [int(path.name.removesuffix(".json")) for path in self._records()]
        change = RecordedChange(
            number=max(numbers, default=0) + 1,
            when_s=author.when_s,
            who=author.who,
            command=author.command,
            before=None if before is None else self._keep(before),
            after=self._keep(after),
            diff=diff(before or b"", after, self._inventory.name),
            undoes=undoes,
        )
        self._write(self._record(change.number), msgspec.json.format(msgspec.json.encode(change), indent=1))
        self._forget(numbers)
        return change

    def to_undo(self) -> RecordedChange:
        """The latest change that is neither undone nor an undoing. Raises BadInput if there is none."""
        undone: set[int | None] = set()
        for change in reversed(self.changes()):
            undone.add(change.undoes)
            if change.undoes is None and change.number not in undone and change.before is not None:
                return change
        raise BadInput("there is no change to undo", hint="gpurun inventory diff --all lists the changes")

    def _records(self) -> Sequence[StatePath]:
        try:
            names = self.folder.names()
        except FileNotFoundError:
            return []
        return [self.folder / name for name in sorted(names) if name.endswith(".json") and name[:-5].isdigit()]

    def _record(self, number: int) -> StatePath:
        return self.folder / f"{number:06}.json"

    def _keep(self, data: bytes) -> str:
        digest = _digest(data)
        path = self.folder / "texts" / digest
        if not path.exists():
            self._write(path, data)
        return digest

    def _write(self, path: StatePath, data: bytes) -> None:
        """Write a file that whoever may read the inventory may read."""
        _make(path.parent)
        try:
            like = self._inventory.stat()
        except FileNotFoundError:
            like = None
        durable.write_bytes(path, data, like=like)

    def _forget(self, numbers: Sequence[int]) -> None:
        """Removes the oldest changes, and the texts that only they need."""
        old = sorted(numbers)[: -KEPT_CHANGES or None] if len(numbers) > KEPT_CHANGES else []
        for number in old:
            self._record(number).unlink(missing_ok=True)
        if old:
            needed = {digest for change in self.changes() for digest in (change.before, change.after)}
            texts = self.folder / "texts"
            for name in texts.names():
                if name not in needed:
                    (texts / name).unlink(missing_ok=True)


def _is_sticky(status: os.stat_result) -> bool:
    """Whether it is a folder in which only a file's owner can replace the file."""
    return stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def _make(folder: StatePath) -> None:
    """A new folder is as open to the group as the one it is in: several users may share a history."""
    if not folder.parts or folder.is_dir():
        durable.make_folder(folder)
        return
    _make(folder.parent)
    durable.make_folder(folder)
    if folder.parent.stat().st_mode & stat.S_IWGRP:
        descriptor = folder.open_folder()
        try:
            with suppress(PermissionError):  # another user has just made it, and opens it
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | stat.S_IRWXG)
        finally:
            os.close(descriptor)


def diff(before: bytes, after: bytes, name: str) -> str:
    """A unified diff of two texts."""
    old, new = (data.decode("utf-8", "replace").splitlines(keepends=True) for data in (before, after))
    lines = unified_diff(old, new, f"{name} (before)", f"{name} (after)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
