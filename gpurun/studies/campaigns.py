"""Campaigns: their files, how they begin, who runs their jobs, and the samples that they measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

from gpurun.errors import BadInput, GpurunError, NotYours, StateError, StateUnavailable
from gpurun.head.caretaker import Caretaker
from gpurun.head.submit import Flags, origin_of, pin, spec_of
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import read_inventory_bytes
from gpurun.jobs.recipe import Recipe
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import DEFAULT_LAUNCHER, JobSpec
from gpurun.jobs.store import AddCode
from gpurun.launch.launchers import launcher_of
from gpurun.scaling.model import LinkRates, Sample, decode, encode
from gpurun.state import durable
from gpurun.state.audit import AuditLog
from gpurun.state.paths import StatePath
from gpurun.state.sharing import StateDirectory
from gpurun.studies.campaign_plan import (
    CAMPAIGN_NAME,
    DONE,
    CampaignPlan,
    Outcome,
    RefusedSize,
    RunEntry,
    RunRecord,
    check_name,
    end_of_run,
    given_for,
    last_values,
    middle,
    note_run,
    rate_of,
    sample_of,
)
from gpurun.studies.runner import Runner
from gpurun.studies.store import StudyFolder, StudyStore
from gpurun.studies.trials import JournalEntry, Point, Trial
from gpurun.supervisor.lines import LogTail

# A campaign's files: ``scaling/NAME`` in the state directory.


class CampaignFolder(StudyFolder[CampaignPlan]):
    """One campaign's files."""

    kind, plan_type, entry_type, lock_name = "campaign", CampaignPlan, RunEntry, "lock"

    def __init__(self, path: StatePath) -> None:
        super().__init__(path)
        self.samples = path / "samples.jsonl"

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the complete lines of the journal, in order; before them, runs that an older gpurun kept in files."""
        older = self.path / "runs"
        for number, run in enumerate(self.plan().runs() if older.is_dir() else ()):
            with suppress(FileNotFoundError):
                record = durable.read_record(older / f"{run.launcher}-{run.gpus}-{run.number}.json", RunRecord)
                yield RunEntry("asked", record.ended_s, number, job=record.job)
                if record.outcome != "open":
                    yield end_of_run(number, record)
        yield from super().entries()

    def records(self, plan: CampaignPlan) -> list[RunRecord]:
        """Read the records of all runs that have begun, in order."""
        records, runs = dict[int, RunRecord](), list(plan.runs())
        for entry in self.entries():
            note_run(records, runs, entry)
        return [records[number] for number in sorted(records)]

    def write_samples(self, records: Iterable[RunRecord]) -> None:
        """Write the measured runs as samples for the cost model."""
        samples = [record.sample for record in records if record.sample is not None]
        durable.write_bytes(self.samples, b"".join(map(encode, samples)))

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Hold the campaign's lock: one command at a time runs its jobs.

        Raises:
            NotYours: the campaign is another user's.
            StateUnavailable: another command runs the campaign.
        """
        if not self.is_mine():
            raise NotYours(
                "the campaign belongs to another user; only its owner may continue the campaign", where=self.id
            )
        descriptor = self.take_lock()
        if descriptor is None:
            raise StateUnavailable(
                "another command runs the campaign now", where=self.id,
                hint=f"`gpurun scale show {self.id}` shows the progress of the campaign",
            )  # fmt: skip
        try:
            yield
        finally:
            os.close(descriptor)


class CampaignStore(StudyStore[CampaignFolder]):
    """All campaigns of a state directory. A campaign's id is its name."""

    top, folder_type, pattern = "scaling", CampaignFolder, CAMPAIGN_NAME

    def create(self, plan: CampaignPlan, add_code: AddCode | None) -> CampaignFolder:
        """Store a new campaign. Raises StateError as `create_as`."""
        try:
            return self.create_as(plan.name, plan, add_code)
        except StateError as error:
            if plan.name not in self.ids():
                raise
            raise StateUnavailable(
                "another command has just started a campaign with this name", where=plan.name,
                hint=f"run `gpurun scale show {plan.name}` to see the campaign, or choose another name "
                     "with --name NAME",
            ) from error  # fmt: skip

    def find(self, name: str) -> CampaignFolder:
        """Return the campaign of this name. Raises BadInput if there is none."""
        if name not in self.ids():
            raise BadInput(f"there is no campaign {name[:80]!r}", hint="`gpurun scale list` shows all campaigns")
        return self.get(name)


# Begin a campaign: make a job for each size of each launcher, and store the campaign or find an earlier one.


def plan_of(
    recipe: Recipe | None, inventory: Inventory, flags: Flags, *, sizes: Sequence[int], launchers: Sequence[str],
    repeat: int, rate: str | None, rates: LinkRates, name: str | None, told: Callable[[str], None] = lambda _text: None,
) -> CampaignPlan:  # fmt: skip
    """Plan a campaign. Stores nothing.

    Args:
        flags: as for `gpurun.head.submit.spec_of`, without the GPUs and the launcher.
        launchers: empty = the recipe's launcher.
        name: None = the recipe's name.
        told: gets each line about how gpurun read the command, once.

    Raises:
        BadInput, NeverFits: no size can run; or something is wrong with the recipe or a flag.
    """
    jobs: list[JobSpec] = []
    refused: list[RefusedSize] = []
    errors: list[GpurunError] = []
    said = dict[str, None]()
    for launcher in launchers or (None,):
        for gpus in sizes:
            try:
                spec, lines = _job(recipe, inventory, flags, launcher, gpus)
                jobs.append(spec)
                said |= dict.fromkeys(lines)
            except GpurunError as error:
                errors.append(error)
                refused.append(RefusedSize(launcher or "", gpus, error.message, error.exit_code))
    if not jobs:
        raise errors[0]
    for text in said:
        told(text)
    chosen = name or jobs[0].name
    check_name(chosen)
    racks = {host.name: host.rack for host in inventory.hosts}
    return CampaignPlan(chosen, tuple(jobs), inventory.source, repeat, time.time(), tuple(refused), rate, rates, racks)


def _job(
    recipe: Recipe | None, inventory: Inventory, flags: Flags, launcher: str | None, gpus: int
) -> tuple[JobSpec, tuple[str, ...]]:
    named = launcher or str((recipe.given if recipe is not None else {}).get("launcher", DEFAULT_LAUNCHER))
    has_roles = launcher_of(JobSpec("", "", 1, ("true",), launcher=named)).with_roles is not None
    if recipe is not None:
        given = given_for(recipe.given, gpus, has_roles=has_roles, has_knobs=named == DEFAULT_LAUNCHER)
        recipe = replace(recipe, given=given)
    sized = {**flags, "--gpus": ("gpus", gpus), "--launcher": ("launcher", launcher)}
    spec, said = spec_of(recipe, inventory, sized)
    if spec.min_gpus is None:
        return spec, said
    told = "  no job of the campaign is elastic, because each job measures one size"
    return replace(spec, min_gpus=None, reforms=False), (*(text for text in said if "is elastic" not in text), told)


def begin_campaign(
    plan: CampaignPlan, inventory: Inventory, home: Path, environ: Mapping[str, str]
) -> tuple[CampaignFolder, bool]:
    """Store a campaign with the current image and code; or find the campaign of this name, to continue it.

    Returns:
        The campaign; and whether it began with another image or other code, which it keeps.

    Raises:
        BadInput: the campaign of this name runs something else; or an image is not on this machine, or the workdir
            cannot be read.
        StateUnavailable: another command began a campaign of this name at the same moment.
        StateError: gpurun cannot store the campaign.
    """
    StateDirectory(home).enter()
    store = CampaignStore(home)
    before = store.get(plan.name).plan() if plan.name in store.ids() else None
    if before is not None and not before.asks_the_same_as(plan):
        raise BadInput(
            f"the campaign {plan.name} exists already, but with another command or other sizes", where="--name",
            hint=f"choose another name; `gpurun scale show {plan.name}` shows the campaign",
        )  # fmt: skip
    pinned, codes = pin(plan.jobs, inventory, home, environ)
    if before is not None:
        return store.get(plan.name), before.jobs != tuple(pinned)
    top = pinned[0].workdir
    origin = origin_of(None if top is None else Path(top))
    made = store.create(replace(plan, jobs=tuple(pinned), origin=origin), codes.get(pinned[0].code))
    AuditLog(home).note("scale", campaign=plan.name, sizes=[spec.gpus for spec in pinned])
    return made, False


# Run the jobs of a campaign, one after the other, and store the measurements of each.


POLL_S = 0.2


class Watcher(Protocol):
    """Shows a person the progress of a campaign."""

    def begins(self, run: RunRecord, at: int, of: int, left_s: float | None) -> None:
        """A run begins: run `at` of `of`. `left_s` estimates the time that all remaining runs take."""

    def moves(self, record: JobRecord) -> None:
        """The run's job has a new state."""

    def ends(self, run: RunRecord) -> None:
        """The run has ended."""


class Carrier(Runner):
    """Runs one campaign in this process: one run at a time, as a grid whose repetitions are outermost.

    The caller holds the campaign's lock.
    """

    by = "its campaign"
    _folder: CampaignFolder
    _plan: CampaignPlan

    def __init__(self, folder: CampaignFolder, environ: Mapping[str, str], watcher: Watcher) -> None:
        self._plan, self._watcher, self._caretaker = folder.plan(), watcher, Caretaker()
        self._runs = list(self._plan.runs())
        self._records: dict[int, RunRecord] = {}
        self._shown: dict[str, State | None] = {}
        super().__init__(folder, environ)
        again = filter(self._is_to_repeat, list(self._trials.by_number.values()))
        self._add([JournalEntry("again", time.time(), trial.number) for trial in again])

    def run(self) -> None:
        """Measure missing runs, and repeat runs that failed or were cancelled.

        Raises:
            BadInput: the recipe reports no rate, so no further run would report one.
            KeyboardInterrupt: after Ctrl-C. The running job was cancelled, and has ended unless the user pressed Ctrl-C
                again.
        """
        try:
            while not self.step():
                self._pause()
        except KeyboardInterrupt:
            for trial in self._trials.started():
                self._cancel(trial, "Ctrl-C")
                while self._exists(trial.job) and self._end_of(trial) is None:  # its end is not noted: it runs again
                    self._pause()
            raise

    def _pause(self) -> None:
        jobs = (self._store.get(trial.job) for trial in self._trials.started())
        self._caretaker.look(job for job in jobs if job.path.exists())
        time.sleep(POLL_S)

    def _take(self, entry: JournalEntry) -> bool:
        note_run(self._records, self._runs, entry)
        return super()._take(entry)

    def _is_to_repeat(self, trial: Trial) -> bool:
        """Return whether a run was not measured, or a command that somebody ended cancelled its job."""
        if not trial.job or trial.outcome is not None:
            return trial.outcome not in (None, "complete")
        return self._exists(trial.job) and self._store.get(trial.job).record().state is State.CANCELLED

    def _live(self) -> set[str]:
        """Each record is read: the watcher shows its state."""
        return set()

    def _most_open(self) -> int:
        return 1

    def _point_of(self, number: int) -> Point:
        run = self._runs[number]
        return {"launcher": run.launcher, "gpus": run.gpus, "run": run.number}

    def _job_of(self, trial: Trial) -> JobSpec:
        return self._plan.job(self._runs[trial.number])

    def _submit(self) -> None:
        for trial in self._trials.started():
            self._show(trial, None)
        super()._submit()

    def _show(self, trial: Trial, record: JobRecord | None) -> None:
        if trial.job not in self._shown:
            self._shown[trial.job] = None
            at = sum(1 for other in self._trials.by_number.values() if other.job)
            took_s = [record.held_s for record in self._records.values() if record.outcome in DONE]
            left_s = fmean(took_s) * (self._plan.trials - at + 1) if took_s else None
            self._watcher.begins(self._runs[trial.number], at, self._plan.trials, left_s)
        if record is not None and record.state is not self._shown[trial.job]:
            self._shown[trial.job] = record.state
            self._watcher.moves(record)

    def _report(self, problem: GpurunError) -> None:
        """Do not tell: the caretaker starts what does not run."""

    def _judge(self, trial: Trial, record: JobRecord) -> JournalEntry | None:
        self._show(trial, record)
        if not record.state.ended:
            return None
        run = self._measured(self._records[trial.number], record)
        self._folder.write_samples({**self._records, trial.number: run}.values())  # before the journal has the end
        return end_of_run(trial.number, run)

    def _note_ends(self) -> list[JournalEntry]:
        """Note which runs have ended, and show them.

        Raises:
            BadInput: a run reported no rate.
        """
        ended = super()._note_ends()
        for entry in ended:
            record = self._records[entry.trial]
            self._watcher.ends(record)
            if record.outcome == "no-rate":
                raise BadInput(record.reason, job=record.job, where=record.words, hint=record.hint or None)
        return ended

    def _measured(self, record: RunRecord, ended: JobRecord) -> RunRecord:
        """Return the run's record, with the measurements of its ended job."""
        plan = self._plan
        done = replace(record, grants=ended.granted, held_s=_held_s(ended), ended_s=ended.ended_s or 0.0)
        if ended.state is not State.SUCCEEDED:
            outcome: Outcome = "cancelled" if ended.state is State.CANCELLED else "failed"
            return replace(done, outcome=outcome, reason=ended.reason or ended.state.value)
        reports = list(LogTail(self._store.get(record.job).log).new_reports())
        try:
            rate = rate_of(reports, plan.rate)
        except BadInput as error:
            return replace(done, outcome="no-rate", reason=error.message, hint=error.hint or "")
        values = last_values(reports)
        metrics = {name: found for name, ranks in values.items() if (found := middle(ranks)) is not None}
        sample = sample_of(plan.job(record), record.job, done.grants, plan.racks, plan.rates, rate, values)
        return replace(done, outcome="measured", rate=rate, metrics=metrics, sample=sample)


def _held_s(record: JobRecord) -> float:
    """Return the seconds from the grant to the end, in which no other job could have the GPUs."""
    return max(0.0, (record.ended_s or 0.0) - (record.granted_s or record.ended_s or 0.0))


MOST_BYTES = 16 << 20


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Return the samples of a file.

    Raises:
        BadInput: the file is unreadable, or a line is not a sample.
    """
    return _decoded(read_inventory_bytes(path, "measured runs", most_bytes=MOST_BYTES), str(path))


def _decoded(data: bytes, where: str) -> tuple[Sample, ...]:
    if len(data) > MOST_BYTES:
        raise BadInput(f"the file has more than {MOST_BYTES >> 20} MiB of measured runs", where=where)
    return decode(data, where)


def campaign_samples(home: Path, name: str, launcher: str) -> tuple[Sample, ...]:
    """Return the samples of a campaign for one launcher; empty if there are none.

    Raises:
        BadInput: a line is not a sample.
        StateError: the file is unreadable, or a link.
    """
    if not CAMPAIGN_NAME.match(name):
        return ()
    path = CampaignStore(home).get(name).samples
    try:
        with path.reader() as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    return tuple(sample for sample in _decoded(data, str(path)) if sample.launcher in ("", launcher))
