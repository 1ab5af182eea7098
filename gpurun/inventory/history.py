"""The history of an inventory file: for each change the author, time, command, and both texts. Makes undo possible.

Each file has one folder. ``000012.json`` is a change; ``texts/SHA256`` is the file's content before or after a change.
gpurun records a change before it replaces the file. After a crash between the two steps, gpurun finds the unfinished
change by its texts and removes it. gpurun also records a change by hand when it notices one, so that the history has no
gaps. The history has the file's mode and group, whatever the umask of the author: everyone who can read the file can
read its history.

All members of a shared state directory can write in the folder of histories, even those who cannot change the file. So
gpurun follows no links there, and accepts a record only if its owner can change the file.
"""

from __future__ import annotations

import hashlib
import os
import re
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
"""A diff holds both texts, and JSON can encode one character as six."""
BY_HAND = "changed without gpurun"
_RECORD = re.compile(r"\d{6,9}\.json", re.ASCII)


@dataclass(frozen=True)
class RecordedChange:
    """One change.

    Attributes:
        when_s: seconds since the epoch; for a change by hand, the time when gpurun noticed it.
        before: SHA-256 of the old content, in hexadecimal; None = there was no file.
        diff: unified diff; the lines of both texts are unchanged.
        undoes: number of the change that this change undoes.
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
class RecordedImport(RecordedChange):
    """One change, as its record has it.

    Attributes:
        source: the file that this change imported; None = it is no import.
        said: SHA-256 of what that file said, for the next import.
    """

    source: str | None = None
    said: str | None = None


@dataclass(frozen=True)
class Imported:
    """What a change imported: the file, and what it said, as `gpurun.inventory.imports.again` reads it."""

    source: str
    said: bytes


@dataclass(frozen=True)
class Author:
    """The author of a change, with the command and the time."""

    who: str
    command: str
    when_s: float


class History:
    """The changes of one inventory file. A writer must hold the file's lock; a reader needs no lock."""

    def __init__(self, home: Path, inventory: Path) -> None:
        real = os.path.realpath(inventory)
        self._inventory = Path(real)
        self.folder = StatePath(home) / "inventory" / hashlib.sha256(os.fsencode(real)).hexdigest()[:16]

    def changes(self) -> tuple[RecordedImport, ...]:
        """Return all changes, oldest first. Raises StateError with the path of a damaged record."""
        writers = self._writers()
        found = []
        for path in self._records():
            try:
                if writers is not None and path.stat().st_uid not in writers:
                    continue  # anything, such as a link or a folder
                with path.reader() as stream:
                    if writers is not None and os.fstat(stream.fileno()).st_uid not in writers:
                        continue
                    change = msgspec.json.decode(stream.read(MAX_RECORD_BYTES + 1), type=ready(RecordedImport))
            except FileNotFoundError:
                continue  # another process has just removed it
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise StateError(
                    f"gpurun cannot read the recorded change of the inventory: {error}", where=str(path)
                ) from error
            if path.name == self._record(change.number).name:  # else a member has renamed it
                found.append(change)
        return tuple(found)

    def _writers(self) -> tuple[int, ...] | None:
        """Return the users who can change the file: its owner and root; None if its group or everybody can."""
        try:
            found = [path.stat() for path in (self._inventory, self._inventory.parent)]
        except OSError:
            return None  # no file, so a record has nothing to undo
        if any(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not _is_sticky(status) for status in found):
            return None
        return (0, *(status.st_uid for status in found))

    def text(self, digest: str) -> bytes:
        """Return a recorded content. Raises StateError if it is damaged or no longer kept."""
        path = self.folder / "texts" / digest
        try:
            with path.reader() as stream:
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise StateError(
                f"cannot read the recorded text of the inventory: {error.strerror}", where=str(path)
            ) from error
        if _digest(data) != digest:
            raise StateError("the recorded text of the inventory is damaged", where=str(path))
        return data

    def catch_up(self, now: bytes | None, author: Author) -> None:
        """Update the history from the file's content: remove an unfinished change, record a change by hand."""
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

    def record(
        self,
        before: bytes | None,
        after: bytes,
        author: Author,
        undoes: int | None = None,
        imported: Imported | None = None,
    ) -> RecordedChange:
        """Record a change before the caller makes it."""
        numbers = [change.number for change in self.changes()]
        change = RecordedImport(
            number=self._free_number(numbers),
            when_s=author.when_s,
            who=author.who,
            command=author.command,
            before=None if before is None else self._keep(before),
            after=self._keep(after),
            diff=diff(before or b"", after, self._inventory.name),
            undoes=undoes,
            source=None if imported is None else imported.source,
            said=None if imported is None else self._keep(imported.said),
        )
        self._write(self._record(change.number), msgspec.json.format(msgspec.json.encode(change), indent=1))
        self._forget(numbers)
        return change

    def _free_number(self, numbers: Sequence[int]) -> int:
        """Return a number after these, skipping those for which a member has put something into the folder."""
        number = max(numbers, default=0) + 1
        while self._record(number).exists():
            number += 1
        return number

    def to_undo(self) -> RecordedChange:
        """Return the latest change that is neither undone nor an undo. Raises BadInput if there is none."""
        undone: set[int | None] = set()
        for change in reversed(self.changes()):
            undone.add(change.undoes)
            is_change = change.before not in (None, change.after)
            if change.undoes is None and change.number not in undone and is_change:
                return change
        raise BadInput("there is no change to undo", hint="`gpurun inventory diff --all` lists the changes")

    def last_said(self, source: str) -> bytes | None:
        """Return what a file said when it was last imported, unless that was undone; None if that is not known."""
        changes = self.changes()
        undone = {change.undoes for change in changes}
        for change in reversed(changes):
            if change.source == source and change.number not in undone and change.said is not None:
                with suppress(StateError):
                    return self.text(change.said)
        return None

    def _records(self) -> Sequence[StatePath]:
        try:
            names = self.folder.names()
        except FileNotFoundError:
            return []
        return [self.folder / name for name in sorted(names) if _RECORD.fullmatch(name)]

    def _record(self, number: int) -> StatePath:
        return self.folder / f"{number:06}.json"

    def _keep(self, data: bytes) -> str:
        digest = _digest(data)
        path = self.folder / "texts" / digest
        if not path.exists():
            self._write(path, data)
        return digest

    def _write(self, path: StatePath, data: bytes) -> None:
        """Write a file with the mode and owner of the inventory."""
        _make(path.parent)
        try:
            like = self._inventory.stat()
        except FileNotFoundError:
            like = None
        durable.write_bytes(path, data, like=like)

    def _forget(self, numbers: Sequence[int]) -> None:
        """Remove the oldest changes, and the texts that only they need."""
        old = sorted(numbers)[: -KEPT_CHANGES or None] if len(numbers) > KEPT_CHANGES else []
        for number in old:
            self._record(number).unlink(missing_ok=True)
        if old:
            needed = {digest for change in self.changes() for digest in (change.before, change.after, change.said)}
            texts = self.folder / "texts"
            for name in texts.names():
                if name not in needed:
                    (texts / name).unlink(missing_ok=True)


def _is_sticky(status: os.stat_result) -> bool:
    """Return True for a folder in which only a file's owner can replace the file."""
    return stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def _make(folder: StatePath) -> None:
    """Create a folder. The group may write in it if it may write in the parent: several users may share a history."""
    if not folder.parts or folder.is_dir():
        durable.make_folder(folder)
        return
    _make(folder.parent)
    durable.make_folder(folder)
    if folder.parent.stat().st_mode & stat.S_IWGRP:
        descriptor = folder.open_folder()
        try:
            with suppress(PermissionError):  # another user has just created it, and sets its mode
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | stat.S_IRWXG)
        finally:
            os.close(descriptor)


def diff(before: bytes, after: bytes, name: str) -> str:
    """Return a unified diff of two texts."""
    old, new = (data.decode("utf-8", "replace").splitlines(keepends=True) for data in (before, after))
    lines = unified_diff(old, new, f"{name} (before)", f"{name} (after)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
