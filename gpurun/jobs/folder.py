"""One job's folder: its spec, its record, requests to end it, and the paths of everything else.

``spec.json`` is written once. ``state.json`` is replaced whole on every change, by the process that carries the job: a
pass under the allocator lock while the job is queued, then its supervisor. ``cancel.json`` is a request to that
process. Only the job's owner or root writes here. Other users can read.
"""

from __future__ import annotations

import stat
from contextlib import suppress

from gpurun.errors import StateError
from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State, check_way
from gpurun.state import durable
from gpurun.state.path import StatePath
from gpurun.state.people import user_name


class JobFolder:
    """One job's files. Cheap to make; nothing is read until asked for."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.id = path.name
        self.log = path / "log"
        self.events = path / "events.jsonl"
        self.outputs = path.plain / "outputs"  # a tree of the job's own making, which may hold links
        self.supervisor_log = path / "supervisor.log"
        self.launch_log = path / "launch.jsonl"
        self._request = path / "cancel.json"

    def spec(self) -> JobSpec:
        """The job's spec. Raises StateError when it is damaged or missing."""
        path = self.path / "spec.json"
        try:
            return durable.read_record(path, JobSpec)
        except FileNotFoundError as error:
            raise StateError("is missing", job=self.id, where=str(path)) from error

    def record(self) -> JobRecord:
        """Where the job stands.

        Raises:
            StateError: the file is damaged or missing, or names another job; or another user than the owner that it
                names can have written it. So nobody can have something run as somebody else.
        """
        path = self.path / "state.json"
        try:
            record = durable.read_record(path, JobRecord)
            folder = self.path.stat()
        except FileNotFoundError as error:
            raise StateError("is missing", job=self.id, where=str(path)) from error
        if record.id != self.id:
            raise StateError(f"names job {record.id[:80]!r}, not its own", where=str(path))
        if record.owner_uid != folder.st_uid:
            raise StateError(
                f"says that it is {user_name(record.owner_uid)}'s, but {user_name(folder.st_uid)} made it",
                where=str(path),
            )
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StateError(
                f"others than {user_name(folder.st_uid)} can write the folder, so it may be anybody's word",
                where=str(self.path), hint="if nobody else has written there: chmod go-w",
            )  # fmt: skip
        return record

    def write(self, record: JobRecord) -> JobRecord:
        """Replace the record, whole."""
        durable.write_record(self.path / "state.json", record)
        return record

    def move(self, state: State, **changes: object) -> JobRecord:
        """Go to `state`, changing fields on the way. Raises StateError if no way leads there."""
        before = self.record()
        check_way(self.id, before.state, state)
        return self.write(before.but(state=state, **changes))

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
