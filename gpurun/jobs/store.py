"""The job store: one folder per job under ``$GPURUN_HOME/jobs`` (`gpurun.jobs.folder` describes its content).

``live/ID`` marks every job that has not ended, so that a pass does not read years of history. gpurun makes the mark
before the job, so a mark without a job means nothing.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from types import MappingProxyType

import msgspec

from gpurun import faults
from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.jobs import attempts
from gpurun.jobs.drafts import AddCode, Alone, Drafts, sweep
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.index import LiveIndex
from gpurun.jobs.live import LiveJob
from gpurun.jobs.meant import Living, meant
from gpurun.jobs.origin import Origin
from gpurun.jobs.record import ID_PATTERN, CancelRequest, JobRecord
from gpurun.jobs.spec import JobSpec, Wants
from gpurun.jobs.states import State
from gpurun.state import audit, durable
from gpurun.state.clock import head_clock
from gpurun.state.path import StatePath
from gpurun.state.people import myself

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
        """Remove leftovers of this user's killed submissions: incomplete jobs, and marks without a job."""
        sweep(self.folder, self.live, now_s=now_s)

    def get(self, job_id: str) -> JobFolder:
        """Return the folder of a known id. Does not check whether it exists."""
        return JobFolder(self.folder / job_id)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all jobs."""
        return _job_ids(_names(self.folder))

    def live_ids(self, *, but: Collection[str] = ()) -> tuple[str, ...]:
        """Return the ids of jobs that may not have ended, without those in `but`."""
        return _job_ids(set(_names(self.live)).difference(but))

    def live_jobs(self, on_problem: Callable[[StateError], None]) -> dict[str, LiveJob]:
        """Return every job that has not ended, by id, in no order.

        Reports and skips a job with a damaged record. Reports a job with a damaged spec, and returns it without wants,
        so that no pass places it without its constraints. Reports and ignores a damaged request.

        Raises:
            StateUnavailable: the state directory cannot be read now.
        """

        def from_files(name: str) -> tuple[LiveJob | None, bool]:
            return _read_live(self.get(name), on_problem) if ID_PATTERN.fullmatch(name) else (None, False)

        jobs, boot = LiveIndex(self.folder.plain, os.environ).read(_names(self.live), from_files), head_clock().boot
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
        """Return the job that `text` means: its id, or what `gpurun.jobs.meant` says. ``@last`` is this user's newest.

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
    request = folder.cancel_request()
    if outcome is State.QUEUED and request is not None and request.kind == "cancel":
        record = folder.write(record.but(reason=request.outcome, code=1))
        outcome = State.CANCELLED
    attempts.keep(folder, record.but(state=outcome, ended_s=now_s, reason=record.last_words()))
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
    attempts.keep(folder, attempts.never_began(record.but(state=State.CANCELLED, **ended)))
    record = folder.move(State.CANCELLED, **ended)
    store.retire(record.id)
    _note_end(store, record)


def _note_end(store: JobStore, record: JobRecord) -> None:
    audit.note(store.home, "end", job=record.id, state=record.state.value, reason=record.reason)


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


def _names(folder: StatePath) -> list[str]:
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
