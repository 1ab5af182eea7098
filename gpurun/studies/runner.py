"""Run the trials of sweeps and campaigns: give each a job, submit the job, and note how the trial ended.

The journal and the jobs hold all knowledge, so a runner may be killed at any moment. The next one reads the journal,
and submits a job only if no job has its id. The conductor of a sweep is a runner that also chooses points, reads and
judges reports, and stops weak trials.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurun import faults
from gpurun.content.build import Report
from gpurun.content.workdir import kept_code
from gpurun.errors import OUTLIVED, BadInput, GpurunError, StateError, StateUnavailable, words_of
from gpurun.head import children
from gpurun.head.spawn import cancel
from gpurun.head.submit import origin_of, pin, queue_jobs
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import load_inventory
from gpurun.jobs.recipe import check_length
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state import durable
from gpurun.state.audit import AuditLog
from gpurun.state.clock import Presence
from gpurun.state.paths import StatePath, may_pass
from gpurun.state.sharing import StateDirectory
from gpurun.studies.search import Searcher
from gpurun.studies.store import Journal, StudyFolder, SweepFolder, SweepStore
from gpurun.studies.sweep_pictures import add_report
from gpurun.studies.sweep_plan import SweepPlan, job_of, longest_point
from gpurun.studies.trials import JournalEntry, Metric, Outcome, Point, Trial, Trials
from gpurun.supervisor.lines import LogTail, RankReport, Speaker

if TYPE_CHECKING:
    from gpurun.studies.campaign_plan import CampaignPlan

MOST_AT_ONCE = 32


class Runner(ABC):
    """One running sweep or campaign. The caller holds its lock. Subclasses choose trials and judge their ends.

    Args:
        here: the state directory, known since the lock was taken.

    Raises:
        StateError: its journal cannot be read.
    """

    by: str
    """Who cancels jobs, in words for people."""

    _plan: SweepPlan | CampaignPlan

    def __init__(self, folder: StudyFolder[Any], environ: Mapping[str, str], here: Presence | None = None) -> None:
        self._home, self._folder, self._environ = folder.path.home, folder, environ
        self._here = here or Presence(self._home)
        self._store = JobStore(self._home)
        self._trials = Trials()
        for entry in folder.entries():
            if 0 <= entry.trial < self._plan.trials:  # else its line is damaged
                self._take(entry)
        self._journal = Journal(folder)
        self._submitted: set[str] = set()
        self._cancelled: set[str] = set()

    @abstractmethod
    def _point_of(self, number: int) -> Point:
        """Return the parameters of the next new trial."""

    @abstractmethod
    def _most_open(self) -> int:
        """Return how many trials may have a job at a time."""

    @abstractmethod
    def _job_of(self, trial: Trial) -> JobSpec:
        """Return the job of a trial."""

    @abstractmethod
    def _judge(self, trial: Trial, record: JobRecord) -> JournalEntry | None:
        """Return the end of a trial; None if its job has not ended."""

    def _live(self) -> set[str]:
        """Return jobs whose records need no look: they have not ended."""
        return set(self._store.live_ids())

    def step(self) -> bool:
        """Do the next steps; return whether all trials are over."""
        self._note_ends()
        is_stopped = self._is_stopped()
        if not is_stopped:
            self._ask()
            self._submit()
        faults.point()
        return not self._trials.unended() and (is_stopped or not self._trials.missing(self._plan.trials))

    def _is_stopped(self) -> bool:
        """Return whether no trial may begin, and see to it that all end."""
        return False

    def _take(self, entry: JournalEntry) -> bool:
        """Process one entry, also of an earlier runner; return whether it requires the trial's early stop."""
        self._trials.take(entry)
        return False

    def _add(self, entries: Sequence[JournalEntry], *, is_safe: bool = True) -> list[JournalEntry]:
        """Add entries to the journal; return those that require a trial's early stop.

        Raises:
            StateUnavailable: the state directory is away: it looks as if all jobs were removed.
        """
        self._here.check()
        self._journal.add(*entries, is_safe=is_safe)
        return [entry for entry in entries if self._take(entry)]

    def _note_ends(self) -> list[JournalEntry]:
        """Note which trials have ended; return their ends."""
        live = self._live()
        over = [self._end_of(trial) for trial in self._trials.started() if trial.job not in live]
        ended = [entry for entry in over if entry is not None]
        if ended:
            self._add(ended)
        return ended

    def _end_of(self, trial: Trial) -> JournalEntry | None:
        """The end of a trial: None if its job was never stored, or has not ended yet."""
        folder = self._store.get(trial.job)
        if not folder.path.exists():
            return _failed(trial, "the job of the trial was removed") if trial.job in self._submitted else None
        try:
            record = folder.record()
        except StateUnavailable:  # it says nothing about the record
            raise
        except StateError as error:
            return _failed(trial, f"the job's record is damaged: {error}")
        return self._judge(trial, record)

    def _exists(self, job: str) -> bool:
        return self._store.get(job).path.exists()

    def _ask(self) -> None:
        """Choose as many trials as there is space for, and give each a job."""
        room = self._most_open() - len(self._trials.started())
        for number, point in islice(self._to_ask(), max(0, min(room, MOST_AT_ONCE))):
            asked = JournalEntry("asked", time.time(), number, job=self._store.new_id(), parameters=point)
            self._add([asked], is_safe=False)
        if room > 0:
            self._journal.sync()

    def _to_ask(self) -> Iterator[tuple[int, Point]]:
        """Yield trials that run again, then new ones. Each is drawn once those before it have a job."""
        for trial in self._trials.unended():
            if not trial.job:
                yield trial.number, trial.parameters
        for number in self._trials.missing(self._plan.trials):
            yield number, self._point_of(number)

    def _submit(self) -> None:
        """Queue jobs that the journal names and that do not exist yet; also those of a killed runner.

        A mark in `live` proves nothing: a killed submission may have left it.
        """
        missing = [trial for trial in self._trials.started() if trial.job not in self._submitted]
        new = [trial for trial in missing if not self._exists(trial.job)]
        self._submitted.update(trial.job for trial in missing if trial not in new)
        if not new:
            return
        specs = list(map(self._job_of, new))
        self._here.check()  # else it would make another state directory in the place of one that is away
        codes = {code: kept_code(self._folder.code) for code in {spec.code for spec in specs} - {""}}
        done = queue_jobs(
            specs, Path(self._plan.inventory), self._home, self._environ, codes=codes,
            ids=[trial.job for trial in new], origins=[self._plan.origin] * len(new),
        )  # fmt: skip
        self._submitted.update(trial.job for trial in new)
        if done.problem is not None:
            self._report(done.problem)

    def _report(self, problem: GpurunError) -> None:
        """Tell the user why jobs, which are queued, may start later."""
        raise problem

    def _cancel(self, trial: Trial, reason: str) -> None:
        if trial.job not in self._cancelled and self._exists(trial.job):
            try:
                cancel(self._store.get(trial.job), by=self.by, reason=reason, environ=self._environ)
            except StateUnavailable:
                raise
            except StateError:  # a damaged record: only its supervisor can stop the job
                pass
            self._cancelled.add(trial.job)


def _failed(trial: Trial, reason: str) -> JournalEntry:
    return JournalEntry("ended", time.time(), trial.number, outcome="failed", reason=reason)


# Starting the conductors of sweeps: detached processes that inherit their sweep's lock.


@dataclass(frozen=True)
class Conductors:
    """The conductors of sweeps: detached processes that inherit their sweep's lock.

    Attributes:
        environ: the environment of processes that it starts.
    """

    home: Path
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def ensure(self) -> None:
        """Start the conductor of each sweep of this user that is not done and has none. Quick if there is nothing to
        do.
        """
        for folder in SweepStore(self.home).unfinished():
            with suppress(StateError, FileNotFoundError):
                if (descriptor := folder.take_lock()) is not None:
                    self._start(folder, descriptor)

    def _start(self, folder: SweepFolder, descriptor: int) -> None:
        """The lock passes to the conductor without a moment in between."""
        faults.point()
        try:
            log = folder.lock.open_file(os.O_WRONLY | os.O_APPEND)  # opened anew: a child may keep it open
            try:
                children.start_detached(
                    "gpurun.studies.sweep_main", folder.id, str(descriptor), home=self.home, environ=self.environ,
                    lock=descriptor, log=log,
                )  # fmt: skip
            finally:
                os.close(log)
        finally:
            os.close(descriptor)
        faults.point()


# What the end of a trial's job means for the trial. Pure.


def is_silent(trial: Trial, record: JobRecord, metric: Metric | None) -> bool:
    """Return whether a trial's job succeeded without a report of the metric."""
    is_whole = record.state is State.SUCCEEDED and not trial.stopping
    return metric is not None and is_whole and trial.step is None


def why_all_would_fail(trial: Trial, reason: str, metric: Metric) -> str:
    """Say why a sweep stops at its first trial without the metric, and what the program must do."""
    name = metric.name
    given = f"{name}=…" if name.isidentifier() else f"**{{{name!r}: …}}"
    return (
        f"the sweep stopped itself, because each trial would fail like trial {trial.number}: {reason}. "
        f"Call gpurun.report(step, {given}) in the program, or name a metric that the program reports"
    )


def outcome_of(trial: Trial, record: JobRecord, metric: Metric | None, others: Collection[str] = ()
) -> tuple[Outcome, str]:  # fmt: skip
    """The outcome of a trial whose job has ended, and why.

    Args:
        others: names of other metrics that it reported.
    """
    if trial.stopping:
        return "pruned", trial.stopping
    if record.state is not State.SUCCEEDED:
        return "cancelled" if record.state is State.CANCELLED else "failed", record.reason
    if metric is None:
        return "complete", ""
    if is_silent(trial, record, metric):
        told = f"; the job reported {', '.join(sorted(others))}" if others else ""
        return "failed", f"the job ended with exit code 0 and never reported {metric.name}{told}"
    if trial.value is None:
        return "failed", f"{metric.name} is not a number at step {trial.step}"
    return "complete", ""


# What the ranks of a trial report of the sweep's metric, as the job's log has it.


MOST_OTHERS, MOST_NAME = 5, 64
Known = tuple[int, float | None]


class MetricTail:
    """Reads one job's reports as they come.

    The log alone decides which reports count: those of a `Speaker`, of which a later one may replace earlier ones
    (`add_report`). So each conductor comes to the same result.

    Args:
        known: the newest report that the journal has, its step and its value; None = the journal has none.
    """

    def __init__(self, log: StatePath, metric: str, known: Known | None) -> None:
        self._tail = LogTail(log)
        self._metric = metric
        self._speaker = Speaker()
        self._known = known
        self.others: set[str] = set()
        """Names of other metrics that were reported, some of them."""

    def new(self) -> list[Known]:
        """Return the steps and values that came since, without those that were replaced meanwhile.

        The value is None for what is not a finite number. A step may be lower than an earlier one: then it replaces
        the earlier reports from this step on.
        """
        news: list[RankReport] = []
        for report in self._tail.new_reports():
            if self._metric not in report.metrics:
                if len(self.others) < MOST_OTHERS:
                    self.others.update(name[:MOST_NAME] for name in list(report.metrics)[:MOST_OTHERS])
            elif self._speaker.counts(report):
                add_report(news, report)
                if self._known == self._shown(report):
                    news.clear()
        self._known = None
        return list(map(self._shown, news))

    def _shown(self, report: RankReport) -> Known:
        value = report.metrics[self._metric]
        return report.step, value if isfinite(value) else None


# Store a new sweep and start it; restart a stopped one.


def submit_sweep(
    plan: SweepPlan,
    inventory: Inventory,
    store: SweepStore,
    environ: Mapping[str, str],
    on_build: Report = lambda *_: None,
) -> SweepFolder:
    """Store a sweep, with its job's image and code as they are now, and start its conductor.

    Raises:
        BadInput: the sweep needs Optuna which is not installed, or its parameters make a command too long; an image is
            not on this machine, or the workdir cannot be read.
        StateError: it cannot be stored.
    """
    StateDirectory(store.home).enter()
    Searcher(plan)
    check_length(job_of(plan, "s-00000000", plan.trials, longest_point(plan)))
    (pinned,), codes = pin([plan.template], inventory, store.home, environ, on_build)
    origin = origin_of(None if pinned.workdir is None else Path(pinned.workdir))
    folder = store.create(replace(plan, template=pinned, origin=origin), codes.get(pinned.code))
    AuditLog(store.home).note("sweep", sweep=folder.id, name=plan.name, trials=plan.trials)
    Conductors(store.home, environ).ensure()
    return folder


def reopen(folder: SweepFolder, *, also_failed: bool) -> int:
    """Continue an ended sweep; return how many trials run again.

    Raises:
        BadInput: its conductor lives, or nothing is left to do.
    """
    descriptor = folder.take_lock()
    if descriptor is None:
        raise BadInput(f"{folder.id} has not ended", hint=f"stop the sweep first: gpurun sweep stop {folder.id}")
    try:
        outcomes: tuple[Outcome, ...] = ("cancelled", "failed") if also_failed else ("cancelled",)
        trials, now_s = folder.trials(), time.time()
        again = [JournalEntry("again", now_s, t.number) for t in trials.by_number.values() if t.outcome in outcomes]
        if not again and not trials.unended() and not trials.missing(folder.plan().trials):
            raise BadInput(f"all trials of {folder.id} have ended", hint="--failed runs the failed trials again")
        journal = Journal(folder)
        try:
            journal.add(*again)
        finally:
            journal.close()
        folder.stop.unlink(missing_ok=True)
        folder.done.unlink(missing_ok=True)
        return len(again)
    finally:
        os.close(descriptor)


TICK_S = 0.5
RETRY_S = 15.0
MOST_WAITING = 16
"""So many trials wait in the queue beyond those that have GPUs: the next one starts as soon as one ends."""


def conduct(folder: SweepFolder, environ: Mapping[str, str], here: Presence) -> None:
    """Run a sweep to its end, or until the state directory is gone for good. What fails is tried again.

    Raises:
        BadInput, StateError: as `Conductor`.
    """
    conductor: Conductor | None = None
    while not here.is_gone():
        try:
            if conductor is None:
                here.check()
                StateDirectory(folder.path.home).enter()
                conductor = Conductor(folder, environ, here)
            if conductor.step():
                return
            folder.say("")
            wait_s = TICK_S
        except OUTLIVED as error:  # a damaged lease, a full disk
            is_fatal = isinstance(error, RuntimeError) if conductor is not None else not here.is_away()
            if is_fatal and not may_pass(error):
                raise
            folder.say(words_of(error))
            wait_s = RETRY_S
        time.sleep(wait_s)


class Conductor(Runner):
    """One running sweep. The caller holds the sweep's lock.

    Raises:
        BadInput: the sweep needs Optuna, which is not installed.
        StateError: its plan is damaged.
    """

    by = "its sweep"
    _folder: SweepFolder
    _plan: SweepPlan

    def __init__(self, folder: SweepFolder, environ: Mapping[str, str], here: Presence | None = None) -> None:
        self._plan = folder.plan()
        self._searcher = Searcher(self._plan)
        self._tails: dict[str, MetricTail] = {}
        self._room = 1
        super().__init__(folder, environ, here)

    def step(self) -> bool:
        """Do the next steps; return whether the sweep is done."""
        for trial in self._trials.started():
            self._read(trial)
        is_done = super().step()
        for trial in self._trials.unended():
            if trial.stopping:
                self._cancel(trial, trial.stopping)
        if is_done:
            durable.write_bytes(self._folder.done, b"")
        return is_done

    def _take(self, entry: JournalEntry) -> bool:
        super()._take(entry)
        return self._searcher.take(entry)

    def _read(self, trial: Trial) -> None:
        """Note what a trial has reported, and that it loses if it does."""
        metric = self._plan.metric
        if metric is None:
            return
        tail = self._tails.get(trial.job)
        if tail is None:
            log = self._store.get(trial.job).log
            known = None if trial.step is None else (trial.step, trial.value)
            tail = self._tails[trial.job] = MetricTail(log, metric.name, known)
        now_s = time.time()
        try:
            news = [JournalEntry("reported", now_s, trial.number, step=step, value=value) for step, value in tail.new()]
            losers = self._add(news, is_safe=False) if news else []
        except (StateError, OSError):
            self._tails.pop(trial.job)  # the next tail reads them again
            raise
        if losers and not self._trials.by_number[trial.number].stopping:
            lost = losers[0]
            shown = "not a number" if lost.value is None else f"{lost.value:g}"
            reason = f"stopped early: {metric.name} was {shown} at step {lost.step}"
            self._add([JournalEntry("stopping", time.time(), trial.number, reason=reason)])

    def _judge(self, trial: Trial, record: JobRecord) -> JournalEntry | None:
        if not record.state.ended:
            return None
        self._read(trial)
        tail = self._tails.pop(trial.job, None)
        others = tail.others if tail is not None else ()
        trial = self._trials.by_number[trial.number]
        outcome, reason = outcome_of(trial, record, self._plan.metric, others)
        if (metric := self._plan.metric) and is_silent(trial, record, metric) and self._may_all_be_silent(trial):
            self._folder.stop_itself(why_all_would_fail(trial, reason, metric))  # before the journal has the end
        return JournalEntry("ended", time.time(), trial.number, value=trial.value, outcome=outcome, reason=reason)

    def _may_all_be_silent(self, trial: Trial) -> bool:
        """Return whether no trial has reported the metric, and others run or are to come."""
        known = self._trials.by_number
        has_others = len(known) < self._plan.trials or any(other is not trial for other in self._trials.unended())
        return has_others and not any(each.reports for each in known.values())

    def _is_stopped(self) -> bool:
        """If the sweep is stopped, cancel its jobs, and end trials without a job now."""
        if not self._folder.stop.exists():
            return False
        now_s = time.time()
        idle = [trial for trial in self._trials.unended() if not trial.job or not self._exists(trial.job)]
        if idle:
            self._add([JournalEntry("ended", now_s, t.number, outcome="cancelled", reason="stopped") for t in idle])
        for trial in self._trials.unended():
            self._cancel(trial, "the sweep was stopped")
        return True

    def _point_of(self, number: int) -> Point:
        return self._searcher.next_point(number)

    def _most_open(self) -> int:
        if self._plan.max_parallel is not None:
            return self._plan.max_parallel
        with suppress(GpurunError, OSError):
            self._room = max(1, load_inventory(Path(self._plan.inventory)).total_gpus // self._plan.template.gpus)
        return self._room + (1 if self._plan.search == "tpe" else min(self._room, MOST_WAITING))

    def _job_of(self, trial: Trial) -> JobSpec:
        return job_of(self._plan, self._folder.id, trial.number, trial.parameters)
