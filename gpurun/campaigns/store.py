"""A campaign's files: ``scaling/NAME`` in the state directory.

gpurun writes ``plan.json`` and ``code`` (`gpurun.images.code`) once. ``runs`` has one file for each run, which gpurun
replaces as a whole. ``samples.jsonl`` has the cost model's samples of the measured runs (`gpurun.scaling.measured`).
The command that runs the campaign holds ``lock``. All files belong to the user who began the campaign.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun import faults
from gpurun.campaigns.plan import NAME, CampaignPlan, RunKey
from gpurun.campaigns.runs import RunRecord
from gpurun.errors import BadInput, NotYours, StateError, StateUnavailable
from gpurun.jobs.drafts import AddCode
from gpurun.jobs.folder import CODE
from gpurun.scaling.samples import encode
from gpurun.state import durable, lock
from gpurun.state.drafts import new_folder
from gpurun.state.own_lock import open_own_lock
from gpurun.state.path import StatePath


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
            if not lock.try_take(descriptor):
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
            return sorted(name for name in self.folder.names() if NAME.match(name))
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
