"""The job store: one folder per job under ``$GPURUN_HOME/jobs`` (`gpurun.jobs.folder` describes its content).

``live/ID`` marks every job that has not ended, so that a pass does not read years of history. gpurun makes the mark
before the job, so a mark without a job means nothing.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gpurun import faults
from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.jobs.folder import CODE, CODES, ORIGIN, JobFolder, keep_attempt, never_began
from gpurun.jobs.record import ID_PATTERN, CancelRequest, JobRecord, Living, Origin, State, meant
from gpurun.jobs.spec import JobSpec, Wants
from gpurun.msgspec_types import ready
from gpurun.state import caches, durable, locks
from gpurun.state.audit import AuditLog
from gpurun.state.clock import boot_id, head_clock
from gpurun.state.durable import without_collector
from gpurun.state.locks import OWN
from gpurun.state.paths import StatePath, myself

# A job that has not ended, with the fields that a pass needs.


class LiveJob(msgspec.Struct, frozen=True, gc=False):
    """One job that has not ended. Not a dataclass, because a pass creates ten thousand of them.

    Attributes:
        wants: None if the job's spec is damaged or missing: then its constraints are unknown, and a pass must not grant
            it.
        request: the cancel or preemption request about this job.
    """

    record: JobRecord
    wants: Wants | None
    request: CancelRequest | None


# An index of the live jobs in the user's own cache, with the fields that a pass reads.


FEW = 64
"""Reading so few jobs costs less than an index of them."""
SHARE = 200
"""Beyond `FEW`, gpurun writes the index again when one in so many jobs has changed."""

INDEX_CODE = caches.code_stamp(Path(__file__).parent)
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
        kept = caches.cache_room(environ, "jobs")
        self._place = caches.cache_file(kept, os.path.realpath(folder)) if kept is not None else None
        self._stamp = ""

    def read(self, ids: Collection[str], from_files: Reader) -> dict[str, LiveJob]:
        """Return the jobs with these ids. Reads the files of jobs that the index lacks."""
        if len(ids) <= FEW or self._place is None:
            return self._from_files(ids, from_files, {})
        # After a power cut, a folder can be older than the index.
        self._stamp = f"{INDEX_CODE} {boot_id()}"
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
            content = _CONTENT.decode(caches.read_cache(self._place) or b"")
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
            if sound and job.wants is not None and caches.is_settled(before.st_ctime_ns, now_ns):
                record = msgspec.Raw(msgspec.msgpack.encode(_slim(job.record)))
                entry = _Entry(job_id, before.st_ino, before.st_ctime_ns, record, job.request)
                groups.setdefault(job.wants, []).append(entry)
        return found

    def _keep(self, groups: Mapping[Wants, list[_Entry]]) -> None:
        assert self._place is not None
        content = _Content(self._stamp, [_SameWants(wants, jobs) for wants, jobs in groups.items() if jobs])
        caches.keep_cache(self._place, msgspec.msgpack.encode(content))


def _slim(record: JobRecord) -> dict[str, Any]:
    return {name: value for name, default in _DEFAULTS.items() if (value := getattr(record, name)) != default}


# Create jobs in the job store: each submission stores each job completely or not at all.


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
        locks.try_take(self._lock)
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
    """Remove leftovers of this user's killed submissions: incomplete jobs, marks without a job, and code without one.

    For root, also other users' code that no job has any more: root may have removed their jobs.
    """
    marks = _names(live)
    names = set(_names(jobs))
    for name in [name for name in names if name.startswith(PREFIX)]:
        if not _remove_abandoned(jobs / name, now_s):
            names.update(_names(jobs / name))
    for mark in marks:
        if mark not in names and ID_PATTERN.fullmatch(mark) and not (jobs / mark).exists():
            with suppress(FileNotFoundError, StateError):  # another user's
                (live / mark).unlink()
    for name in names:
        if _is_codes(name):
            _remove_unused(jobs / name)


def _is_codes(name: str) -> bool:
    """Return whether a name is the folder of code that this user may remove."""
    return name.startswith(CODES) and (name == f"{CODES}{os.getuid()}" or os.getuid() == 0)


def _remove_unused(codes: StatePath) -> None:
    """Remove stored code that no job has. The name of a file that gets a job at this moment may go, too."""
    with suppress(OSError, StateError):  # it is no folder of ours
        folder = codes.open_folder()
        try:
            for name in os.listdir(folder):  # a user may have very many
                with suppress(OSError):  # another process is quicker; or nobody may remove this one
                    if os.lstat(name, dir_fd=folder).st_nlink == 1:
                        faults.point()
                        os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        codes.rmdir()  # fails unless it is empty


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
        return locks.is_held(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: StatePath) -> list[str]:
    try:
        return folder.names()
    except (FileNotFoundError, StateError):
        return []


LAST = "@last"
"""What a person types for the job that they submitted last."""


class JobStore:
    """All jobs of one state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = StatePath(home) / "jobs"
        self.live = StatePath(home) / "live"

    def create(self, spec: JobSpec, *, inventory: Path, now_s: float) -> JobFolder:
        """Store a new job as QUEUED, completely or not at all.

        Raises:
            StateError: it cannot be written, for example because the disk is full.
        """
        (folder,) = self.create_many([spec], inventory=inventory, now_s=now_s)
        return folder

    def create_many(
        self, specs: Sequence[JobSpec], *, inventory: Path, now_s: float, alone: Alone | None = None,
        codes: Mapping[str, AddCode] = MappingProxyType({}), ids: Sequence[str] = (),
        origins: Sequence[Origin] = (),
    ) -> tuple[JobFolder, ...]:  # fmt: skip
        """Store new jobs as QUEUED, each completely or not at all. Equal jobs start in the order of `specs`.

        Args:
            alone: keeps passes out, such as the allocator lock. With it a failure stores none of the jobs, because no
                pass can have started any. Only a killed process can leave some of them.
            codes: writes the code of the specs that have some, by its digest (`JobSpec.code`).
            ids: new ids for the specs, in order (`new_id`). So after a crash, the caller still knows the ids of its
                jobs.
            origins: where the specs come from, in order; missing ones are unknown.

        Raises:
            StateError: they cannot be written, for example because the disk is full.
        """
        durable.make_folder(self.folder)
        durable.make_folder(self.live)
        with Drafts(self.folder, self.live) as drafts:
            each = zip(
                specs,
                _one_after_the_other(now_s),
                chain(ids, repeat(None)),
                chain(origins, repeat(Origin())),
                strict=False,
            )
            for spec, submitted_s, job_id, origin in each:
                record = _new_record(drafts.new_id(job_id), spec, inventory, submitted_s)
                drafts.add(record, spec, origin, codes.get(spec.code))
            return tuple(self.get(job_id) for job_id in drafts.publish(alone))

    def new_id(self) -> str:
        """Return an unused id."""
        while (self.folder / (job_id := f"j-{secrets.token_hex(4)}")).exists():
            pass
        return job_id

    def sweep(self, *, now_s: float) -> None:
        """Remove leftovers of this user's killed submissions: incomplete jobs, marks without a job, unused code."""
        sweep(self.folder, self.live, now_s=now_s)

    def codes(self) -> list[str]:
        """Return the names of folders of stored code (`gpurun.content.workdir`): this user's; for root, all."""
        return list(filter(_is_codes, _names_of_store(self.folder)))

    def get(self, job_id: str) -> JobFolder:
        """Return the folder of a known id. Does not check whether it exists."""
        return JobFolder(self.folder / job_id)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all jobs."""
        return _job_ids(_names_of_store(self.folder))

    def live_ids(self, *, but: Collection[str] = ()) -> tuple[str, ...]:
        """Return the ids of jobs that may not have ended, without those in `but`."""
        return _job_ids(set(_names_of_store(self.live)).difference(but))

    def live_jobs(self, on_problem: Callable[[StateError], None]) -> dict[str, LiveJob]:
        """Return every job that has not ended, by id, in no order.

        Reports and skips a job with a damaged record. Reports a job with a damaged spec, and returns it without wants,
        so that no pass places it without its constraints. Reports and ignores a damaged request.

        Raises:
            StateUnavailable: the state directory cannot be read now.
        """

        def from_files(name: str) -> tuple[LiveJob | None, bool]:
            return _read_live(self.get(name), on_problem) if ID_PATTERN.fullmatch(name) else (None, False)

        jobs, boot = (
            LiveIndex(self.folder.plain, os.environ).read(_names_of_store(self.live), from_files),
            head_clock().boot,
        )
        for name, job in jobs.items():
            if (record := job.record.on(boot)) is not job.record:  # the index has it by another reading of the clock
                jobs[name] = msgspec.structs.replace(job, record=record)
        return jobs

    def live_records(self) -> list[JobRecord]:
        """Return the records of `live_jobs`, in no order. Skips damaged records, because commands that show jobs report
        them.
        """
        return [job.record for job in self.live_jobs(lambda _: None).values()]

    def live_job(self, job_id: str, on_problem: Callable[[StateError], None]) -> LiveJob | None:
        """Return one of `live_jobs`, read from its own files now."""
        job, _ = _read_live(self.get(job_id), on_problem)
        return job

    def forget(self, job_id: str) -> None:
        """Make the next `live_jobs` read this job's files again."""
        with suppress(FileNotFoundError, StateError):
            durable.touch_folder(self.folder / job_id)

    def retire(self, job_id: str) -> None:
        """Remove an ended job from `live_ids`. Idempotent.

        Syncs the job's end first: the process that wrote it may have been killed before the sync.
        """
        with suppress(FileNotFoundError):
            durable.sync_folder(self.folder / job_id)
        faults.point()
        with suppress(StateError):  # another user's mark: it costs a look, no more
            (self.live / job_id).unlink(missing_ok=True)

    def recently_ended(self, most: int | None = None) -> tuple[str, ...]:
        """Return the ids of at most `most` jobs that are not live, those that changed last first."""
        ended = set(self.ids()) - set(self.live_ids())
        changed = sorted(_changed(self.folder, ended), reverse=True)
        return tuple(name for _, name in changed[:most])

    def records(
        self, on_damaged: Callable[[StateError], None], *, ids: Iterable[str] | None = None
    ) -> Iterator[JobRecord]:
        """Yield the records of `ids` (all jobs if None). Reports damaged records."""
        for job_id in self.ids() if ids is None else ids:
            try:
                if (self.folder / job_id).exists():  # else only its marker came to be
                    yield self.get(job_id).record()
            except StateError as error:
                on_damaged(error)

    def find(self, text: str) -> JobFolder:
        """Return the job that `text` means: its id, or what `gpurun.jobs.record` says. ``@last`` is this user's newest.

        Raises:
            BadInput: no job matches, or several do.
        """
        ids = self.ids()
        if text in ids:
            return self.get(text)
        is_mine = partial(_is_owned_by, os.getuid())
        if text == LAST:
            found = self._newest(ids, is_mine)
        else:
            live = (record for record in self.live_records() if record.name == text and not record.state.ended)
            living = [Living(each.id, each.state.value, each.submitted_s, is_mine(each)) for each in live]
            found = meant(
                text, "jobs", ids, living,
                lambda mine: self._newest(ids, lambda each: each.name == text and (not mine or is_mine(each))),
            )  # fmt: skip
        if found is None:
            raise self._unknown(text, ids)
        return self.get(found)

    def _newest(self, ids: Iterable[str], is_meant: Callable[[JobRecord], bool]) -> str | None:
        """Return the id of the last submitted of the matching jobs. A folder changes after its job was submitted."""
        newest: JobRecord | None = None
        for changed_s, job_id in sorted(_changed(self.folder, ids), reverse=True):
            if newest is not None and changed_s < newest.submitted_s:
                break
            for record in self.records(lambda _: None, ids=[job_id]):
                if is_meant(record) and (newest is None or record.submitted_s > newest.submitted_s):
                    newest = record
        return None if newest is None else newest.id

    def _unknown(self, text: str, ids: Iterable[str]) -> BadInput:
        from difflib import get_close_matches  # noqa: PLC0415  (only an error needs it)

        if text == LAST:
            return BadInput("you have submitted no job", hint="`gpurun submit --help` shows how to submit a job")
        names = {record.name for record in self.records(lambda _: None, ids=ids)}
        close = get_close_matches(text, sorted(names.union(ids)), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "`gpurun status` lists all jobs"
        return BadInput(f"there is no job {text!r}", hint=hint)


def _is_owned_by(uid: int, record: JobRecord) -> bool:
    return record.owner_uid == uid


def _one_after_the_other(now_s: float) -> Iterator[float]:
    """Yield submission times, microseconds apart: the queue would order jobs of the same time by their random ids."""
    return (now_s + index / 1e6 for index in count())


def _new_record(job_id: str, spec: JobSpec, inventory: Path, now_s: float) -> JobRecord:
    boot = head_clock().boot
    return JobRecord(
        id=job_id, name=spec.name, owner=myself(), owner_uid=os.getuid(), gpus=spec.gpus, inventory=str(inventory),
        state=State.QUEUED, submitted_s=now_s, queued_s=now_s, pool=spec.pool, priority=spec.priority,
        rehearsal="due" if spec.rehearse_s is not None and spec.gpus > 1 else "",
        boot=boot.id, boot_s=boot.began_s,
    )  # fmt: skip


def finish(store: JobStore, record: JobRecord, *, now_s: float) -> JobRecord:
    """Change STOPPING to the decided outcome, after the job's GPUs were released. Idempotent.

    A job that restarts goes back to the queue, in front of its peers.
    """
    folder = store.get(record.id)
    now = folder.record()
    if now.is_past(record.attempt):  # written, but the last step failed
        if now.state.ended:
            store.retire(record.id)
        return now
    outcome = record.outcome or State.FAILED
    if record.unjudged is not None:  # somebody removed its lease before its supervisor could decide
        outcome, record = record.unjudged.outcome, folder.write(record.but(unjudged=None))
    request = folder.cancel_request()
    if outcome is State.QUEUED and request is not None and request.kind == "cancel":
        record = folder.write(record.but(reason=request.outcome, code=1))
        outcome = State.CANCELLED
    keep_attempt(folder, record.but(state=outcome, ended_s=now_s, reason=record.last_words()))
    if outcome is State.QUEUED:
        folder.clear_preemption()
        record = folder.move(
            State.QUEUED, queued_s=now_s, granted=(), started_s=None, outcome=None,
            rehearsal="" if record.rehearsal == "passed" else record.rehearsal,
        )  # fmt: skip
    else:
        record = folder.move(outcome, ended_s=now_s, reason=record.last_words())
        store.retire(record.id)
    _note_end(store, record)
    return record


def end_queued_job(store: JobStore, record: JobRecord, request: CancelRequest, *, now_s: float) -> None:
    """Change QUEUED to CANCELLED. The caller holds the allocator lock and knows that the job has no lease."""
    ended = {"ended_s": now_s, "reason": request.outcome, "code": 1, "kept": None}
    folder = store.get(record.id)
    keep_attempt(folder, never_began(record.but(state=State.CANCELLED, **ended)))
    record = folder.move(State.CANCELLED, **ended)
    store.retire(record.id)
    _note_end(store, record)


def _note_end(store: JobStore, record: JobRecord) -> None:
    AuditLog(store.home).note("end", job=record.id, state=record.state.value, reason=record.reason)


def _read_live(folder: JobFolder, on_problem: Callable[[StateError], None]) -> tuple[LiveJob | None, bool]:
    """Read a job from its files; also return whether all of them are undamaged."""
    problems: list[StateError] = []
    try:
        job = LiveJob(folder.record(), _wants(folder, problems), folder.cancel_request())
    except StateUnavailable:  # it says nothing about the job
        raise
    except StateError as error:
        job, problems = None, [error]
    if damage := folder.damaged_request():
        problems.append(damage)
    for problem in problems:
        on_problem(problem)
    return job, not problems


def _wants(folder: JobFolder, problems: list[StateError]) -> Wants | None:
    try:
        return folder.spec().wants
    except StateUnavailable:
        raise
    except StateError as error:
        problems.append(error)
        return None


def _names_of_store(folder: StatePath) -> list[str]:
    try:
        return folder.names()
    except FileNotFoundError:
        return []


def _changed(folder: StatePath, names: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Yield when each of these last changed, and its name."""
    for name in names:
        with suppress(FileNotFoundError):
            yield (folder / name).stat().st_mtime, name


def _job_ids(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if ID_PATTERN.fullmatch(name)))
