"""The conductor of one sweep: start trials, judge their reports, stop and resume.

It chooses points, submits their jobs, reads their reports, stops weak trials, and records the results. The journal and
the jobs hold all its knowledge, so it may be killed at any moment. A new conductor reads the journal, and submits a job
only if no job has its id.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from pathlib import Path

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
from gpurun.jobs.store import JobStore
from gpurun.state import durable
from gpurun.state.audit import AuditLog
from gpurun.state.clock import Presence
from gpurun.state.paths import StatePath, may_pass
from gpurun.state.sharing import StateDirectory
from gpurun.studies.search import searcher_for
from gpurun.studies.sweep_pictures import add_report
from gpurun.studies.sweep_plan import (
    JournalEntry,
    Metric,
    Outcome,
    Point,
    SweepPlan,
    Trial,
    Trials,
    job_of,
    longest_point,
)
from gpurun.studies.sweep_store import Journal, SweepFolder, SweepStore
from gpurun.supervisor.lines import LogTail, RankReport, Speaker

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
            log = folder.log.open_file(os.O_WRONLY | os.O_APPEND)  # opened anew: a child may keep it open
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
    searcher_for(plan)
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
        if not again and not trials.unended() and len(trials.by_number) >= folder.plan().trials:
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
MOST_AT_ONCE = 32
MOST_WAITING = 16
"""So many trials wait in the queue beyond those that have GPUs: the next one starts as soon as one ends."""
BY = "its sweep"


class Conductor:
    """One running sweep. The caller holds the sweep's lock.

    Raises:
        BadInput: the sweep needs Optuna, which is not installed.
        StateError: its plan is damaged.
    """

    def __init__(
        self, home: Path, folder: SweepFolder, environ: Mapping[str, str], here: Presence | None = None
    ) -> None:
        self._home, self._folder, self._environ = home, folder, environ
        self._here = here or Presence(home)
        self._store = JobStore(home)
        self._plan = folder.plan()
        self._searcher = searcher_for(self._plan)
        self._trials = Trials()
        for entry in folder.entries():
            self._trials.take(entry)
            self._searcher.take(entry)
        self._journal = Journal(folder)
        self._submitted: set[str] = set()
        self._cancelled: set[str] = set()
        self._tails: dict[str, MetricTail] = {}
        self._drawn: tuple[int, Point] | None = None
        self._room = 1

    def run(self) -> None:
        """Run the sweep to its end, or until the state directory is gone for good."""
        wait_s = 0.0
        while not self._here.is_gone():
            time.sleep(wait_s)
            try:
                if self.step():
                    return
                self._folder.say("")
                wait_s = TICK_S
            except OUTLIVED as error:  # a damaged lease, a full disk
                if isinstance(error, RuntimeError) and not may_pass(error):
                    raise
                self._folder.say(words_of(error))  # it is tried again
                wait_s = RETRY_S

    def step(self) -> bool:
        """Do the next steps; return whether the sweep is done."""
        live = set(self._store.live_ids())
        self._read_reports()
        self._note_ends(live)
        is_stopped = self._folder.stop.exists()
        if is_stopped:
            self._end_all()
        else:
            self._ask()
            self._submit(live)
        self._cancel_losers()
        faults.point()
        if self._trials.unended() or not (is_stopped or len(self._trials.by_number) >= self._plan.trials):
            return False
        durable.write_bytes(self._folder.done, b"")
        return True

    def _add(self, entries: Sequence[JournalEntry], *, is_safe: bool = True) -> list[JournalEntry]:
        """Add entries to the journal; return those that require a trial's early stop.

        Raises:
            StateUnavailable: the state directory is away: it looks as if all jobs were removed.
        """
        self._here.check()
        self._journal.add(*entries, is_safe=is_safe)
        losers = []
        for entry in entries:
            self._trials.take(entry)
            if self._searcher.take(entry):
                losers.append(entry)
        return losers

    def _read_reports(self) -> None:
        for trial in self._trials.unended():
            if trial.job:
                self._read(trial)

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

    def _note_ends(self, live: set[str]) -> None:
        ended = []
        for trial in self._trials.unended():
            if trial.job and trial.job not in live and (found := self._ended(trial)) is not None:
                ended.append(found)
                self._tails.pop(trial.job, None)
        if ended:
            self._add(ended)

    def _ended(self, trial: Trial) -> JournalEntry | None:
        """The end of a trial whose job is not live: None if the job was never stored, or has not ended yet."""
        folder, now_s = self._store.get(trial.job), time.time()
        if not folder.path.exists():
            if trial.job not in self._submitted:
                return None
            return JournalEntry(
                "ended", now_s, trial.number, outcome="failed", reason="the job of the trial was removed"
            )
        try:
            record = folder.record()
        except StateUnavailable:  # it says nothing about the record
            raise
        except StateError as error:
            return JournalEntry(
                "ended", now_s, trial.number, outcome="failed", reason=f"the job's record is damaged: {error}"
            )
        if not record.state.ended:
            return None
        self._read(trial)
        tail = self._tails.get(trial.job)
        others = tail.others if tail is not None else ()
        trial = self._trials.by_number[trial.number]
        outcome, reason = outcome_of(trial, record, self._plan.metric, others)
        if (metric := self._plan.metric) and is_silent(trial, record, metric) and self._may_all_be_silent(trial):
            self._folder.stop_itself(why_all_would_fail(trial, reason, metric))  # before the journal has the end
        return JournalEntry("ended", now_s, trial.number, value=trial.value, outcome=outcome, reason=reason)

    def _may_all_be_silent(self, trial: Trial) -> bool:
        """Return whether no trial has reported the metric, and others run or are to come."""
        known = self._trials.by_number
        has_others = len(known) < self._plan.trials or any(other is not trial for other in self._trials.unended())
        return has_others and not any(each.reports for each in known.values())

    def _exists(self, job: str) -> bool:
        return self._store.get(job).path.exists()

    def _ask(self) -> None:
        """Give a job to trials without one, and choose as many new points as there is space for."""
        room = self._free() - sum(1 for trial in self._trials.unended() if trial.job)
        for number, point in islice(self._to_ask(), max(0, min(room, MOST_AT_ONCE))):
            asked = JournalEntry("asked", time.time(), number, job=self._store.new_id(), parameters=point)
            self._add([asked], is_safe=False)
        if room > 0:
            self._journal.sync()

    def _to_ask(self) -> Iterator[tuple[int, Point]]:
        """Yield trials that run again, then new ones. Each is drawn once the study knows those before it."""
        for trial in self._trials.unended():
            if not trial.job:
                yield trial.number, trial.parameters
        for number in range(len(self._trials.by_number), self._plan.trials):
            if self._drawn is None or self._drawn[0] != number:  # else it could not be written into the journal
                self._drawn = number, self._searcher.next_point(number)
            yield self._drawn

    def _free(self) -> int:
        """How many trials may have a job at a time."""
        if self._plan.max_parallel is not None:
            return self._plan.max_parallel
        with suppress(GpurunError, OSError):
            self._room = max(1, load_inventory(Path(self._plan.inventory)).total_gpus // self._plan.template.gpus)
        return self._room + (1 if self._plan.search == "tpe" else min(self._room, MOST_WAITING))

    def _submit(self, live: set[str]) -> None:
        """Queue jobs that the journal names and that do not exist yet; also those of a killed conductor."""
        missing = [trial for trial in self._trials.unended() if trial.job and trial.job not in live | self._submitted]
        new = [trial for trial in missing if not self._exists(trial.job)]
        self._submitted.update(trial.job for trial in missing if trial not in new)
        if not new:
            return
        specs = [job_of(self._plan, self._folder.id, trial.number, trial.parameters) for trial in new]
        self._here.check()  # else it would make another state directory in the place of one that is away
        codes = {self._plan.template.code: kept_code(self._folder.code)} if self._plan.template.code else {}
        done = queue_jobs(
            specs,
            Path(self._plan.inventory),
            self._home,
            self._environ,
            codes=codes,
            ids=[t.job for t in new],
            origins=[self._plan.origin] * len(new),
        )
        self._submitted.update(trial.job for trial in new)
        if done.problem is not None:
            raise done.problem

    def _cancel_losers(self) -> None:
        for trial in self._trials.unended():
            if trial.stopping:
                self._cancel(trial, trial.stopping)

    def _end_all(self) -> None:
        """Stop the sweep: cancel its jobs, and end trials without a job now."""
        now_s = time.time()
        idle = [trial for trial in self._trials.unended() if not trial.job or not self._exists(trial.job)]
        if idle:
            self._add([JournalEntry("ended", now_s, t.number, outcome="cancelled", reason="stopped") for t in idle])
        for trial in self._trials.unended():
            self._cancel(trial, "the sweep was stopped")

    def _cancel(self, trial: Trial, reason: str) -> None:
        if trial.job not in self._cancelled and self._exists(trial.job):
            try:
                cancel(self._store.get(trial.job), by=BY, reason=reason, environ=self._environ)
            except StateUnavailable:
                raise
            except StateError:  # a damaged record: only its supervisor can stop the job
                pass
            self._cancelled.add(trial.job)
