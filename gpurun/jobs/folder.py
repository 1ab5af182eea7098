"""One job's folder: its spec, its record, cancel and preemption requests, and the paths of all other files.

gpurun writes ``spec.json``, ``origin.json`` and ``code`` (`gpurun.images.code`) once. It replaces ``state.json`` as a
whole on every change: while the job is queued, a pass does so under the allocator lock, then its supervisor.
``cancel.json``, ``drain.json`` and ``preempt.json`` are requests to the supervisor. Only the job's owner or root writes
here. Other users can read everything except the code.
"""

from __future__ import annotations

import stat
from contextlib import suppress
from typing import Literal

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.origin import Origin
from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State, check_way
from gpurun.state import durable
from gpurun.state.clock import head_clock
from gpurun.state.path import StatePath
from gpurun.state.people import user_name

CODE, ORIGIN = "code", "origin.json"
RequestFile = Literal["cancel", "drain", "preempt"]
REQUESTS: tuple[RequestFile, ...] = ("cancel", "drain", "preempt")
"""The files of requests; the weightier one first. A drain's cancel has its own: the drain's end withdraws no other."""


class JobFolder:
    """One job's files. Creating this object reads nothing."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.id = path.name
        self.code = path / CODE
        self.log = path / "log"
        self.events = path / "events.jsonl"
        self.outputs = path.plain / "outputs"  # a tree of the job's own making, which may hold links
        self.supervisor_log = path / "supervisor.log"

    def spec(self) -> JobSpec:
        """Read the job's spec. Raises StateError if it is damaged or missing."""
        path = self.path / "spec.json"
        try:
            return durable.read_record(path, JobSpec)
        except FileNotFoundError as error:
            raise StateError("the file with the job's settings is missing", job=self.id, where=str(path)) from error

    def origin(self) -> Origin:
        """Read where the job comes from; empty if an older gpurun stored the job. Raises StateError."""
        try:
            return durable.read_record(self.path / ORIGIN, Origin)
        except FileNotFoundError:
            return Origin()

    def record(self) -> JobRecord:
        """Read the job's record, with its times by this process's clock.

        Raises:
            StateError: the file is damaged or missing, or names another job; or another user than the named owner can
                have written it. So no user can make another user run something.
        """
        path = self.path / "state.json"
        try:
            record = durable.read_record(path, JobRecord)
            folder = self.path.stat()
        except FileNotFoundError as error:
            raise StateError("the file with the job's state is missing", job=self.id, where=str(path)) from error
        if record.id != self.id:
            raise StateError(
                f"the file must contain the state of {self.id}, but contains the state of {record.id[:80]!r}",
                where=str(path),
            )
        if record.owner_uid != folder.st_uid:
            raise StateError(
                f"the record says that {user_name(record.owner_uid)} owns the job, "
                f"but {user_name(folder.st_uid)} made the job's folder",
                where=str(path),
            )
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StateError(
                f"users other than {user_name(folder.st_uid)} can write to the job's folder, so gpurun "
                "trusts none of its files",
                where=str(self.path), hint="check that no other user has written to the folder, then run chmod go-w on "
                                           "the folder",
            )  # fmt: skip
        return record.on(head_clock().boot)

    def write(self, record: JobRecord) -> JobRecord:
        """Replace the record as a whole. The file's times are by the wall clock of now; those returned, as given."""
        clock = head_clock()
        durable.write_record(self.path / "state.json", record.on(clock.boot_now()))
        return record.on(clock.boot)

    def amend(self, mine: JobRecord, **changes: object) -> JobRecord:
        """Change fields of the record, which is otherwise equal to `mine`. Replaces a damaged record.

        Raises:
            StateError: another process has changed the job's state, for example because both links of its lease were
                removed.
        """
        try:
            now = self.record()
        except StateError:
            now = mine
        if (now.state, now.attempt, now.outcome) != (mine.state, mine.attempt, mine.outcome):
            raise StateError(
                f"another process has changed the job: the job's state is now {now.state.value}", job=self.id
            )
        return self.write(mine.but(**changes))

    def move(self, state: State, **changes: object) -> JobRecord:
        """Change the state to `state`, and other fields with it. Raises StateError if this change is not allowed."""
        before = self.record()
        check_way(self.id, before.state, state)
        return self.write(before.but(state=state, **changes))

    def cancel_request(self) -> CancelRequest | None:
        """Return the request about this job, if there is one; a cancel takes precedence over a preemption.

        Ignores a damaged request: see `mend_request`.
        """
        for name in REQUESTS:
            with suppress(FileNotFoundError, StateError):
                return self._read_request(name)
        return None

    def damaged_request(self) -> StateError | None:
        """Return the damage of a request; None if there is no damaged request."""
        return next(filter(None, map(self._damage, REQUESTS)), None)

    def mend_request(self) -> str | None:
        """Set damaged requests aside; return a message about them. Only the job's owner calls this.

        gpurun cannot read what a damaged request wanted, and stops no gang on a guess. The pass will ask for a
        preemption again; a person must repeat a cancel.
        """
        return "; ".join(filter(None, map(self._mend, REQUESTS))) or None

    def _mend(self, name: RequestFile) -> str | None:
        path, damage = self._request(name), self._damage(name)
        if damage is None:
            return None
        try:
            aside = durable.set_aside(path)
        except FileNotFoundError:  # another process of the owner's was quicker
            return None
        with suppress(FileNotFoundError, StateError):  # or had just replaced it by a sound one
            sound = durable.read_record(aside, CancelRequest)
            if _has_place(sound, name):
                durable.write_record(path, sound)
                aside.unlink()
                return None
        return (
            f"a request to end the job was damaged ({damage}); gpurun renamed its file to {aside.name}. To "
            "end the job, cancel the job again"
        )

    def ask_to_cancel(self, request: CancelRequest) -> None:
        """Write a request for the job's supervisor. A person's cancel, a drain's and a preemption have separate files.

        So writing or removing one never removes another that is made at the same moment.
        """
        name = _file_of(request)
        self._mend(name)
        present = self.cancel_request()
        if present is None or present.kind == "preempt" or REQUESTS.index(name) < REQUESTS.index(_file_of(present)):
            durable.write_record(self._request(name), request)

    def clear_preemption(self) -> None:
        """Remove a preemption request after it was carried out; a cancel stays."""
        with suppress(FileNotFoundError, StateError):
            self._read_request("preempt")
            durable.remove(self._request("preempt"))

    def withdraw(self, request: CancelRequest) -> None:
        """Remove a request that was not carried out, unless another one has replaced it."""
        with suppress(FileNotFoundError, StateError):
            if self._read_request(_file_of(request)) == request:
                durable.remove(self._request(_file_of(request)))

    def _request(self, name: RequestFile) -> StatePath:
        return self.path / f"{name}.json"

    def _damage(self, name: RequestFile) -> StateError | None:
        try:
            self._read_request(name)
        except FileNotFoundError:
            return None
        except StateUnavailable:  # it says nothing about the file
            return None
        except StateError as error:
            return error
        return None

    def _read_request(self, name: RequestFile) -> CancelRequest:
        path = self._request(name)
        request = durable.read_record(path, CancelRequest)
        if not _has_place(request, name):
            raise StateError(f"the file holds a request of the wrong kind: {request.kind}", where=str(path))
        return request


def _file_of(request: CancelRequest) -> RequestFile:
    return "drain" if request.kind == "cancel" and request.drain else request.kind


def _has_place(request: CancelRequest, name: RequestFile) -> bool:
    return name == _file_of(request)
