"""Campaigns: their store, the next run, and the measured runs in ``scaling/NAME/samples.jsonl``."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gpurun import faults
from gpurun.content.workdir import kept_code
from gpurun.errors import BadInput, GpurunError, NotYours, StateError, StateUnavailable
from gpurun.head.caretaker import Caretaker
from gpurun.head.spawn import cancel
from gpurun.head.submit import Flags, origin_of, pin, queue_jobs, spec_of
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import read_inventory_bytes
from gpurun.jobs.folder import CODE, JobFolder
from gpurun.jobs.recipe import Recipe
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import DEFAULT_LAUNCHER, JobSpec
from gpurun.jobs.store import AddCode, JobStore
from gpurun.launch.launchers import launcher_of
from gpurun.scaling.model import LinkRates, Sample, decode, encode
from gpurun.state import durable, locks
from gpurun.state.audit import AuditLog
from gpurun.state.caches import new_folder
from gpurun.state.locks import open_own_lock
from gpurun.state.paths import StatePath
from gpurun.state.sharing import StateDirectory
from gpurun.studies.campaign_plan import (
    CAMPAIGN_NAME,
    DONE,
    CampaignPlan,
    Outcome,
    RefusedSize,
    RunKey,
    RunRecord,
    check_name,
    given_for,
    last_values,
    middle,
    rate_of,
    sample_of,
)
from gpurun.supervisor.lines import LogTail

# A campaign's files: ``scaling/NAME`` in the state directory.


class CampaignFolder:
    """One campaign's files. Creating this object reads nothing."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.name = path.name
        self.code = path / CODE

    def plan(self) -> CampaignPlan:
        """Read the campaign's plan. Raises StateError if it is damaged or missing."""
        path = self.path / "plan.json"
        try:
            return durable.read_record(path, CampaignPlan)
        except FileNotFoundError as error:
            raise StateError("the file with the plan of the campaign is missing", where=str(path)) from error

    def record(self, run: RunKey) -> RunRecord | None:
        """Read a run's record; None if the run has not begun. Raises StateError if the file is damaged."""
        try:
            return durable.read_record(self._file(run), RunRecord)
        except FileNotFoundError:
            return None

    def write(self, record: RunRecord) -> None:
        """Replace a run's record. The new record survives a power cut."""
        durable.write_record(self._file(RunKey(record.launcher, record.gpus, record.number)), record)
        faults.point()

    def write_samples(self, plan: CampaignPlan) -> None:
        """Write the measured runs as samples for the cost model."""
        samples = [record.sample for record in self.records(plan) if record.sample is not None]
        durable.write_bytes(self.path / "samples.jsonl", b"".join(map(encode, samples)))

    def records(self, plan: CampaignPlan) -> list[RunRecord]:
        """Read the records of all runs that have begun, in order. Raises StateError if one is damaged."""
        return [record for record in map(self.record, plan.runs()) if record is not None]

    def is_mine(self) -> bool:
        """Return whether only this user can have written the campaign."""
        found = self.path.stat()
        return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Hold the campaign's lock: one command at a time runs its jobs.

        Raises:
            NotYours: the campaign is another user's.
            StateUnavailable: another command runs the campaign.
        """
        if not self.is_mine():
            raise NotYours(
                "the campaign belongs to another user; only its owner may continue the campaign", where=self.name
            )
        descriptor = open_own_lock(self.path / "lock")
        try:
            if not locks.try_take(descriptor):
                raise StateUnavailable(
                    "another command runs the campaign now", where=self.name,
                    hint=f"`gpurun scale show {self.name}` shows the progress of the campaign",
                )  # fmt: skip
            yield
        finally:
            os.close(descriptor)

    def _file(self, run: RunKey) -> StatePath:
        return self.path / "runs" / f"{run.launcher}-{run.gpus}-{run.number}.json"


class CampaignStore:
    """All campaigns of a state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = StatePath(home) / "scaling"

    def create(self, plan: CampaignPlan, add_code: AddCode | None) -> CampaignFolder:
        """Store a new campaign, completely or not at all.

        Raises:
            StateUnavailable: another command has stored a campaign of this name meanwhile.
            StateError: gpurun cannot write the campaign.
        """
        durable.make_folder(self.folder)
        path = self.folder / plan.name
        with new_folder(self.folder) as draft:
            (draft / "runs").mkdir(0o755)
            if add_code is not None:
                add_code(draft / CODE)
            durable.write_record(draft / "plan.json", plan)
            faults.point()
            try:
                draft.rename(path)
            except StateError as error:  # a folder with content is never replaced, so of two commands one fails
                if not path.exists():
                    raise
                raise StateUnavailable(
                    "another command has just started a campaign with this name", where=plan.name,
                    hint=f"run `gpurun scale show {plan.name}` to see the campaign, or choose another name "
                         "with --name NAME",
                ) from error  # fmt: skip
        durable.sync_folder(self.folder)
        return CampaignFolder(path)

    def names(self) -> list[str]:
        """Return the names of all campaigns."""
        try:
            return sorted(name for name in self.folder.names() if CAMPAIGN_NAME.match(name))
        except FileNotFoundError:
            return []

    def find(self, name: str) -> CampaignFolder | None:
        """Return the campaign of this name; None if there is none."""
        return CampaignFolder(self.folder / name) if name in self.names() else None

    def get(self, name: str) -> CampaignFolder:
        """Return the campaign of this name. Raises BadInput if there is none."""
        found = self.find(name)
        if found is None:
            raise BadInput(f"there is no campaign {name[:80]!r}", hint="`gpurun scale list` shows all campaigns")
        return found


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
    found = store.find(plan.name)
    before = None if found is None else found.plan()
    if before is not None and not before.asks_the_same_as(plan):
        raise BadInput(
            f"the campaign {plan.name} exists already, but with another command or other sizes", where="--name",
            hint=f"choose another name; `gpurun scale show {plan.name}` shows the campaign",
        )  # fmt: skip
    pinned, codes = pin(plan.jobs, inventory, home, environ)
    if found is not None and before is not None:
        return found, before.jobs != tuple(pinned)
    top = pinned[0].workdir
    origin = origin_of(None if top is None else Path(top))
    made = store.create(replace(plan, jobs=tuple(pinned), origin=origin), codes.get(pinned[0].code))
    AuditLog(home).note("scale", campaign=plan.name, sizes=[spec.gpus for spec in pinned])
    return made, False


# Run the jobs of a campaign, one after the other, and store the measurements of each.


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


MOST_BYTES = 16 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def samples_file(home: Path, name: str) -> StatePath | None:
    """Return the samples file of a campaign; None if the name is not valid for a campaign."""
    return StatePath(home) / "scaling" / name / "samples.jsonl" if NAME.fullmatch(name) else None


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
    path = samples_file(home, name)
    if path is None:
        return ()
    try:
        with path.reader() as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    return tuple(sample for sample in _decoded(data, str(path)) if sample.launcher in ("", launcher))
