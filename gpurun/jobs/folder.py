"""One job's folder: its spec, its record, cancel and preemption requests, and the paths of all other files.

gpurun writes ``spec.json``, ``origin.json`` and ``code`` (`gpurun.content.workdir`) once. It replaces ``state.json`` as
a whole on every change: while the job is queued, a pass does so under the allocator lock, then its supervisor.
``cancel.json``, ``drain.json`` and ``preempt.json`` are requests to the supervisor. Only the job's owner or root writes
here. Other users can read everything except the code.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.record import CancelRequest, GpuUse, JobRecord, Origin, State, check_way
from gpurun.jobs.spec import JobSpec
from gpurun.node.folder import below
from gpurun.node.folder.below import walk
from gpurun.state import durable
from gpurun.state.clock import head_clock
from gpurun.state.paths import StatePath, blame, examined, user_name

CODE, ORIGIN = "code", "origin.json"
CODES = ".code-"
"""How the folder of a user's code begins, beside the jobs' folders (`gpurun.content.workdir.CodeStore`)."""
RequestFile = Literal["cancel", "drain", "preempt"]
REQUESTS: tuple[RequestFile, ...] = ("cancel", "drain", "preempt")
"""The files of requests; the weightier one first. A drain's cancel has its own: the drain's end withdraws no other."""


class JobFolder:
    """One job's files. Creating this object reads nothing."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.id = path.name
        self.code = path / CODE
        self.log = path / "log"
        self.events = path / "events.jsonl"
        self.outputs = path.plain / "outputs"  # a tree of the job's own making, which may hold links
        self.supervisor_log = path / "supervisor.log"

    def spec(self) -> JobSpec:
        """Read the job's spec. Raises StateError if it is damaged or missing."""
        path = self.path / "spec.json"
        try:
            return durable.read_record(path, JobSpec)
        except FileNotFoundError as error:
            raise StateError("the file with the job's settings is missing", job=self.id, where=str(path)) from error

    def origin(self) -> Origin:
        """Read where the job comes from; empty if an older gpurun stored the job. Raises StateError."""
        try:
            return durable.read_record(self.path / ORIGIN, Origin)
        except FileNotFoundError:
            return Origin()

    def record(self) -> JobRecord:
        """Read the job's record, with its times by this process's clock.

        Raises:
            StateError: the file is damaged or missing, or names another job; or another user than the named owner can
                have written it. So no user can make another user run something.
        """
        path = self.path / "state.json"
        try:
            record = durable.read_record(path, JobRecord)
            folder = self.path.stat()
        except FileNotFoundError as error:
            raise StateError("the file with the job's state is missing", job=self.id, where=str(path)) from error
        if record.id != self.id:
            raise StateError(
                f"the file must contain the state of {self.id}, but contains the state of {record.id[:80]!r}",
                where=str(path),
            )
        if record.owner_uid != folder.st_uid:
            raise StateError(
                f"the record says that {user_name(record.owner_uid)} owns the job, "
                f"but {user_name(folder.st_uid)} made the job's folder",
                where=str(path),
            )
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StateError(
                f"users other than {user_name(folder.st_uid)} can write to the job's folder, so gpurun "
                "trusts none of its files",
                where=str(self.path), hint="check that no other user has written to the folder, then run chmod go-w on "
                                           "the folder",
            )  # fmt: skip
        return record.on(head_clock().boot)

    def write(self, record: JobRecord) -> JobRecord:
        """Replace the record as a whole. The file's times are by the wall clock of now; those returned, as given."""
        clock = head_clock()
        durable.write_record(self.path / "state.json", record.on(clock.boot_now()))
        return record.on(clock.boot)

    def amend(self, mine: JobRecord, **changes: object) -> JobRecord:
        """Change fields of the record, which is otherwise equal to `mine`. Replaces a damaged record.

        Raises:
            StateError: another process has changed the job's state, for example because both links of its lease were
                removed.
        """
        try:
            now = self.record()
        except StateError:
            now = mine
        if (now.state, now.attempt, now.outcome) != (mine.state, mine.attempt, mine.outcome):
            raise StateError(
                f"another process has changed the job: the job's state is now {now.state.value}", job=self.id
            )
        return self.write(mine.but(**changes))

    def move(self, state: State, **changes: object) -> JobRecord:
        """Change the state to `state`, and other fields with it. Raises StateError if this change is not allowed."""
        before = self.record()
        check_way(self.id, before.state, state)
        return self.write(before.but(state=state, **changes))

    def cancel_request(self) -> CancelRequest | None:
        """Return the request about this job, if there is one; a cancel takes precedence over a preemption.

        Ignores a damaged request: see `mend_request`.
        """
        for name in REQUESTS:
            with suppress(FileNotFoundError, StateError):
                return self._read_request(name)
        return None

    def damaged_request(self) -> StateError | None:
        """Return the damage of a request; None if there is no damaged request."""
        return next(filter(None, map(self._damage, REQUESTS)), None)

    def mend_request(self) -> str | None:
        """Set damaged requests aside; return a message about them. Only the job's owner calls this.

        gpurun cannot read what a damaged request wanted, and stops no gang on a guess. The pass will ask for a
        preemption again; a person must repeat a cancel.
        """
        return "; ".join(filter(None, map(self._mend, REQUESTS))) or None

    def _mend(self, name: RequestFile) -> str | None:
        path, damage = self._request(name), self._damage(name)
        if damage is None:
            return None
        try:
            aside = durable.set_aside(path)
        except FileNotFoundError:  # another process of the owner's was quicker
            return None
        with suppress(FileNotFoundError, StateError):  # or had just replaced it by a sound one
            sound = durable.read_record(aside, CancelRequest)
            if _has_place(sound, name):
                durable.write_record(path, sound)
                aside.unlink()
                return None
        return (
            f"a request to end the job was damaged ({damage}); gpurun renamed its file to {aside.name}. To "
            "end the job, cancel the job again"
        )

    def ask_to_cancel(self, request: CancelRequest) -> None:
        """Write a request for the job's supervisor. A person's cancel, a drain's and a preemption have separate files.

        So writing or removing one never removes another that is made at the same moment.
        """
        name = _file_of(request)
        self._mend(name)
        present = self.cancel_request()
        if present is None or present.kind == "preempt" or REQUESTS.index(name) < REQUESTS.index(_file_of(present)):
            durable.write_record(self._request(name), request)

    def clear_preemption(self) -> None:
        """Remove a preemption request after it was carried out; a cancel stays."""
        with suppress(FileNotFoundError, StateError):
            self._read_request("preempt")
            durable.remove_file(self._request("preempt"))

    def withdraw(self, request: CancelRequest) -> None:
        """Remove a request that was not carried out, unless another one has replaced it."""
        with suppress(FileNotFoundError, StateError):
            if self._read_request(_file_of(request)) == request:
                durable.remove_file(self._request(_file_of(request)))

    def _request(self, name: RequestFile) -> StatePath:
        return self.path / f"{name}.json"

    def _damage(self, name: RequestFile) -> StateError | None:
        try:
            self._read_request(name)
        except FileNotFoundError:
            return None
        except StateUnavailable:  # it says nothing about the file
            return None
        except StateError as error:
            return error
        return None

    def _read_request(self, name: RequestFile) -> CancelRequest:
        path = self._request(name)
        request = durable.read_record(path, CancelRequest)
        if not _has_place(request, name):
            raise StateError(f"the file holds a request of the wrong kind: {request.kind}", where=str(path))
        return request


def _file_of(request: CancelRequest) -> RequestFile:
    return "drain" if request.kind == "cancel" and request.drain else request.kind


def _has_place(request: CancelRequest, name: RequestFile) -> bool:
    return name == _file_of(request)


# How each attempt of a job ended: files in the job's folder that later attempts do not replace.


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


def keep_attempt(folder: JobFolder, record: JobRecord) -> None:
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


# Measure how much of the head's disk each job's folder takes: one walk below a descriptor, one look at each file.


Kind = Literal["outputs", "logs", "other"]
KINDS: tuple[Kind, ...] = ("outputs", "logs", "other")
OUTPUTS = (b"outputs", b"outputs.whole", b"outputs.arriving", b"outputs.replaced")
"""The head's copy; its last whole state; what arrives for the next one; a copy that an older gpurun was replacing."""
LOGS = (b"log", b"events.jsonl", b"supervisor.log", b"launch.jsonl")
DOOMED = ".doomed-"
"""How the name of something begins that `gpurun prune` removes: another prune removes what a crash left of it."""
BLOCK_BYTES = 512
"""The unit of ``st_blocks``, whatever the file system's own block is (stat(2))."""

Inode = tuple[int, int]


@dataclass(frozen=True)
class LinkedFile:
    """A file with several hard links.

    Attributes:
        names: the number of its links in the folder.
        of: the number of all its links.
    """

    kind: Kind
    size: int
    names: int
    of: int


@dataclass(frozen=True)
class FolderUsage:
    """Disk usage of one folder.

    Attributes:
        sizes: bytes on disk by kind, without `linked`.
        files: the number of entries that are not folders.
        linked: files with several hard links.
        unread: what could not be read, so that the true sizes may be larger.
    """

    sizes: Mapping[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    files: int = 0
    linked: Mapping[Inode, LinkedFile] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the bytes without `linked`."""
        return sum(self.sizes.values())

    def unlinked(self) -> FolderUsage:
        """Return the usage of files with one link only."""
        return replace(self, files=self.files - sum(each.names for each in self.linked.values()), linked={})

    def outputs_alone(self) -> FolderUsage:
        """Return the usage of the outputs only."""
        linked = {inode: each for inode, each in self.linked.items() if each.kind == "outputs"}
        return replace(self, sizes={**dict.fromkeys(KINDS, 0), "outputs": self.sizes["outputs"]}, linked=linked)


def measure(path: StatePath) -> FolderUsage:
    """Measure a folder. A folder that disappears meanwhile takes nothing; an unreadable one is reported."""
    try:
        top = path.open_folder()
    except FileNotFoundError:
        return FolderUsage()
    except StateError as error:
        return FolderUsage(unread=(str(error),))
    try:
        return _measured(top)
    except OSError as error:
        return FolderUsage(unread=(f"{path}: {error.strerror}",))
    finally:
        os.close(top)


def _measured(top: int) -> FolderUsage:
    sizes: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    linked: dict[Inode, LinkedFile] = {}
    unread: list[str] = []
    files = 0
    sizes["other"] += os.fstat(top).st_blocks * BLOCK_BYTES
    for found in walk(top):
        status = found.status
        if status is None:
            unread.append(f"{below.text_of_path(found.parts)[-200:]!r}: {found.why}")
            continue
        kind, size = _kind_of(found.parts[0]), status.st_blocks * BLOCK_BYTES
        is_folder = stat.S_ISDIR(status.st_mode)
        files += not is_folder
        if is_folder or status.st_nlink <= 1:
            sizes[kind] += size
            continue
        inode = status.st_dev, status.st_ino
        before = linked.get(inode)
        linked[inode] = LinkedFile(kind, size, before.names + 1 if before else 1, status.st_nlink)
    return FolderUsage(sizes, files, linked, tuple(unread))


def _kind_of(name: bytes) -> Kind:
    if name in OUTPUTS or name.startswith(DOOMED.encode()):
        return "outputs"
    return "logs" if name in LOGS else "other"


def each_counted_once(usages: Iterable[FolderUsage]) -> list[FolderUsage]:
    """Return the usages, with each hard-linked file counted in the first folder that has a link to it."""
    counted, seen = [], set[Inode]()
    for usage in usages:
        sizes = dict(usage.sizes)
        for inode, each in usage.linked.items():
            if inode not in seen:
                sizes[each.kind] += each.size
        seen |= usage.linked.keys()
        counted.append(replace(usage, sizes=sizes, linked={}))
    return counted


class Freed:
    """Computes the bytes that the removal of folders frees. A hard-linked file is freed with its last link."""

    def __init__(self) -> None:
        self.size = 0
        self._names: dict[Inode, int] = {}

    def add(self, usage: FolderUsage) -> int:
        """Add one removed folder; return the bytes that this frees."""
        before = self.size
        self.size += usage.total
        for inode, each in usage.linked.items():
            self._names[inode] = names = self._names.get(inode, 0) + each.names
            if names >= each.of:
                self.size += each.size
        return self.size - before
