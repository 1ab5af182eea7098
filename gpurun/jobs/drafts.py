"""Create jobs in the job store: each submission stores each job completely or not at all.

A submission creates its jobs in a folder ``jobs/.new-XXXXXXXX`` that no pass reads. It syncs them, marks them as live,
and then renames each into ``jobs``. Meanwhile it holds the lock of a file in that folder, so `sweep` recognises
leftovers of killed submissions.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from gpurun import faults
from gpurun.errors import StateError
from gpurun.jobs.folder import CODE, ORIGIN
from gpurun.jobs.origin import Origin
from gpurun.jobs.record import ID_PATTERN, JobRecord
from gpurun.jobs.spec import JobSpec
from gpurun.state import durable, lock
from gpurun.state.own_lock import OWN
from gpurun.state.path import StatePath

PREFIX = ".new-"
LOCK = "lock"
ABANDONED_S = 60.0
"""A submission has no lock in the moment in which it makes its folder. If it is stopped just then, and for so long, it
fails when it continues."""

AddCode = Callable[[StatePath], None]
"""Writes a job's code to a new file and syncs it."""

Alone = Callable[[], AbstractContextManager[object]]
"""What keeps every pass out for as long as it is entered."""


class Drafts:
    """The jobs of one submission. Leaving the context removes drafts that did not become jobs.

    Args:
        jobs: the folder of all jobs. It and `live` must exist.
        live: the folder of marks.
    """

    def __init__(self, jobs: StatePath, live: StatePath) -> None:
        self._jobs, self._live = jobs, live
        self._folder = jobs / f"{PREFIX}{secrets.token_hex(4)}"
        self._ids: dict[str, None] = {}
        self._codes: dict[str, StatePath] = {}  # by digest
        self._lock = -1

    def __enter__(self) -> Drafts:
        self._folder.mkdir(0o755)
        try:
            self._lock = (self._folder / LOCK).open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN)
        except BaseException:
            self._clear()
            raise
        lock.try_take(self._lock)
        faults.point()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._clear()
        finally:
            os.close(self._lock)

    def _clear(self) -> None:
        with suppress(StateError, OSError):  # what cannot be removed now, `sweep` removes
            left = [name for name in self._folder.names() if name in self._ids]  # the others are jobs by now
            for job_id in left:
                (self._live / job_id).unlink(missing_ok=True)
                (self._folder / job_id).rmtree()
            (self._folder / LOCK).unlink(missing_ok=True)
            self._folder.rmdir()

    def new_id(self, wanted: str | None = None) -> str:
        """Return an unused id; or `wanted`, which the caller knows to be unused."""
        if wanted is not None:
            self._ids[wanted] = None
            return wanted
        while True:
            job_id = f"j-{secrets.token_hex(4)}"
            if job_id not in self._ids and not (self._jobs / job_id).exists():
                self._ids[job_id] = None
                return job_id

    def add(self, record: JobRecord, spec: JobSpec, origin: Origin, add_code: AddCode | None = None) -> None:
        """Write a job's files; `publish` syncs them.

        Raises:
            StateError: they cannot be written, for example because the disk is full.
        """
        folder = self._folder / record.id
        folder.mkdir(0o755)
        if add_code is not None:
            self._add_code(folder / CODE, spec.code, add_code)
            faults.point()
        durable.write_unsynced(folder / "spec.json", spec)
        faults.point()
        durable.write_unsynced(folder / ORIGIN, origin)
        durable.write_unsynced(folder / "state.json", record)
        faults.point()

    def _add_code(self, path: StatePath, digest: str, add_code: AddCode) -> None:
        """Link the file of an earlier job with the same code; if that is impossible, write the code."""
        if digest in self._codes:
            with suppress(StateError):  # the file system has no links, or no more of this file
                self._codes[digest].link(path)
                return
        add_code(path)
        self._codes[digest] = path

    def publish(self, alone: Alone | None = None) -> tuple[str, ...]:
        """Make all drafts durable jobs; return their ids in the order of `new_id`.

        Args:
            alone: needed for several jobs: it keeps passes out, so that a failure can undo all jobs.

        Raises:
            StateError: no draft became a job; or, without `alone`, the draft is a job but may not survive a power cut.
        """
        folders = [self._folder / job_id for job_id in self._ids]
        for job_id in self._ids:
            (self._live / job_id).touch()
        faults.point()
        files = [folder / name for folder in folders for name in ("spec.json", ORIGIN, "state.json")]
        durable.sync_all(files=files, folders=[*folders, self._live])
        faults.point()
        if alone is None:
            self._rename()
        else:
            with alone():
                self._rename_all_or_none()
        return tuple(self._ids)

    def _rename(self) -> None:
        for job_id in self._ids:
            (self._folder / job_id).rename(self._jobs / job_id)
            faults.point()
        durable.sync_folder(self._jobs)

    def _rename_all_or_none(self) -> None:
        try:
            self._rename()
        except BaseException:
            for job_id in self._ids:
                with suppress(FileNotFoundError, StateError):
                    (self._jobs / job_id).rename(self._folder / job_id)
            raise


def sweep(jobs: StatePath, live: StatePath, *, now_s: float) -> None:
    """Remove leftovers of this user's killed submissions: incomplete jobs, and marks without a job."""
    marks = _names(live)
    names = set(_names(jobs))
    for name in [name for name in names if name.startswith(PREFIX)]:
        if not _remove_abandoned(jobs / name, now_s):
            names.update(_names(jobs / name))
    for mark in marks:
        if mark not in names and ID_PATTERN.fullmatch(mark) and not (jobs / mark).exists():
            with suppress(FileNotFoundError, StateError):  # another user's
                (live / mark).unlink()


def _remove_abandoned(folder: StatePath, now_s: float) -> bool:
    """Remove a folder of this user's incomplete jobs if its submission has died."""
    try:
        found = folder.stat()
        if found.st_uid != os.getuid() or abs(now_s - found.st_mtime) < ABANDONED_S or _is_locked(folder / LOCK):
            return False
        folder.rmtree()
    except (StateError, OSError):  # its submission has just ended; or gpurun did not make it
        return False
    return True


def _is_locked(path: StatePath) -> bool:
    try:
        descriptor = path.open_file(os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return lock.is_held(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: StatePath) -> list[str]:
    try:
        return folder.names()
    except (FileNotFoundError, StateError):
        return []
