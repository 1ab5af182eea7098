"""Runs the jobs of a campaign, one after the other, and keeps what each measured.

All that is known is in the run's record and in its job. The record names the job before the job is submitted: a
command that follows one that was killed waits for the job that there is, and submits it if there is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gpurun.campaigns.plan import RunKey
from gpurun.campaigns.rates import last_values, middle, rate_of
from gpurun.campaigns.runs import DONE, Outcome, RunRecord, sample_of
from gpurun.campaigns.store import CampaignFolder
from gpurun.errors import BadInput, StateError
from gpurun.head.caretaker import Caretaker
from gpurun.head.requests import cancel
from gpurun.head.submission import queue_jobs
from gpurun.images.code import kept_code
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import JobRecord
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.supervisor.loglines import LogTail

POLL_S = 0.2


class Watcher(Protocol):
    """Shows a person how far a campaign is."""

    def begins(self, run: RunKey, at: int, of: int, left_s: float | None) -> None:
        """A run begins: which of how many, and about how long all that is left takes."""

    def moves(self, record: JobRecord) -> None:
        """Its job has gone to another state."""

    def ends(self, run: RunKey, record: RunRecord) -> None:
        """It has ended."""


class Carrier:
    """Carries one campaign. Its user holds the campaign's lock."""

    def __init__(self, home: Path, folder: CampaignFolder, environ: Mapping[str, str], watcher: Watcher) -> None:
        self._home, self._folder, self._environ, self._watcher = home, folder, environ, watcher
        self._plan = folder.plan()
        self._jobs = JobStore(home)

    def run(self) -> None:
        """Measure what is missing; what has failed or was cancelled runs again.

        Raises:
            BadInput: the recipe reports no rate. What is left would be no different.
            KeyboardInterrupt: Ctrl-C; the running job was cancelled, and has ended unless Ctrl-C came again.
        """
        known = {run: self._folder.record(run) for run in self._plan.runs()}
        missing = [run for run, record in known.items() if record is None or record.outcome not in DONE]
        pace = RunTimes(record for record in known.values() if record is not None)
        for at, run in enumerate(missing):
            self._watcher.begins(run, len(known) - len(missing) + at + 1, len(known), pace.left_s(missing[at:]))
            record = self._carry(run, known[run])
            pace.note(record)
            self._watcher.ends(run, record)
            if record.outcome == "no-rate":
                raise BadInput(record.reason, job=record.job, where=run.words, hint=record.hint or None)

    def _carry(self, run: RunKey, before: RunRecord | None) -> RunRecord:
        """Run one job to its end, or the one that was begun."""
        record = before if before is not None and self._is_open(before) else None
        if record is None:
            record = RunRecord(run.launcher, run.gpus, run.number, self._jobs.new_id())
            self._folder.write(record)
        job = self._jobs.get(record.job)
        try:
            if not job.path.exists():
                self._submit(run, record.job)
            self._wait(job)
        except KeyboardInterrupt:
            if job.path.exists():
                self._cancel(job)
            raise
        done = self._measured(run, record, job)
        self._folder.write(done)
        self._folder.write_samples(self._plan)
        return done

    def _is_open(self, record: RunRecord) -> bool:
        """Whether a run that was begun goes on: its job was not submitted yet, or was not cancelled."""
        job = self._jobs.get(record.job)
        return record.outcome == "open" and not (job.path.exists() and job.record().state is State.CANCELLED)

    def _submit(self, run: RunKey, job: str) -> None:
        spec = self._plan.job(run)
        codes = {spec.code: kept_code(self._folder.code)} if spec.code else {}
        queue_jobs(
            [spec], Path(self._plan.inventory), self._home, self._environ, codes=codes, ids=[job],
            origins=[self._plan.origin],
        )  # fmt: skip

    def _wait(self, job: JobFolder) -> None:
        caretaker, shown = Caretaker(), None
        while True:
            record = job.record()
            if record.state is not shown:
                shown = record.state
                self._watcher.moves(record)
            if record.state.ended:
                return
            caretaker.look([job])
            time.sleep(POLL_S)

    def _cancel(self, job: JobFolder) -> None:
        """End the running job, and wait until its GPUs are free; its run counts for nothing."""
        with suppress(StateError):
            cancel(job, by="its campaign", reason="Ctrl-C", environ=self._environ)
        self._wait(job)

    def _measured(self, run: RunKey, record: RunRecord, job: JobFolder) -> RunRecord:
        """What a job that has ended says of its run."""
        ended, plan = job.record(), self._plan
        done = replace(record, grants=ended.granted, held_s=_held_s(ended), ended_s=ended.ended_s or 0.0)
        if ended.state is not State.SUCCEEDED:
            outcome: Outcome = "cancelled" if ended.state is State.CANCELLED else "failed"
            return replace(done, outcome=outcome, reason=ended.reason or ended.state.value)
        reports = list(LogTail(job.log).new_reports())
        try:
            rate = rate_of(reports, plan.rate)
        except BadInput as error:
            return replace(done, outcome="no-rate", reason=error.message, hint=error.hint or "")
        values = last_values(reports)
        metrics = {name: found for name, ranks in values.items() if (found := middle(ranks)) is not None}
        sample = sample_of(plan.job(run), record.job, done.grants, plan.racks, plan.rates, rate, values)
        return replace(done, outcome="measured", rate=rate, metrics=metrics, sample=sample)


class RunTimes:
    """How long runs take, from those that have ended."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._took_s: list[float] = []
        for record in records:
            self.note(record)

    def note(self, record: RunRecord) -> None:
        """Learn from a run that was measured."""
        if record.outcome == "measured":
            self._took_s.append(record.held_s)

    def left_s(self, runs: list[RunKey]) -> float | None:
        """About how long these take; None before anything was measured."""
        return sum(self._took_s) / len(self._took_s) * len(runs) if self._took_s else None


def _held_s(record: JobRecord) -> float:
    """From the grant to the end: for so long nobody else could have the GPUs."""
    return max(0.0, (record.ended_s or 0.0) - (record.granted_s or record.ended_s or 0.0))
