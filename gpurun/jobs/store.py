"""The job store: one folder per job under ``$GPURUN_HOME/jobs`` (`gpurun.jobs.folder` says what is in it).

``live/ID`` marks every job that has not ended, so that a pass does not read years of history. The mark is made before
the job. A mark without a job means nothing.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpurun import faults
from gpurun.errors import BadInput, StateError
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.index import LiveIndex
from gpurun.jobs.live import LiveJob
from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import JobSpec, Wants
from gpurun.jobs.states import State
from gpurun.state import audit, durable, lock
from gpurun.state.path import StatePath
from gpurun.state.people import myself

ID_PATTERN = re.compile(r"j-[0-9a-f]{8}")
BUILDING = ".new-"
"""A job's folder is called that and its id until it is whole."""
ABANDONED_S = 60.0
"""A folder is not locked in the moment in which it is made. A process that is stopped just then, and for so long, fails
when it goes on."""


class JobStore:
    """All jobs of one state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = StatePath(home) / "jobs"
        self.live = StatePath(home) / "live"

    def create(self, spec: JobSpec, *, inventory: Path, now_s: float) -> JobFolder:
        """Store a new job as QUEUED: the folder appears whole, by a rename, or not at all.

        While it is being made its spec is locked, and its mark is never there without it: so `sweep` knows what was
        left. What could not be made whole, for want of disk say, is removed at once.
        """
        durable.make_folder(self.folder)
        job_id = f"j-{secrets.token_hex(4)}"
        building = self.folder / f"{BUILDING}{job_id}"
        building.mkdir(mode=0o755)
        try:
            self._build(JobFolder(building), job_id, spec, inventory=inventory, now_s=now_s)
        except StateError:
            with suppress(StateError, OSError):
                building.rmtree()
                (self.live / job_id).unlink(missing_ok=True)
            raise
        durable.sync_folder(self.folder)
        return self.get(job_id)

    def _build(self, folder: JobFolder, job_id: str, spec: JobSpec, *, inventory: Path, now_s: float) -> None:
        faults.point()
        held = durable.write_locked_record(folder.path / "spec.json", spec)
        try:
            self._fill(folder, job_id, spec, inventory=inventory, now_s=now_s)
        finally:
            os.close(held)

    def _fill(self, folder: JobFolder, job_id: str, spec: JobSpec, *, inventory: Path, now_s: float) -> None:
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
        half = [name for name in _names(self.folder) if name.startswith(BUILDING)]
        making = [name for name in half if not _remove_abandoned(self.folder / name, now_s)]
        for job_id in marks:
            made = any(name.startswith(f"{BUILDING}{job_id}") for name in making)
            if not made and not (self.folder / job_id).exists():
                with suppress(FileNotFoundError, StateError):  # another user's
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

    def live_jobs(self, on_problem: Callable[[StateError], None]) -> Mapping[str, LiveJob]:
        """Every job that has not ended, by id, in no order.

        A job whose record is damaged is reported and left out. A job whose spec is damaged is reported and wants
        nothing, so that no pass can place it without its constraints. A damaged request is reported and is no request.
        """

        def from_files(name: str) -> tuple[LiveJob | None, bool]:
            return _read_live(self.get(name), on_problem) if ID_PATTERN.fullmatch(name) else (None, False)

        return LiveIndex(self.folder.plain, os.environ).read(_names(self.live), from_files)

    def retire(self, job_id: str) -> None:
        """Take a job that has ended out of `live_ids`. Idempotent.

        Who wrote that it has ended may have been killed before that was safe from a power cut.
        """
        with suppress(FileNotFoundError):
            durable.sync_folder(self.folder / job_id)
        faults.point()
        with suppress(StateError):  # another user's mark: it costs a look, no more
            (self.live / job_id).unlink(missing_ok=True)

    def recently_ended(self, most: int) -> tuple[str, ...]:
        """Ids of the jobs that changed last, among those that are not live; at most `most`."""
        ended = set(self.ids()) - set(self.live_ids())
        changed = sorted(_changed(self.folder, ended), reverse=True)
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
    record = store.get(record.id).move(State.CANCELLED, ended_s=now_s, reason=reason, code=1, kept=None)
    store.retire(record.id)
    _note_end(store, record)


def _note_end(store: JobStore, record: JobRecord) -> None:
    audit.note(store.home, "end", job=record.id, state=record.state.value, reason=record.reason)


def _read_live(folder: JobFolder, on_problem: Callable[[StateError], None]) -> tuple[LiveJob | None, bool]:
    """A job as its files have it now, and whether all of them are sound."""
    problems: list[StateError] = []
    try:
        job = LiveJob(folder.record(), _wants(folder, problems), folder.cancel_request())
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
    except StateError as error:
        problems.append(error)
        return None


def _names(folder: StatePath) -> list[str]:
    try:
        return folder.names()
    except FileNotFoundError:
        return []


def _changed(folder: StatePath, names: Iterable[str]) -> Iterator[tuple[float, str]]:
    """When each of these last changed, and its name."""
    for name in names:
        with suppress(FileNotFoundError):
            yield (folder / name).stat().st_mtime, name


def _remove_abandoned(building: StatePath, now_s: float) -> bool:
    """Remove a half-made job of this user's that nobody makes any more; False if it must stay."""
    try:
        found = building.stat()
        if found.st_uid != os.getuid() or abs(now_s - found.st_mtime) < ABANDONED_S or _is_being_made(building):
            return False
        building.rmtree()
    except (FileNotFoundError, StateError):  # it has just become whole; or it is nothing that gpurun made
        return False
    return True


def _is_being_made(building: StatePath) -> bool:
    """Whether a process holds the lock of its spec, which may not have its name yet."""
    for name in building.names():
        spec = (building / name).open_file(os.O_RDONLY)
        try:
            if lock.is_held(spec):
                return True
        finally:
            os.close(spec)
    return False


def _job_ids(folder: StatePath) -> tuple[str, ...]:
    return tuple(sorted(name for name in _names(folder) if ID_PATTERN.fullmatch(name)))
