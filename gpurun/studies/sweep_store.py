"""A sweep's files: ``sweeps/ID`` in the state directory.

``plan.json`` and ``code`` (`gpurun.content.workdir`) are written once. ``journal`` has a line for each step of each
trial; only the holder of the lock of ``conductor.log`` appends to it. ``stop`` asks the conductor to end the sweep,
and says why if the sweep stopped itself; ``done`` marks an ended sweep. All files belong to the user who created the
sweep.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
from gpurun.studies.sweep_plan import JournalEntry, SweepPlan, Trials, wrong_with

ID_PATTERN = re.compile(r"s-[0-9a-f]{8}\Z")
DOOMED = ".doomed-"
MOST_LOG_BYTES = 1 << 20


class SweepFolder:
    """One sweep's files. Creating this object reads nothing."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.id = path.name
        self.code = path / CODE
        self.log = path / "conductor.log"
        self.journal = path / "journal"
        self.stop = path / "stop"
        self.done = path / "done"
        self._trouble = path / "trouble"

    def is_mine(self) -> bool:
        """Return whether only this user can have written it."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, StateError):
            return False
        return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def plan(self) -> SweepPlan:
        """Read the sweep's plan. Raises StateError if it is damaged or missing."""
        path = self.path / "plan.json"
        try:
            plan = durable.read_record(path, SweepPlan)
        except FileNotFoundError as error:
            raise StateError("the file with the plan of the sweep is missing", where=str(path)) from error
        if wrong := wrong_with(plan):
            raise StateError(f"the file is not the plan of a sweep: {wrong}", where=str(path))
        return plan

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the complete lines of the journal, in order; skips damaged ones."""
        decoder = msgspec.json.Decoder(ready(JournalEntry))
        for line in GrowingFile(self.journal).lines():
            try:
                entry = decoder.decode(line)
            except (msgspec.MsgspecError, ValueError):
                continue
            yield entry

    def trials(self) -> Trials:
        """What is known of each trial by now."""
        return Trials(self.entries())

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

    def take_lock(self) -> int | None:
        """Take the lock that shows that the sweep's conductor lives; return its descriptor, or None if it lives."""
        descriptor = open_own_lock(self.log)
        try:
            is_taken = locks.try_take(descriptor)
            if is_taken and os.fstat(descriptor).st_size > MOST_LOG_BYTES:
                os.ftruncate(descriptor, 0)
        except OSError as error:
            os.close(descriptor)
            raise state_error(error, self.log, "locked") from error
        if is_taken:
            return descriptor
        os.close(descriptor)
        return None

    def is_conducted(self) -> bool:
        """Return whether the conductor lives."""
        try:
            descriptor = self.log.open_file(os.O_RDONLY)
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
    """Appends to a sweep's journal. Its user holds the conductor's lock."""

    def __init__(self, folder: SweepFolder) -> None:
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


class SweepStore:
    """All sweeps of a state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = StatePath(home) / "sweeps"

    def create(self, plan: SweepPlan, add_code: AddCode | None) -> SweepFolder:
        """Store a new sweep: whole, or not at all.

        Raises:
            StateError: it cannot be written, for example because the disk is full.
        """
        durable.make_folder(self.folder)
        name = f"s-{secrets.token_hex(4)}"
        with new_folder(self.folder) as draft:
            if add_code is not None:
                add_code(draft / CODE)
            durable.write_record(draft / "plan.json", plan)
            faults.point()
            draft.rename(self.folder / name)
        durable.sync_folder(self.folder)
        return SweepFolder(self.folder / name)

    def ids(self) -> list[str]:
        """Ids of all sweeps."""
        try:
            return sorted(name for name in self.folder.names() if ID_PATTERN.match(name))
        except FileNotFoundError:
            return []

    def get(self, name: str) -> SweepFolder:
        """The folder of a known id; existence is not checked."""
        return SweepFolder(self.folder / name)

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
