"""A state directory that cannot be used for a while ends no gang: the supervisor ends, and the job is adopted later."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from gpurun.errors import HostFailure, StateDiskError, StateError, StateUnavailable
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.state import durable
from gpurun.supervisor import life, stop
from gpurun.supervisor.hosts import raise_first
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.log import JobLog
from gpurun.supervisor.verdict.ends import failed

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
BEFORE = (State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING)


@pytest.fixture
def granted(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    store = JobStore(tmp_path / "home")
    folder = store.create(JobSpec("n", "i", 4, ("true",)), inventory=tmp_path / "inventory.yaml", now_s=1.0)
    ((lease, lock),) = Allocator(tmp_path / "home").run_pass(now_s=2.0).granted
    yield tmp_path / "home", folder, lease, lock
    lock.close()


def at(folder, state):
    for step in BEFORE[1 : BEFORE.index(state) + 1]:
        folder.move(step)


@pytest.mark.parametrize("state", BEFORE)
@pytest.mark.parametrize("error", [StateDiskError("full"), StateUnavailable("too many open files")], ids=type)
def test_no_step_decides_that_the_gang_failed(granted, monkeypatch, state, error):
    home, folder, lease, lock = granted
    at(folder, state)

    def step(job):
        raise error

    monkeypatch.setattr(life, "STEPS", {**life.STEPS, state: step})
    with pytest.raises(type(error)):
        life.live(SupervisedJob(home, lease, lock))
    assert folder.record().state is state
    assert LeaseStore(home).read(folder.id) == lease, "it is adopted later"


def test_another_error_still_ends_the_attempt(granted, monkeypatch):
    home, folder, lease, lock = granted
    at(folder, State.PREPARING)

    def step(job):
        raise StateError("damaged")

    monkeypatch.setattr(life, "STEPS", {**life.STEPS, State.PREPARING: step})
    assert life.live(SupervisedJob(home, lease, lock)) is State.FAILED


def test_a_disk_that_is_full_for_real_keeps_the_record(granted, monkeypatch):
    """Every write of the supervisor meets the full disk, as `os.write` tells it."""
    home, folder, lease, lock = granted

    def full(*_):
        raise OSError(28, "No space left on device")

    job = SupervisedJob(home, lease, lock)
    monkeypatch.setattr(durable.os, "write", full)
    with pytest.raises(StateDiskError, match="disk of the state directory is full"):
        life.live(job)
    monkeypatch.undo()
    assert folder.record().state is State.GRANTED


def test_nothing_turns_it_into_a_failure_of_the_job():
    with pytest.raises(StateDiskError):
        raise_first({"h1": StateDiskError("full")})
    with pytest.raises(StateUnavailable):
        raise failed(StateUnavailable("busy"))
    assert failed(HostFailure("gone", host="h1")).end.outcome is State.FAILED


def test_a_lock_that_others_hold_for_too_long_is_one(tmp_path):
    refused = pytest.raises(StateUnavailable, match="waited 0 s for the scheduler's lock")
    with AllocatorLock(tmp_path).held(), refused, AllocatorLock(tmp_path).held(patience_s=0.0):
        pass


def full(*_):
    raise OSError(28, "No space left on device")


def begun_log(job, monkeypatch):
    """The job's log with words that are no whole line yet."""
    job.log_copy._note = job.note
    job.log_copy._log = log = JobLog(job.folder.log, attempt=1, now=lambda: 1.0)
    log.take("stdout", b"2026-11-21T01:02:03.000000001Z first\n")
    log.take_output("h1/0.1.2", 0, "o", 4, b"last")
    monkeypatch.setattr("gpurun.supervisor.log.os", SimpleNamespace(**{**vars(os), "write": full}))
    return log


def test_a_log_that_cannot_be_ended_keeps_no_end_from_being_written(granted, monkeypatch):
    """The end is decided, and what is left of the log does not fit on its disk."""
    home, folder, lease, lock = granted
    at(folder, State.RUNNING)
    job = SupervisedJob(home, lease, lock)
    job.move(State.STOPPING, outcome=State.SUCCEEDED)
    log = begun_log(job, monkeypatch)
    assert stop._finish(job, {}) is State.SUCCEEDED
    assert folder.record().state is State.SUCCEEDED
    assert LeaseStore(home).read(folder.id) is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(log.descriptor)
    assert "gpurun could not write the end of the log: No space left on device" in folder.events.read_text()
    job.log_copy.close()


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "it failed"), OSError(errno.ESTALE, "stale"), StateDiskError("x")]
)
def test_an_end_that_cannot_be_written_once_its_gpus_are_free_is_written_later(granted, monkeypatch, own_copy, error):
    """Nobody else would: the job has no lease any more."""
    home, folder, lease, lock = granted
    at(folder, State.RUNNING)
    job = SupervisedJob(home, lease, lock)
    job.move(State.STOPPING, outcome=State.SUCCEEDED)
    real, waited = stop.finish, []

    def finish(*arguments, **named):
        if len(waited) < 2:
            assert LeaseStore(home).read(folder.id) is None
            raise error
        return real(*arguments, **named)

    monkeypatch.setattr(stop, "finish", finish)
    own_copy(stop, "time", sleep=waited.append)
    assert stop._finish(job, {}) is State.SUCCEEDED
    assert waited == [1.0, 2.0]
    assert folder.record().state is State.SUCCEEDED


def test_what_cannot_be_said_either_keeps_no_end_from_being_written(granted, monkeypatch):
    home, _, lease, lock = granted
    job = SupervisedJob(home, lease, lock)
    begun_log(job, monkeypatch)
    job.log_copy._note = full
    job.log_copy.close()
