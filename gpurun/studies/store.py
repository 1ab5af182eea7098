"""The files of sweeps and campaigns: ``sweeps/ID`` and ``scaling/NAME`` in the state directory.

``plan.json`` and ``code`` (`gpurun.content.workdir`) are written once. ``journal`` has a line for each step of each
trial; only the holder of the folder's lock appends to it. Of a sweep, ``stop`` asks the conductor to end the sweep, and
says why if the sweep stopped itself; ``done`` marks an ended sweep. All files belong to the user who created them.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from gpurun import faults
from gpurun.errors import BadInput, StateError
from gpurun.jobs.folder import CODE
from gpurun.jobs.record import Living, meant
from gpurun.jobs.store import AddCode
from gpurun.msgspec_types import ready
from gpurun.state import durable, locks
from gpurun.state.caches import new_folder
from gpurun.state.durable import GrowingFile
from gpurun.state.locks import open_own_lock
from gpurun.state.paths import StatePath, state_error
from gpurun.studies.sweep_plan import SweepPlan, wrong_with
from gpurun.studies.trials import JournalEntry, Trials

DOOMED = ".doomed-"
MOST_LOG_BYTES = 1 << 20
PlanT = TypeVar("PlanT")


class StudyFolder(Generic[PlanT]):
    """The files of one sweep or campaign. Creating this object reads nothing.

    Attributes:
        lock: its holder carries the sweep or campaign.
    """

    kind: str
    plan_type: type[PlanT]
    entry_type: type[JournalEntry] = JournalEntry
    lock_name: str

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.id = path.name
        self.code = path / CODE
        self.journal = path / "journal"
        self.lock = path / self.lock_name

    def is_mine(self) -> bool:
        """Return whether only this user can have written it."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, StateError):
            return False
        return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def plan(self) -> PlanT:
        """Read the plan. Raises StateError if it is damaged or missing."""
        path = self.path / "plan.json"
        try:
            return durable.read_record(path, self.plan_type)
        except FileNotFoundError as error:
            raise StateError(f"the file with the plan of the {self.kind} is missing", where=str(path)) from error

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the complete lines of the journal, in order; skips damaged ones."""
        decoder = msgspec.json.Decoder(ready(self.entry_type))
        for line in GrowingFile(self.journal).lines():
            try:
                entry = decoder.decode(line)
            except (msgspec.MsgspecError, ValueError):
                continue
            yield entry

    def trials(self) -> Trials:
        """What is known of each trial by now."""
        return Trials(self.entries())

    def take_lock(self) -> int | None:
        """Take the lock that shows that somebody carries it; return its descriptor, or None if somebody does."""
        descriptor = open_own_lock(self.lock)
        try:
            is_taken = locks.try_take(descriptor)
            if is_taken and os.fstat(descriptor).st_size > MOST_LOG_BYTES:
                os.ftruncate(descriptor, 0)
        except OSError as error:
            os.close(descriptor)
            raise state_error(error, self.lock, "locked") from error
        if is_taken:
            return descriptor
        os.close(descriptor)
        return None


class SweepFolder(StudyFolder[SweepPlan]):
    """One sweep's files. Its conductor's log is its lock."""

    kind, plan_type, lock_name = "sweep", SweepPlan, "conductor.log"

    def __init__(self, path: StatePath) -> None:
        super().__init__(path)
        self.stop = path / "stop"
        self.done = path / "done"
        self._trouble = path / "trouble"

    def plan(self) -> SweepPlan:
        """Read the plan. Raises StateError if it is damaged, missing, or cannot be carried."""
        plan = super().plan()
        if wrong := wrong_with(plan):
            raise StateError(f"the file is not the plan of a sweep: {wrong}", where=str(self.path / "plan.json"))
        return plan

    def trouble(self) -> str:
        """Return what prevents the sweep's progress, or why the sweep stopped itself; "" if nothing does."""
        return _text_of(self.stop) or _text_of(self._trouble)

    def stop_itself(self, why: str) -> None:
        """Stop the sweep as ``gpurun sweep stop`` does, and keep why. Raises StateError."""
        durable.write_bytes(self.stop, why.encode())

    def say(self, trouble: str) -> None:
        """Keep what `trouble` tells. What cannot be written is not told."""
        with suppress(OSError, StateError):
            if trouble != _text_of(self._trouble):
                durable.write_bytes(self._trouble, trouble.encode())

    def is_conducted(self) -> bool:
        """Return whether the conductor lives."""
        try:
            descriptor = self.lock.open_file(os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return locks.is_held(descriptor)
        finally:
            os.close(descriptor)


def _text_of(path: StatePath) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, StateError, ValueError):
        return ""


class Journal:
    """Appends to a journal. Its user holds the folder's lock."""

    def __init__(self, folder: StudyFolder[Any]) -> None:
        self._path = folder.journal
        self._descriptor = folder.journal.open_file(os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            with self._told():
                data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
                os.ftruncate(self._descriptor, data.rfind(b"\n") + 1)  # a torn line of one that was killed
        except StateError:
            self.close()
            raise

    def add(self, *entries: JournalEntry, is_safe: bool = True) -> None:
        """Append entries.

        Args:
            is_safe: they outlive a power cut once this returns.

        Raises:
            StateError: they cannot be written. Then the journal has none of them.
        """
        faults.point()
        with self._told():
            size = os.fstat(self._descriptor).st_size
            try:
                durable.write_all(self._descriptor, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
                if is_safe:
                    os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, size)  # on a full disk, half a line would damage the next line
                raise
        faults.point()

    def sync(self) -> None:
        """Have all that was added outlive a power cut. Raises StateError."""
        with self._told():
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise state_error(error, self._path, "written") from error


FolderT = TypeVar("FolderT", bound=StudyFolder[Any])


class StudyStore(Generic[FolderT]):
    """All sweeps, or all campaigns, of a state directory."""

    top: str
    folder_type: type[FolderT]
    pattern: re.Pattern[str]

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = StatePath(home) / self.top

    def create_as(self, name: str, plan: object, add_code: AddCode | None) -> FolderT:
        """Store a new plan and its code: whole, or not at all.

        Raises:
            StateError: it cannot be written, for example because the disk is full, or the name is taken.
        """
        durable.make_folder(self.folder)
        with new_folder(self.folder) as draft:
            if add_code is not None:
                add_code(draft / CODE)
            durable.write_record(draft / "plan.json", plan)
            faults.point()
            draft.rename(self.folder / name)  # a folder with content is never replaced
        durable.sync_folder(self.folder)
        return self.get(name)

    def ids(self) -> list[str]:
        """Ids of all of them."""
        try:
            return sorted(name for name in self.folder.names() if self.pattern.match(name))
        except FileNotFoundError:
            return []

    def get(self, name: str) -> FolderT:
        """The folder of a known id; existence is not checked."""
        return self.folder_type(self.folder / name)


class SweepStore(StudyStore[SweepFolder]):
    """All sweeps of a state directory."""

    top, folder_type, pattern = "sweeps", SweepFolder, re.compile(r"s-[0-9a-f]{8}\Z")

    def create(self, plan: SweepPlan, add_code: AddCode | None) -> SweepFolder:
        """Store a new sweep. Raises StateError as `create_as`."""
        return self.create_as(f"s-{secrets.token_hex(4)}", plan, add_code)

    def unfinished(self) -> list[SweepFolder]:
        """This user's sweeps that are not done."""
        found = map(self.get, self.ids())
        return [folder for folder in found if folder.is_mine() and not folder.done.exists()]

    def remove_spent(self, is_job: Callable[[str], bool]) -> int:
        """Remove this user's sweeps that are done and of whose jobs none is left; how many went."""
        removed = 0
        for folder in filter(SweepFolder.is_mine, map(self.get, self.ids())):
            if not folder.done.exists() or any(is_job(t.job) for t in folder.trials().by_number.values()):
                continue
            if (descriptor := folder.take_lock()) is not None:
                try:
                    folder.path.rename(self.folder / f"{DOOMED}{folder.id}")  # a part of a sweep would run again
                finally:
                    os.close(descriptor)
                removed += 1
        self._remove_doomed()
        return removed

    def _remove_doomed(self) -> None:
        """Remove sweeps that a prune, or a killed prune, has renamed."""
        with suppress(FileNotFoundError):
            for name in self.folder.names():
                path = self.folder / name
                if name.startswith(DOOMED) and path.stat().st_uid == os.getuid():
                    path.rmtree()

    def find(self, text: str) -> SweepFolder:
        """Return the sweep that `text` means: its id, or what `gpurun.jobs.record` says.

        Raises:
            BadInput: no sweep matches, or several do.
        """
        ids = self.ids()
        if text in ids:
            return self.get(text)
        named = {name: plan.created_s for name, plan in self._plans(ids) if plan.name == text}

        def newest(mine: bool) -> str | None:
            rightful = (name for name in named if not mine or self.get(name).is_mine())
            return max(rightful, key=lambda name: (named[name], name), default=None)

        living = [self._living(name, named[name]) for name in named if not self.get(name).done.exists()]
        found = meant(text, "sweeps", ids, living, newest)
        if found is None:
            raise BadInput(f"there is no sweep {text!r}", hint="`gpurun sweep status` lists all sweeps")
        return self.get(found)

    def _living(self, name: str, created_s: float) -> Living:
        folder = self.get(name)
        return Living(name, "stops" if folder.stop.exists() else "runs", created_s, folder.is_mine())

    def _plans(self, ids: list[str]) -> Iterator[tuple[str, SweepPlan]]:
        for name in ids:
            with suppress(StateError):
                yield name, self.get(name).plan()
