"""How each attempt of a job ended: files in the job's folder that later attempts do not replace.

``attempt-N.json`` is the job's record as attempt N ended. ``attempt-N.use.json`` says how busy its GPUs were. A mark
``history/UID/ended.ID`` says that the history (`gpurun.history`) may lack the newest of them. gpurun makes the mark
first, so a crash afterwards loses no row. The job's owner owns the folder ``history/UID``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.gpu_use import GpuUse
from gpurun.jobs.record import ID_PATTERN, JobRecord
from gpurun.state import durable
from gpurun.state.path import StatePath, blame
from gpurun.state.people import user_name

HISTORY, MARK = "history", "ended."
_RECORD = re.compile(r"attempt-(\d{1,9})\.json")


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
        found = os.fstat(descriptor)
        if found.st_uid == 0 != uid and os.getuid() == 0:  # root ends the job of somebody else
            os.fchown(descriptor, uid, -1)
        elif found.st_uid != uid or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StateError(f"others than {user_name(uid)} can write it{blame(found)}", where=str(folder))
    finally:
        os.close(descriptor)
    return folder


def keep(folder: JobFolder, record: JobRecord) -> None:
    """Store how an attempt has ended: `record`, with the state that follows. Idempotent.

    Raises:
        StateUnavailable: the state directory cannot be used now. Any other damage does not prevent the end of a job.
    """
    for store in (_mark, _store):
        try:
            store(folder, record)
        except StateUnavailable:
            raise
        except (FileNotFoundError, StateError):  # such as another user's folder in the place of this user's history
            continue


def _mark(folder: JobFolder, record: JobRecord) -> None:
    marks = make_history_folder(folder.path.home, record.owner_uid)
    (marks / f"{MARK}{folder.id}").touch()
    durable.sync_folder(marks)


def _store(folder: JobFolder, record: JobRecord) -> None:
    durable.write_record(folder.path / f"attempt-{record.attempt}.json", record)


def never_began(record: JobRecord) -> JobRecord:
    """Return the record of a job that ended in the queue as one more attempt, without GPUs."""
    return record.but(attempt=record.attempt + 1, granted=(), granted_s=None, started_s=None, first_failure=None)


def kept(folder: JobFolder) -> Iterator[tuple[JobRecord, GpuUse | None]]:
    """Yield every ended attempt in order, with its GPU use. Skips damaged files.

    Raises:
        FileNotFoundError: there is no such job.
        StateError: the folder cannot be read.
    """
    owner = folder.path.stat().st_uid
    numbers = sorted(int(found[1]) for name in folder.path.names() if (found := _RECORD.fullmatch(name)))
    for number in numbers:
        try:
            record, writer = durable.read_signed(folder.path / f"attempt-{number}.json", JobRecord)
        except (FileNotFoundError, StateError):
            continue
        if (record.id, record.owner_uid, record.attempt) == (folder.id, owner, number) and writer in (owner, 0):
            yield record, read_use(folder, number)


def marked(marks: StatePath) -> Iterator[str]:
    """Yield the jobs whose newest attempt may be missing in the history. Raises FileNotFoundError without that
    history.
    """
    for name in sorted(marks.names()):
        if name.startswith(MARK) and ID_PATTERN.fullmatch(name.removeprefix(MARK)):
            yield name.removeprefix(MARK)


def read_use(folder: JobFolder, attempt: int) -> GpuUse | None:
    """Return how busy the GPUs of an attempt were; None if unknown."""
    try:
        return durable.read_record(folder.path / f"attempt-{attempt}.use.json", GpuUse)
    except (FileNotFoundError, StateError):
        return None


def write_use(folder: JobFolder, attempt: int, use: GpuUse) -> None:
    """Replace the GPU use of an attempt. Raises StateError."""
    durable.write_record(folder.path / f"attempt-{attempt}.use.json", use)
