"""An index of the live jobs in the user's own cache, with the fields that a pass reads.

The index is a copy of the files in the jobs' folders. gpurun replaces such a file by a rename. A rename gives the
folder a new change time, which no program can set. So one look at the folder shows whether the copy is still valid. If
in doubt, gpurun reads the files again: if the folder has just changed or a file of the job is damaged; and for all jobs
after a reboot or an upgrade, or if the index is missing or damaged.

If a person edits a file in place, the folder's change time stays. ``touch`` on the folder then makes the edit visible.
Before it grants GPUs to a job, gpurun always reads the job's own files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gpurun.jobs.live import LiveJob
from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import Wants
from gpurun.msgspec_types import ready
from gpurun.state import own_cache
from gpurun.state.clock import boot_id
from gpurun.state.collector import without_collector

FEW = 64
"""Reading so few jobs costs less than an index of them."""
SHARE = 200
"""Beyond `FEW`, gpurun writes the index again when one in so many jobs has changed."""

CODE = own_cache.code_stamp(Path(__file__).parent)
"""Of the code that this process runs, which pip may have replaced since."""

Reader = Callable[[str], tuple[LiveJob | None, bool]]
"""Reads a job from its own files: the job, None if there is none; and whether all of them were sound."""


class _Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One job.

    Attributes:
        inode, changed_ns: inode and change time of the job's folder, read before its files.
        record: a JobRecord in MessagePack, without fields that have their default.
    """

    job: str
    inode: int
    changed_ns: int
    record: msgspec.Raw
    request: CancelRequest | None


class _SameWants(msgspec.Struct, array_like=True, frozen=True):
    """Jobs with equal constraints. Most of ten thousand jobs share a few sets of constraints."""

    wants: Wants
    jobs: list[_Entry]


class _Content(msgspec.Struct, array_like=True, frozen=True):
    stamp: str
    groups: list[_SameWants]


_CONTENT = msgspec.msgpack.Decoder(ready(_Content))
_RECORD = msgspec.msgpack.Decoder(ready(JobRecord))
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(JobRecord)}


class LiveIndex:
    """The index of one state directory, for one reading.

    Args:
        folder: the folder of all jobs' folders.
        environ: determines the user's cache folder.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = str(folder)
        kept = own_cache.folder(environ, "jobs")
        self._place = own_cache.place(kept, os.path.realpath(folder)) if kept is not None else None
        self._stamp = ""

    def read(self, ids: Collection[str], from_files: Reader) -> dict[str, LiveJob]:
        """Return the jobs with these ids. Reads the files of jobs that the index lacks."""
        if len(ids) <= FEW or self._place is None:
            return self._from_files(ids, from_files, {})
        # After a power cut, a folder can be older than the index.
        self._stamp = f"{CODE} {boot_id()}"
        with without_collector():
            groups, stored = self._valid(set(ids))
            found = {
                entry.job: LiveJob(_RECORD.decode(entry.record), wants, entry.request)
                for wants, entries in groups.items()
                for entry in entries
            }
            known = len(found)
            found |= self._from_files(set(ids) - found.keys(), from_files, groups)
            stale = stored - known + sum(map(len, groups.values())) - known
            if stale > FEW + len(found) // SHARE:
                self._keep(groups)
        return found

    def _valid(self, wanted: set[str]) -> tuple[dict[Wants, list[_Entry]], int]:
        """Return the entries of `wanted` that are still valid, and the number of all entries."""
        lstat, folder, stored = os.lstat, self._folder, 0
        groups: dict[Wants, list[_Entry]] = {}
        for group in self._stored():
            stored += len(group.jobs)
            groups[group.wants] = valid = []
            for entry in group.jobs:
                if entry.job not in wanted:
                    continue
                try:
                    found = lstat(f"{folder}/{entry.job}")
                except OSError:
                    continue
                if found.st_ctime_ns == entry.changed_ns and found.st_ino == entry.inode:
                    valid.append(entry)
        return groups, stored

    def _stored(self) -> list[_SameWants]:
        assert self._place is not None
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            content = _CONTENT.decode(own_cache.read(self._place) or b"")
            if content.stamp == self._stamp:
                return content.groups
        return []

    def _from_files(self, ids: Collection[str], read: Reader, groups: dict[Wants, list[_Entry]]) -> dict[str, LiveJob]:
        """Read jobs from files. Adds to `groups` the jobs whose next change the index can detect."""
        now_ns, found = time.time_ns(), {}
        for job_id in ids:
            try:
                before = os.lstat(f"{self._folder}/{job_id}")
            except OSError:
                continue
            job, sound = read(job_id)
            if job is None:
                continue
            found[job_id] = job
            if sound and job.wants is not None and own_cache.is_settled(before.st_ctime_ns, now_ns):
                record = msgspec.Raw(msgspec.msgpack.encode(_slim(job.record)))
                entry = _Entry(job_id, before.st_ino, before.st_ctime_ns, record, job.request)
                groups.setdefault(job.wants, []).append(entry)
        return found

    def _keep(self, groups: Mapping[Wants, list[_Entry]]) -> None:
        assert self._place is not None
        content = _Content(self._stamp, [_SameWants(wants, jobs) for wants, jobs in groups.items() if jobs])
        own_cache.keep(self._place, msgspec.msgpack.encode(content))


def _slim(record: JobRecord) -> dict[str, Any]:
    return {name: value for name, default in _DEFAULTS.items() if (value := getattr(record, name)) != default}
