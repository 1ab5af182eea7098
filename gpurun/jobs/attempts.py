"""How each attempt of a job ended: files in the job's folder that later attempts do not replace.

``attempt-N.json`` is the job's record as attempt N ended. ``attempt-N.use.json`` says how busy its GPUs were. A mark
``history/UID/ended.ID.N`` says that the history (`gpurun.history`) may lack attempt N. gpurun makes the mark first, so
a crash afterwards loses no row: a mark without its file stays until the file is there. The job's owner owns the folder
``history/UID``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.gpu_use import GpuUse
from gpurun.jobs.record import JobRecord
from gpurun.state import durable
from gpurun.state.clock import head_clock
from gpurun.state.path import StatePath, blame, examined
from gpurun.state.people import user_name

HISTORY = "history"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MARK = re.compile(r"ended\.(j-[0-9a-f]{8})\.(\d{1,9})")
_RECORD = re.compile(r"attempt-(\d{1,9})\.json")


class Mark(NamedTuple):
    """The history may lack this attempt."""

    name: str
    job: str
    attempt: int


def history_folder(home: Path, uid: int) -> StatePath:
    """Return the folder of a user's history and of the marks of that user's jobs."""
    return StatePath(home) / HISTORY / str(uid)


def make_history_folder(home: Path, uid: int) -> StatePath:
    """Return `history_folder`; create it if missing.

    Raises:
        StateError: it cannot be created, or it is another user's.
    """
    folder = history_folder(home, uid)
    durable.make_folder(folder)
    descriptor = folder.open_folder()
    try:
        found = examined(descriptor, folder)
        if found.st_uid == 0 != uid and os.getuid() == 0:  # root ends the job of somebody else
            os.fchown(descriptor, uid, -1)
        elif found.st_uid == uid == os.getuid() and found.st_mode & _OTHERS and _is_all_of(folder, uid):
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_OTHERS)  # an older version made it under a lax umask
        elif found.st_uid != uid or found.st_mode & _OTHERS:
            raise StateError(
                f"users other than {user_name(uid)} can write to the folder{blame(found)}", where=str(folder)
            )
    finally:
        os.close(descriptor)
    return folder


def _is_all_of(folder: StatePath, uid: int) -> bool:
    """Return whether nobody else has put anything into a folder, such as a journal that SQLite would follow."""
    return all((folder / name).stat().st_uid == uid for name in folder.names())


def keep(folder: JobFolder, record: JobRecord) -> None:
    """Store how an attempt has ended: `record`, with the state that follows. Idempotent.

    Raises:
        StateUnavailable: the state directory cannot be used now. Any other damage does not prevent the end of a job.
    """
    for store in (_mark, _store, _touch_mark):  # again: a collector may have removed the mark of an older version
        try:
            store(folder, record)
        except StateUnavailable:
            raise
        except (FileNotFoundError, StateError):  # such as another user's folder in the place of this user's history
            continue


def _mark(folder: JobFolder, record: JobRecord) -> None:
    durable.sync_folder(_touch_mark(folder, record))


def _touch_mark(folder: JobFolder, record: JobRecord) -> StatePath:
    marks = make_history_folder(folder.path.home, record.owner_uid)
    (marks / f"ended.{folder.id}.{record.attempt}").touch()
    return marks


def _store(folder: JobFolder, record: JobRecord) -> None:
    record = record.on(head_clock().boot_now())
    durable.write_record(folder.path / f"attempt-{record.attempt}.json", record)


def never_began(record: JobRecord) -> JobRecord:
    """Return the record of a job that ended in the queue as one more attempt, without GPUs."""
    return record.but(attempt=record.attempt + 1, granted=(), granted_s=None, started_s=None, first_failure=None)


def kept(folder: JobFolder) -> Iterator[tuple[JobRecord, GpuUse | None]]:
    """Yield every ended attempt in order, with its GPU use. Skips damaged files.

    Raises:
        FileNotFoundError: there is no such job.
        StateUnavailable: a file cannot be read now; that says nothing about what it holds.
        StateError: the folder cannot be read.
    """
    owner = folder.path.stat().st_uid
    numbers = sorted(int(found[1]) for name in folder.path.names() if (found := _RECORD.fullmatch(name)))
    for number in numbers:
        try:
            record, writer = durable.read_signed(folder.path / f"attempt-{number}.json", JobRecord)
        except StateUnavailable:
            raise
        except (FileNotFoundError, StateError):
            continue
        if (record.id, record.owner_uid, record.attempt) == (folder.id, owner, number) and writer in (owner, 0):
            yield record, read_use(folder, number)


def marked(marks: StatePath) -> Iterator[Mark]:
    """Yield the attempts that may be missing in the history. Raises FileNotFoundError without that history."""
    for name in sorted(marks.names()):
        if found := _MARK.fullmatch(name):
            yield Mark(name, found[1], int(found[2]))


def version_of(folder: JobFolder, attempt: int) -> tuple[int, int] | None:
    """Return which version of an attempt's end is stored; (0, 0) if the job was removed.

    Returns:
        None: the process that ends the attempt has not stored it yet, or was killed; then its successor stores it.
    """
    try:
        found = (folder.path / f"attempt-{attempt}.json").stat()
    except FileNotFoundError:
        return None if folder.path.exists() else (0, 0)
    return found.st_ino, found.st_mtime_ns


def read_use(folder: JobFolder, attempt: int) -> GpuUse | None:
    """Return how busy the GPUs of an attempt were; None if unknown.

    Raises:
        StateUnavailable: the file cannot be read now.
    """
    try:
        return durable.read_record(folder.path / f"attempt-{attempt}.use.json", GpuUse)
    except StateUnavailable:
        raise
    except (FileNotFoundError, StateError):
        return None


def write_use(folder: JobFolder, attempt: int, use: GpuUse) -> None:
    """Replace the GPU use of an attempt. Raises StateError."""
    durable.write_record(folder.path / f"attempt-{attempt}.use.json", use)
