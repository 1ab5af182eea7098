"""Change an inventory file: take the lock, validate, protect running jobs, record the change, replace the file."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Protocol

import msgspec

from gpurun.documents.plain import DocumentError
from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import MAX_BYTES, parse_inventory, read_inventory_bytes
from gpurun.msgspec_types import ready
from gpurun.quantities import plural
from gpurun.state import durable, locks
from gpurun.state.durable import sync_plain_folder
from gpurun.state.paths import StatePath

# Write a file that a user owns: one writer at a time; a crash leaves the old file or the new file.


_STALE, _LOCK = ".gpurun-", ".gpurun.lock"
PATIENCE_S = 60.0
"""Another change may check many leases. Everybody who may write in the folder can hold the lock."""


@contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Hold the lock for changes of a file; yields the file behind any symbolic links.

    The lock is on a hidden file in the same folder, because the writer replaces the file itself. The hidden file is
    removed afterwards, and so are the files of a writer that crashed.

    Raises:
        BadInput: the folder does not exist, or is not writable.
        StateUnavailable: somebody has held the lock for longer than `PATIENCE_S`.
    """
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{real.name}{_LOCK}")
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.alone(beside, mode=0o666, remove=True, patience_s=PATIENCE_S))
        except TimeoutError as error:
            raise StateUnavailable(
                f"gpurun cannot change the file: {error.strerror}", where=str(path),
                hint=f"run `fuser -v {beside}` as root to find the process that holds the lock. "
                "Kill the process, or resume the process if it is stopped (state T)",
            ) from error  # fmt: skip
        except OSError as error:
            raise BadInput(f"gpurun cannot change the file: {error.strerror}", where=str(path)) from error
        for left in real.parent.glob(f".{_escaped(real.name)}{_STALE}*"):
            with suppress(OSError):
                left.unlink()
        yield real


def replace(path: Path, data: bytes) -> None:
    """Replace a file's content: complete, durable, with the same permissions and owner.

    Raises BadInput if the file cannot be written; then it is unchanged.
    """
    temporary = path.with_name(f".{path.name}{_STALE}{secrets.token_hex(8)}")
    try:
        _write_new(temporary, data, path)
        temporary.replace(path)
        sync_plain_folder(path.parent)
    except OSError as error:
        raise BadInput(f"gpurun cannot write the file: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_new(temporary: Path, data: bytes, path: Path) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with suppress(FileNotFoundError):
            durable.make_like(descriptor, path.stat())
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


# Protect the settings of hosts on which running jobs depend.


RELIED_ON = ("gpus", "generation", "user", "address", "port", "fabric_address", "docker_host", "folder")


JobsByMachine = Mapping[str, Sequence[str]]
"""`gpurun.inventory.model.Host.machine` → ids of the jobs that hold GPUs there."""


class LeaseView(Protocol):
    """The jobs that hold GPUs, as far as an edit of the inventory needs them."""

    def frozen(self) -> AbstractContextManager[JobsByMachine]:
        """Return the jobs of each machine; while the context is open, no job gets more GPUs.

        Raises StateError if the jobs are unknown. Then gpurun refuses every change on which a job may depend.
        """


class NoLeases:
    """No job holds GPUs."""

    def frozen(self) -> AbstractContextManager[JobsByMachine]:
        """See LeaseView."""
        return nullcontext({})


@contextmanager
def protected(before: Inventory | None, after: Inventory, leases: LeaseView) -> Iterator[None]:
    """While the context is open, the caller may replace `before` by `after`: no job depends on the difference.

    Args:
        before: None = the old file is unreadable, so that only the leases are known.
    Raises StateError, with the host and its jobs, if a leased host is missing or a setting that its jobs need changes.
    """
    if before is not None and _relied_on(before) == _relied_on(after):
        yield
        return
    with leases.frozen() as jobs_by_machine:
        if before is None:
            _refuse_loss(jobs_by_machine, after)
        else:
            _refuse_change(jobs_by_machine, before, after)
        yield


def _refuse_change(jobs_by_machine: JobsByMachine, before: Inventory, after: Inventory) -> None:
    for host in before.hosts:
        changed = _changed(before, after, host.name) if host.machine in jobs_by_machine else ""
        if changed:
            raise StateError(
                f"you cannot {changed} now: {_running(jobs_by_machine[host.machine])} on the host",
                host=host.name,
                hint=f"run `gpurun inventory drain {host.name} --wait`, then repeat the change",
            )


def _refuse_loss(jobs_by_machine: JobsByMachine, after: Inventory) -> None:
    """Check a replacement of an unreadable inventory: it must contain at least every machine that jobs hold."""
    there = {host.machine for host in after.hosts}
    for machine, jobs in jobs_by_machine.items():
        if machine not in there:
            raise StateError(
                f"{_running(jobs)} on {machine}, but the new inventory does not contain the host", where=after.source,
                hint="cancel the jobs first, or correct the file by hand; `gpurun inventory validate` checks the file",
            )  # fmt: skip


def _running(jobs: Sequence[str]) -> str:
    return f"{' and '.join(jobs)} {plural(len(jobs), 'runs', 'run')}"


def _relied_on(inventory: Inventory) -> object:
    hosts = [(host.name, *(getattr(host, field) for field in RELIED_ON), host.fabric) for host in inventory.hosts]
    return sorted(hosts, key=lambda host: host[0]), inventory.fabrics, inventory.ssh_config


def _changed(before: Inventory, after: Inventory, name: str) -> str:
    """Return the first change on which jobs of a host depend, in words; an empty string if there is none."""
    new = after.by_name.get(name)
    if new is None:
        return "remove the host"
    old = before.by_name[name]
    for field in RELIED_ON:
        if getattr(old, field) != getattr(new, field):
            return f"change {field}"
    if before.fabric_of(old) != after.fabric_of(new):
        return "change the fabric"
    if before.ssh_config != after.ssh_config:
        return "change ssh_config"
    return ""


# The history of an inventory file: for each change the author, time, command, and both texts. Makes undo possible.


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
                    f"gpurun cannot read the recorded change of the inventory: {error}", where=str(path),
                    hint=_set_aside(path, "the other recorded changes stay"),
                ) from error  # fmt: skip
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
                f"cannot read the recorded text of the inventory: {error.strerror}", where=str(path),
                hint=_set_aside(self.folder, "gpurun then starts a new history of the inventory"),
            ) from error  # fmt: skip
        if _digest(data) != digest:
            raise StateError(
                "the recorded text of the inventory is damaged", where=str(path),
                hint=_set_aside(self.folder, "gpurun then starts a new history of the inventory"),
            )  # fmt: skip
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


def _set_aside(path: StatePath, result: str) -> str:
    """Return the hint for something damaged in a history."""
    damaged = shlex.quote(str(path))
    return f"move it away with `mv {damaged} {damaged}.damaged`; {result}"


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
        before = read_inventory_bytes(self.path)
        return self._preview(before, rewrite)

    def _preview(self, before: bytes, rewrite: Rewrite) -> Preview:
        after = rewrite(before)
        if after != before:
            with protected(self._parsed(before), parse_inventory(after, self.path), self._leases):
                pass
        return Preview(before, after, diff(before, after, self.path.name))

    def _parsed(self, data: bytes) -> Inventory | None:
        try:
            return parse_inventory(data, self.path)
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
        with locked(self.path) as real:
            before = self._caught_up(real, author)
            same = shown is not None and shown.before == before
            now = shown if same and shown is not None else self._preview(before, rewrite)
            told = None if imported is None else imported()
            return self._commit(real, now, author, None if agreed else shown, imported=told)

    def _caught_up(self, real: Path, author: Author) -> bytes:
        before = read_inventory_bytes(real)
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
        with protected(self._parsed(now.before), parse_inventory(now.after, self.path), self._leases):
            change = self.history.record(now.before, now.after, author, undoes, imported)
            replace(real, now.after)
        return change

    def create(self, data: bytes, author: Author, imported: Imported | None = None) -> RecordedChange:
        """Create the file, which must not exist. Raises FileExistsError, DocumentError."""
        parse_inventory(data, self.path)
        with locked(self.path) as real:
            if real.exists():
                raise FileExistsError(real)
            change = self.history.record(None, data, author, imported=imported)
            replace(real, data)
            return change

    def undo(self, author: Author, *, shown: Preview | None = None, agreed: bool = False) -> RecordedChange | None:
        """Undo the latest change that is not yet undone. Raises as `commit`; BadInput if there is none."""
        with locked(self.path) as real:
            before = self._caught_up(real, author)
            target = self.history.to_undo()
            return self._commit(
                real, self._preview(before, self._back(target)), author, None if agreed else shown, target.number
            )

    def preview_undo(self, author: Author) -> tuple[RecordedChange, Preview]:
        """Return the change that `undo` would undo, and the effect."""
        with locked(self.path) as real:
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
