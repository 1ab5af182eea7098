"""Changing an inventory file: locked, validated, protected, recorded, whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpurun.documents.problems import DocumentError
from gpurun.inventory import write
from gpurun.inventory.history import Author, History, RecordedChange, diff
from gpurun.inventory.leased import LeaseView, NoLeases, protected
from gpurun.inventory.load import parse, read
from gpurun.inventory.model import Inventory

Rewrite = Callable[[bytes], bytes]
"""From what the file says to what it shall say. May run twice: it is given the latest text each time."""


@dataclass(frozen=True)
class Preview:
    """What a change would do, if the file stays as it is until then."""

    before: bytes
    after: bytes
    diff: str


class Conflict(Exception):
    """The file is not what it was when the change was shown. Carries what the change would do now."""

    def __init__(self, preview: Preview) -> None:
        super().__init__("the inventory was changed meanwhile")
        self.preview = preview


class InventoryFile:
    """One inventory file and its history."""

    def __init__(self, path: Path, home: Path, leases: LeaseView | None = None) -> None:
        """`home` is the state directory, where the history is kept; it is made if need be."""
        self.path = path
        self.history = History(home, path)
        self._leases = leases or NoLeases()

    def preview(self, rewrite: Rewrite) -> Preview:
        """What a change would do now; nothing is locked or written.

        Raises what `rewrite` raises, DocumentError if the result is not valid, StateError if a lease forbids it.
        """
        before = read(self.path)
        return self._preview(before, rewrite)

    def _preview(self, before: bytes, rewrite: Rewrite) -> Preview:
        after = rewrite(before)
        if after != before:
            with protected(self._parsed(before), parse(after, self.path), self._leases):
                pass
        return Preview(before, after, diff(before, after, self.path.name))

    def _parsed(self, data: bytes) -> Inventory | None:
        try:
            return parse(data, self.path)
        except DocumentError:
            return None

    def commit(
        self, rewrite: Rewrite, author: Author, *, shown: Preview | None = None, agreed: bool = False
    ) -> RecordedChange | None:
        """Makes a change. Returns None if there is nothing to change.

        Args:
            shown: what the change would do, when that was looked at; saves working it out again.
            agreed: whatever the change does by now is agreed to, also if it is not what was shown.
        Raises what `preview` raises. Conflict: the change would now do something else than what was shown.
        """
        with write.locked(self.path) as real:
            before = self._caught_up(real, author)
            same = shown is not None and shown.before == before
            now = shown if same and shown is not None else self._preview(before, rewrite)
            return self._commit(real, now, author, None if agreed else shown)

    def _caught_up(self, real: Path, author: Author) -> bytes:
        before = read(real)
        self.history.catch_up(before, author)
        return before

    def _commit(
        self, real: Path, now: Preview, author: Author, shown: Preview | None, undoes: int | None = None
    ) -> RecordedChange | None:
        if now.after == now.before:
            return None
        if shown is not None and _lines(shown.diff) != _lines(now.diff):
            raise Conflict(now)
        with protected(self._parsed(now.before), parse(now.after, self.path), self._leases):
            change = self.history.record(now.before, now.after, author, undoes)
            write.replace(real, now.after)
        return change

    def create(self, data: bytes, author: Author) -> RecordedChange:
        """Makes the file, which must not exist. Raises FileExistsError, DocumentError."""
        parse(data, self.path)
        with write.locked(self.path) as real:
            if real.exists():
                raise FileExistsError(real)
            change = self.history.record(None, data, author)
            write.replace(real, data)
            return change

    def undo(self, author: Author, *, shown: Preview | None = None, agreed: bool = False) -> RecordedChange | None:
        """Takes back the latest change that is not taken back yet. Raises as `commit`, BadInput if none is left."""
        with write.locked(self.path) as real:
            before = self._caught_up(real, author)
            target = self.history.to_undo()
            return self._commit(
                real, self._preview(before, self._back(target)), author, None if agreed else shown, target.number
            )

    def preview_undo(self, author: Author) -> tuple[RecordedChange, Preview]:
        """The change that `undo` would take back, and what that would do."""
        with write.locked(self.path) as real:
            before = self._caught_up(real, author)
            target = self.history.to_undo()
            return target, self._preview(before, self._back(target))

    def _back(self, target: RecordedChange) -> Rewrite:
        assert target.before is not None  # to_undo gives no others
        old = self.history.text(target.before)
        return lambda _: old


def _lines(text: str) -> list[str]:
    """The lines that come and go, wherever they stand."""
    return [line for line in text.splitlines() if line[:1] in "+-"]
