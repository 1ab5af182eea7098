"""Change an inventory file: take the lock, validate, protect running jobs, record the change, replace the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpurun.documents.problems import DocumentError
from gpurun.inventory import write
from gpurun.inventory.history import Author, History, Imported, RecordedChange, diff
from gpurun.inventory.leased import LeaseView, NoLeases, protected
from gpurun.inventory.load import parse, read
from gpurun.inventory.model import Inventory

Rewrite = Callable[[bytes], bytes]
"""Converts the old content to the new content. May run twice: each run gets the latest content."""


@dataclass(frozen=True)
class Preview:
    """The effect of a change, if the file does not change first."""

    before: bytes
    after: bytes
    diff: str


class Conflict(Exception):
    """The file changed after the preview. Carries the change's present effect."""

    def __init__(self, preview: Preview) -> None:
        super().__init__("the inventory was changed meanwhile")
        self.preview = preview


class InventoryFile:
    """One inventory file and its history."""

    def __init__(self, path: Path, home: Path, leases: LeaseView | None = None) -> None:
        """`home` is the state directory, which holds the history. It is created if necessary."""
        self.path = path
        self.history = History(home, path)
        self._leases = leases or NoLeases()

    def preview(self, rewrite: Rewrite) -> Preview:
        """Return the present effect of a change, without a lock or a write.

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
        self,
        rewrite: Rewrite,
        author: Author,
        *,
        shown: Preview | None = None,
        agreed: bool = False,
        imported: Callable[[], Imported] | None = None,
    ) -> RecordedChange | None:
        """Make a change. Returns None if the content stays the same.

        Args:
            shown: the preview that the user saw; avoids a second computation.
            agreed: the user accepts the change, even if its effect differs from the preview.
            imported: returns what the latest call of `rewrite` imported, to record it with the change.
        Raises what `preview` raises. Conflict: the effect now differs from the preview.
        """
        with write.locked(self.path) as real:
            before = self._caught_up(real, author)
            same = shown is not None and shown.before == before
            now = shown if same and shown is not None else self._preview(before, rewrite)
            told = None if imported is None else imported()
            return self._commit(real, now, author, None if agreed else shown, imported=told)

    def _caught_up(self, real: Path, author: Author) -> bytes:
        before = read(real)
        self.history.catch_up(before, author)
        return before

    def _commit(
        self,
        real: Path,
        now: Preview,
        author: Author,
        shown: Preview | None,
        undoes: int | None = None,
        imported: Imported | None = None,
    ) -> RecordedChange | None:
        if now.after == now.before:
            if imported is not None and self.history.last_said(imported.source) != imported.said:
                self.history.record(now.before, now.after, author, imported=imported)
            return None
        if shown is not None and _lines(shown.diff) != _lines(now.diff):
            raise Conflict(now)
        with protected(self._parsed(now.before), parse(now.after, self.path), self._leases):
            change = self.history.record(now.before, now.after, author, undoes, imported)
            write.replace(real, now.after)
        return change

    def create(self, data: bytes, author: Author, imported: Imported | None = None) -> RecordedChange:
        """Create the file, which must not exist. Raises FileExistsError, DocumentError."""
        parse(data, self.path)
        with write.locked(self.path) as real:
            if real.exists():
                raise FileExistsError(real)
            change = self.history.record(None, data, author, imported=imported)
            write.replace(real, data)
            return change

    def undo(self, author: Author, *, shown: Preview | None = None, agreed: bool = False) -> RecordedChange | None:
        """Undo the latest change that is not yet undone. Raises as `commit`; BadInput if there is none."""
        with write.locked(self.path) as real:
            before = self._caught_up(real, author)
            target = self.history.to_undo()
            return self._commit(
                real, self._preview(before, self._back(target)), author, None if agreed else shown, target.number
            )

    def preview_undo(self, author: Author) -> tuple[RecordedChange, Preview]:
        """Return the change that `undo` would undo, and the effect."""
        with write.locked(self.path) as real:
            before = self._caught_up(real, author)
            target = self.history.to_undo()
            return target, self._preview(before, self._back(target))

    def _back(self, target: RecordedChange) -> Rewrite:
        assert target.before is not None  # to_undo returns no other changes
        old = self.history.text(target.before)
        return lambda _: old


def _lines(text: str) -> list[str]:
    """Return the added and removed lines of a diff, independent of their place."""
    return [line for line in text.splitlines() if line[:1] in "+-"]
