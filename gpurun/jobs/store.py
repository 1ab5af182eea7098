"""The job store: one folder per job under ``$GPURUN_HOME/jobs``.

``spec.json`` is written once. ``state.json`` is rewritten whole on every change, by whoever has the right to:
the pass while a job is queued (under the allocator lock), its supervisor while it holds the lease's lock.
``events.jsonl`` and ``log`` only ever grow. ``cancel.json`` is a request to whoever carries the job. All of it is
written by the job's owner (or root) alone; of others' jobs one can only read.
``live/ID`` marks every job that has not ended, so that a pass does not read years of history; it is there before
the job is, and a marker that outlived its job means nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpurun import faults
from gpurun.errors import BadInput, StateError
from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State, check_way
from gpurun.state import audit, durable
from gpurun.state.people import myself, user_name

ID_PATTERN = re.compile(r"j-[0-9a-f]{8}")
BUILDING = ".new-"
"""A job's folder is called that and its id until it is whole."""
ABANDONED_S = 60.0
"""A folder is not locked in the moment in which it is made. A process that is stopped just then, and for so long, fails
when it goes on."""


class JobFolder:
    """One job's files. Cheap to make; nothing is read until asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.log = path / "log"
        self.events = path / "events.jsonl"
        self.outputs = path / "outputs"
        self.supervisor_log = path / "supervisor.log"
        self.launch_log = path / "launch.jsonl"
        self._request = path / "cancel.json"

    def spec(self) -> JobSpec:
        """The job's spec. Raises StateError when it is damaged."""
        return durable.read_record(self.path / "spec.json", JobSpec)

    def record(self) -> JobRecord:
        """Where the job stands.

        Raises:
            StateError: the file is damaged or missing, or names another job; or it names an owner who did not make the
                folder, so that in a shared state directory nobody can have something run as somebody else.
        """
        path = self.path / "state.json"
        try:
            record = durable.read_record(path, JobRecord)
            maker = self.path.lstat().st_uid
        except FileNotFoundError as error:
            raise StateError("is missing", job=self.id, where=str(path)) from error
        if record.id != self.id:
            raise StateError(f"names job {record.id[:80]!r}, not its own", where=str(path))
        if record.owner_uid != maker:
            raise StateError(
                f"says that it is {user_name(record.owner_uid)}'s, but {user_name(maker)} made it", where=str(path)
            )
        return record

    def write(self, record: JobRecord) -> JobRecord:
        """Replace the record, whole."""
        durable.write_record(self.path / "state.json", record)
        return record

    def move(self, state: State, **changes: object) -> JobRecord:
        """Go to `state`, changing fields on the way. Raises StateError if no way leads there."""
        before = self.record()
        check_way(self.id, before.state, state)
        return self.write(replace(before, state=state, **changes))  # type: ignore[arg-type]

    def cancel_request(self) -> CancelRequest | None:
        """What somebody asked of this job, if anything. A damaged request is none: see `mend_request`."""
        with suppress(FileNotFoundError, StateError):
            return durable.read_record(self._request, CancelRequest)
        return None

    def damaged_request(self) -> StateError | None:
        """What is wrong with the request that there is; None if it is sound, or none."""
        try:
            durable.read_record(self._request, CancelRequest)
        except FileNotFoundError:
            pass
        except StateError as error:
            return error
        return None

    def mend_request(self) -> str | None:
        """Set a damaged request aside; what to tell about it. To be called by the job's owner alone.

        Nobody can say what it asked for. A gang is not ended on a guess: a preemption will be asked for again, and who
        wanted the end has to say so again.
        """
        damage = self.damaged_request()
        if damage is None:
            return None
        try:
            aside = durable.set_aside(self._request)
        except FileNotFoundError:  # another process of the owner's was quicker
            return None
        with suppress(FileNotFoundError, StateError):  # or had just replaced it by a sound one
            durable.write_record(self._request, durable.read_record(aside, CancelRequest))
            aside.unlink()
            return None
        return f"a request to end it was damaged and is kept as {aside.name}; to end it, cancel it again ({damage})"

    def ask_to_cancel(self, request: CancelRequest) -> None:
        """Leave a request for whoever carries the job; a cancel is never weakened to a preemption."""
        self.mend_request()
        present = self.cancel_request()
        if present is None or present.kind == "preempt":
            durable.write_record(self._request, request)

    def clear_preemption(self) -> None:
        """Forget a preemption once it has been carried out; a cancel stays."""
        request = self.cancel_request()
        if request is not None and request.kind == "preempt":
            durable.remove(self._request)


class JobStore:
    """All jobs of one state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "jobs"
        self.live = home / "live"

    def create(self, spec: JobSpec, *, inventory: Path, now_s: float) -> JobFolder:
        """Store a new job as QUEUED: the folder appears whole, by a rename, or not at all.

        While it is being made it is locked, and its mark is never there without it: so `sweep` knows what was left.
        """
        durable.make_folder(self.folder)
        job_id = f"j-{secrets.token_hex(4)}"
        building = self.folder / f"{BUILDING}{job_id}"
        building.mkdir(mode=0o755)
        lock = os.open(building, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._build(JobFolder(building), job_id, spec, inventory=inventory, now_s=now_s)
        finally:
            os.close(lock)
        durable.sync_folder(self.folder)
        return self.get(job_id)

    def _build(self, folder: JobFolder, job_id: str, spec: JobSpec, *, inventory: Path, now_s: float) -> None:
        faults.point()
        durable.write_record(folder.path / "spec.json", spec)
        folder.write(
            JobRecord(
                id=job_id, name=spec.name, owner=myself(), owner_uid=os.getuid(), gpus=spec.gpus,
                inventory=str(inventory), state=State.QUEUED, submitted_s=now_s, queued_s=now_s,
                pool=spec.pool, priority=spec.priority,
            )
        )  # fmt: skip
        durable.make_folder(self.live)
        (self.live / job_id).touch()
        durable.sync_folder(self.live)
        faults.point()
        folder.path.rename(self.folder / job_id)
        faults.point()

    def sweep(self, *, now_s: float) -> None:
        """Remove what submissions of this user's that were killed have left: half-made jobs, and marks of none."""
        marks = self.live_ids()
        half = [entry for entry in _entries(self.folder) if entry.name.startswith(BUILDING)]
        making = [entry.name for entry in half if not _remove_abandoned(Path(entry.path), now_s)]
        for job_id in marks:
            made = any(name.startswith(f"{BUILDING}{job_id}") for name in making)
            if not made and not os.path.lexists(self.folder / job_id):
                with suppress(OSError):  # another user's
                    (self.live / job_id).unlink()

    def get(self, job_id: str) -> JobFolder:
        """The folder of a known id; existence is not checked."""
        return JobFolder(self.folder / job_id)

    def ids(self) -> tuple[str, ...]:
        """Ids of all jobs there are."""
        return _job_ids(self.folder)

    def live_ids(self) -> tuple[str, ...]:
        """Ids of the jobs that may not have ended."""
        return _job_ids(self.live)

    def retire(self, job_id: str) -> None:
        """Take a job that has ended out of `live_ids`. Idempotent.

        Who wrote that it has ended may have been killed before that was safe from a power cut.
        """
        with suppress(FileNotFoundError):
            durable.sync_folder(self.folder / job_id)
        faults.point()
        (self.live / job_id).unlink(missing_ok=True)

    def recently_ended(self, most: int) -> tuple[str, ...]:
        """Ids of the jobs that changed last, among those that are not live; at most `most`."""
        entries = [entry for entry in _entries(self.folder) if ID_PATTERN.fullmatch(entry.name)]
        live = set(self.live_ids())
        changed = sorted(((e.stat().st_mtime, e.name) for e in entries if e.name not in live), reverse=True)
        return tuple(name for _, name in changed[:most])

    def records(
        self, on_damaged: Callable[[StateError], None], *, ids: Iterable[str] | None = None
    ) -> Iterator[JobRecord]:
        """The records of `ids` (all jobs if None); a damaged one is reported, never hidden."""
        for job_id in self.ids() if ids is None else ids:
            try:
                if (self.folder / job_id).exists():  # else only its marker came to be
                    yield self.get(job_id).record()
            except StateError as error:
                on_damaged(error)

    def find(self, text: str) -> JobFolder:
        """The job that a person means by `text`: its id, an unambiguous beginning of it, or its name.

        Of several jobs of one name the newest is meant.

        Raises:
            BadInput: none or several match.
        """
        ids = self.ids()
        if text in ids:
            return self.get(text)
        begins = [job_id for job_id in ids if text and job_id.startswith((text, f"j-{text}"))]
        if len(begins) == 1:
            return self.get(begins[0])
        if begins:
            raise BadInput(f"{text!r} could mean {', '.join(begins[:5])}", hint="give more of the id")
        named = [record for record in self.records(lambda _: None) if record.name == text]
        if not named:
            raise BadInput(f"there is no job {text!r}", hint="`gpurun status` lists all jobs")
        return self.get(max(named, key=lambda record: record.submitted_s).id)


def finish(store: JobStore, record: JobRecord, *, now_s: float) -> JobRecord:
    """STOPPING → the outcome that was decided, after the job's GPUs were given back.

    A job that is to be started again goes back to the queue, in front of its peers.
    """
    folder = store.get(record.id)
    outcome = record.outcome or State.FAILED
    request = folder.cancel_request()
    if outcome is State.QUEUED and request is not None and request.kind == "cancel":
        record = folder.write(replace(record, reason=f"cancelled by {request.by}", code=1))
        outcome = State.CANCELLED
    if outcome is State.QUEUED:
        folder.clear_preemption()
        record = folder.move(State.QUEUED, queued_s=now_s, granted=(), started_s=None, outcome=None)
    else:
        record = folder.move(outcome, ended_s=now_s)
        store.retire(record.id)
    _note_end(store, record)
    return record


def end_queued_job(store: JobStore, record: JobRecord, request: CancelRequest, *, now_s: float) -> None:
    """QUEUED → CANCELLED. The caller holds the allocator lock and knows that the job has no lease."""
    reason = f"cancelled by {request.by}"
    record = store.get(record.id).move(State.CANCELLED, ended_s=now_s, reason=reason, code=1, claim=None)
    store.retire(record.id)
    _note_end(store, record)


def _note_end(store: JobStore, record: JobRecord) -> None:
    audit.note(store.home, "end", job=record.id, state=record.state.value, reason=record.reason)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def _remove_abandoned(building: Path, now_s: float) -> bool:
    """Remove a half-made job of this user's that nobody makes any more; False if it must stay."""
    try:
        lock = os.open(building, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # whole by now, or nothing that gpurun made
        return False
    try:
        found = os.fstat(lock)
        if found.st_uid != os.getuid() or abs(now_s - found.st_mtime) < ABANDONED_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(building)
    except OSError:  # it is being made; or it has just become whole
        return False
    finally:
        os.close(lock)
    return True


def _job_ids(folder: Path) -> tuple[str, ...]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return ()
    return tuple(sorted(name for name in names if ID_PATTERN.fullmatch(name)))
