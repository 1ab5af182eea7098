"""One job's folder: its spec, its record, requests to end it, and the paths of everything else.

``spec.json``, ``origin.json`` and ``code`` (`gpurun.images.code`) are written once. ``state.json`` is replaced whole on
every change, by the process that carries the job: a pass under the allocator lock while the job is queued, then its
supervisor. ``cancel.json`` and ``preempt.json`` are requests to that process. Only the job's owner or root writes here.
Other users can read all but the code.
"""

from __future__ import annotations

import stat
from contextlib import suppress

from gpurun.errors import StateError
from gpurun.jobs.origin import Origin
from gpurun.jobs.record import CancelRequest, JobRecord, RequestKind
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State, check_way
from gpurun.state import durable
from gpurun.state.path import StatePath
from gpurun.state.people import user_name

CODE, ORIGIN = "code", "origin.json"
REQUESTS: tuple[RequestKind, ...] = ("cancel", "preempt")
"""Each has a file of its own; the weightier one first."""


class JobFolder:
    """One job's files. Cheap to make; nothing is read until asked for."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.id = path.name
        self.code = path / CODE
        self.log = path / "log"
        self.events = path / "events.jsonl"
        self.outputs = path.plain / "outputs"  # a tree of the job's own making, which may hold links
        self.supervisor_log = path / "supervisor.log"
        self.launch_log = path / "launch.jsonl"

    def spec(self) -> JobSpec:
        """The job's spec. Raises StateError when it is damaged or missing."""
        path = self.path / "spec.json"
        try:
            return durable.read_record(path, JobSpec)
        except FileNotFoundError as error:
            raise StateError("is missing", job=self.id, where=str(path)) from error

    def origin(self) -> Origin:
        """Where the job comes from; nothing is known of one that an older gpurun has stored. Raises StateError."""
        try:
            return durable.read_record(self.path / ORIGIN, Origin)
        except FileNotFoundError:
            return Origin()

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

    def amend(self, mine: JobRecord, **changes: object) -> JobRecord:
        """Change fields of the record, which is as `mine` but for them. A damaged one is replaced.

        Raises:
            StateError: somebody else has moved the job: both its lease's names were removed, say.
        """
        try:
            now = self.record()
        except StateError:
            now = mine
        if (now.state, now.attempt, now.outcome) != (mine.state, mine.attempt, mine.outcome):
            raise StateError(f"somebody else has moved it: it is {now.state.value}", job=self.id)
        return self.write(mine.but(**changes))

    def move(self, state: State, **changes: object) -> JobRecord:
        """Go to `state`, changing fields on the way. Raises StateError if no way leads there."""
        before = self.record()
        check_way(self.id, before.state, state)
        return self.write(before.but(state=state, **changes))

    def cancel_request(self) -> CancelRequest | None:
        """What somebody asked of this job, if anything: a cancel rather than a preemption.

        A damaged request is none: see `mend_request`.
        """
        for kind in REQUESTS:
            with suppress(FileNotFoundError, StateError):
                return self._read_request(kind)
        return None

    def damaged_request(self) -> StateError | None:
        """What is wrong with a request that there is; None if all are sound, or there is none."""
        return next(filter(None, map(self._damage, REQUESTS)), None)

    def mend_request(self) -> str | None:
        """Set damaged requests aside; what to tell about it. To be called by the job's owner alone.

        Nobody can say what such a one asked for. A gang is not ended on a guess: a preemption will be asked for again,
        and who wanted the end has to say so again.
        """
        return "; ".join(filter(None, map(self._mend, REQUESTS))) or None

    def _mend(self, kind: RequestKind) -> str | None:
        path, damage = self._request(kind), self._damage(kind)
        if damage is None:
            return None
        try:
            aside = durable.set_aside(path)
        except FileNotFoundError:  # another process of the owner's was quicker
            return None
        with suppress(FileNotFoundError, StateError):  # or had just replaced it by a sound one
            sound = durable.read_record(aside, CancelRequest)
            if sound.kind == kind:
                durable.write_record(path, sound)
                aside.unlink()
                return None
        return f"a request to end it was damaged and is kept as {aside.name}; to end it, cancel it again ({damage})"

    def ask_to_cancel(self, request: CancelRequest) -> None:
        """Leave a request for whoever carries the job. A cancel and a preemption have a file each.

        So a preemption that is asked for, or forgotten, at the same moment takes no cancel with it.
        """
        self._mend(request.kind)
        present = self.cancel_request()
        if present is None or present.kind == "preempt":
            durable.write_record(self._request(request.kind), request)

    def clear_preemption(self) -> None:
        """Forget a preemption once it has been carried out; a cancel stays."""
        with suppress(FileNotFoundError, StateError):
            self._read_request("preempt")
            durable.remove(self._request("preempt"))

    def withdraw(self, request: CancelRequest) -> None:
        """Forget a request that was not carried out, unless another one has replaced it."""
        with suppress(FileNotFoundError, StateError):
            if self._read_request(request.kind) == request:
                durable.remove(self._request(request.kind))

    def _request(self, kind: RequestKind) -> StatePath:
        return self.path / f"{kind}.json"

    def _damage(self, kind: RequestKind) -> StateError | None:
        try:
            self._read_request(kind)
        except FileNotFoundError:
            return None
        except StateError as error:
            return error
        return None

    def _read_request(self, kind: RequestKind) -> CancelRequest:
        path = self._request(kind)
        request = durable.read_record(path, CancelRequest)
        if request.kind != kind:
            raise StateError(f"asks for a {request.kind}, which its name does not say", where=str(path))
        return request
