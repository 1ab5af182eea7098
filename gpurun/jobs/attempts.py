"""How each attempt of a job ended: files that the next attempt does not replace, in the job's folder.

``attempt-N.json`` is the job's record as attempt N ended. ``attempt-N.use.json`` says how busy its GPUs were. A mark
``history/UID/ended.ID`` says that the history (`gpurun.history`) may not have the newest of them. The mark comes first,
so a crash after it loses no row. The folder ``history/UID`` is the job owner's.
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
    """Where a user's history lies, and the marks of that user's jobs."""
    return StatePath(home) / HISTORY / str(uid)


def make_history_folder(home: Path, uid: int) -> StatePath:
    """`history_folder`, made if it is missing.

    Raises:
        StateError: it cannot be made, or it is another user's.
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
    """Keep how an attempt has ended: `record`, with the state that follows. Idempotent.

    Raises:
        StateUnavailable: the state directory cannot be used now. Any other damage does not stop the end of a job.
    """
    try:
        marks = make_history_folder(folder.path.home, record.owner_uid)
        (marks / f"{MARK}{folder.id}").touch()
        durable.sync_folder(marks)
        durable.write_record(folder.path / f"attempt-{record.attempt}.json", record)
    except StateUnavailable:
        raise
    except (FileNotFoundError, StateError):
        return


def never_began(record: JobRecord) -> JobRecord:
    """A job that ended in the queue, as one more attempt, which had no GPUs."""
    return record.but(attempt=record.attempt + 1, granted=(), granted_s=None, started_s=None, first_failure=None)


def kept(folder: JobFolder) -> Iterator[tuple[JobRecord, GpuUse | None]]:
    """Every attempt that has ended, in order, and how busy its GPUs were, without files that are damaged.

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
    """The jobs whose newest attempt a history may not have. Raises FileNotFoundError without that history."""
    for name in sorted(marks.names()):
        if name.startswith(MARK) and ID_PATTERN.fullmatch(name.removeprefix(MARK)):
            yield name.removeprefix(MARK)


def read_use(folder: JobFolder, attempt: int) -> GpuUse | None:
    """How busy the GPUs of an attempt were; None if nobody knows."""
    try:
        return durable.read_record(folder.path / f"attempt-{attempt}.use.json", GpuUse)
    except (FileNotFoundError, StateError):
        return None


def write_use(folder: JobFolder, attempt: int, use: GpuUse) -> None:
    """Replace how busy the GPUs of an attempt are. Raises StateError."""
    durable.write_record(folder.path / f"attempt-{attempt}.use.json", use)
