"""Run the jobs of a campaign, one after the other, and store the measurements of each.

The run's record and its job hold all knowledge. The record contains the job's id before gpurun submits the job. So
after a crash, the next command waits for that job if it exists, and submits it if it does not.
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
    """Shows a person the progress of a campaign."""

    def begins(self, run: RunKey, at: int, of: int, left_s: float | None) -> None:
        """A run begins: run `at` of `of`. `left_s` estimates the time that all remaining runs take."""

    def moves(self, record: JobRecord) -> None:
        """The run's job has a new state."""

    def ends(self, run: RunKey, record: RunRecord) -> None:
        """The run has ended."""


class Carrier:
    """Runs one campaign. The caller holds the campaign's lock."""

    def __init__(self, home: Path, folder: CampaignFolder, environ: Mapping[str, str], watcher: Watcher) -> None:
        self._home, self._folder, self._environ, self._watcher = home, folder, environ, watcher
        self._plan = folder.plan()
        self._jobs = JobStore(home)

    def run(self) -> None:
        """Measure missing runs, and repeat runs that failed or were cancelled.

        Raises:
            BadInput: the recipe reports no rate, so no further run would report one.
            KeyboardInterrupt: after Ctrl-C. The running job was cancelled, and has ended unless the user pressed Ctrl-C
                again.
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
        """Run one job to its end; continue the job of an earlier command if there is one."""
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
        """Return whether to continue an earlier run: its job was not submitted yet, or was not cancelled."""
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
        """Cancel the running job, wait until its GPUs are free, and discard its run."""
        with suppress(StateError):
            cancel(job, by="its campaign", reason="Ctrl-C", environ=self._environ)
        self._wait(job)

    def _measured(self, run: RunKey, record: RunRecord, job: JobFolder) -> RunRecord:
        """Return the run's record, with the measurements of its ended job."""
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
    """Estimates how long runs take, from the runs that have ended."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._took_s: list[float] = []
        for record in records:
            self.note(record)

    def note(self, record: RunRecord) -> None:
        """Add a measured run."""
        if record.outcome == "measured":
            self._took_s.append(record.held_s)

    def left_s(self, runs: list[RunKey]) -> float | None:
        """Estimate how long these runs take; None before the first measurement."""
        return sum(self._took_s) / len(self._took_s) * len(runs) if self._took_s else None


def _held_s(record: JobRecord) -> float:
    """Return the seconds from the grant to the end, in which no other job could have the GPUs."""
    return max(0.0, (record.ended_s or 0.0) - (record.granted_s or record.ended_s or 0.0))
