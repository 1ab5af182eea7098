"""What follows the end of an attempt: each step is done although another one fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpurun.errors import BadInput, StateDiskError, StateError, StateUnavailable
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore, finish
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.supervisor import __main__ as process

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: e}
fabrics: {e: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}, h2: {}}}}
"""


@pytest.fixture
def running(tmp_path):
    """A running job, its lease and the lease's lock."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    store = JobStore(tmp_path / "home")
    folder = store.create(JobSpec("n", "i", 4, ("true",)), inventory=tmp_path / "inventory.yaml", now_s=1.0)
    ((lease, lock),) = Allocator(store.home).run_pass(now_s=2.0).granted
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state)
    return folder, lease, lock


@pytest.fixture
def done(monkeypatch):
    """What was done after the end; the attempt ends as `outcome` says."""
    said = []
    monkeypatch.setattr(process.children, "start_detached", lambda *_, **__: None)  # no process begins
    monkeypatch.setattr(process.Head, "ensure_waiter", lambda *_: said.append("waiter"))
    monkeypatch.setattr(process, "tell_end", lambda _: said.append("people are told"))
    monkeypatch.setattr(process, "keep_asking", lambda *_: said.append("lost hosts are fenced"))
    monkeypatch.setattr(process.JobHistory, "collect", lambda _: said.append("history"))
    return said


def ends(monkeypatch, outcome, *, lost=False):
    def live(job):
        job.move(State.STOPPING, outcome=outcome, reason="r", code=1)
        with AllocatorLock(job.home).held():
            if lost:
                job.lost = job.leases.abandon(job.lock, job.lease, {job.hosts[0]})
            else:
                job.leases.release(job.lock)
            job.record = finish(job.store, job.record, now_s=3.0)
        return job.record.state

    monkeypatch.setattr(process, "live", live)


def carry(running):
    folder, _lease, lock = running
    process.carry(folder.path.home, lock)
    return folder.record().state


def test_somebodys_damaged_lease_costs_nobody_a_message_and_no_job_its_waiter(running, done, monkeypatch, capfd):
    ends(monkeypatch, State.QUEUED)
    (running[0].path.home / "leases" / "j-deadbeef.json").write_text("{")
    assert carry(running) is State.QUEUED
    assert done == ["waiter", "history", "people are told"]
    assert "j-deadbeef" in capfd.readouterr().err


def test_lost_hosts_are_fenced_though_a_lease_is_damaged(running, done, monkeypatch):
    ends(monkeypatch, State.SUCCEEDED, lost=True)
    (running[0].path.home / "leases" / "j-deadbeef.json").write_text("{")
    carry(running)
    assert done == ["history", "people are told", "lost hosts are fenced"]


@pytest.mark.parametrize("error", [StateError("x"), OSError(errno.EMFILE, "no files"), ZeroDivisionError("a defect")])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(process.Head, "run_pass"), (process.Head, "ensure_waiter"), (process.JobHistory, "collect"),
     (process, "tell_end")],
)  # fmt: skip
def test_each_step_is_done_though_another_fails(running, done, monkeypatch, owner, name, error):
    def fails(*_, **__):
        done.append("fails")
        raise error

    ends(monkeypatch, State.QUEUED)
    monkeypatch.setattr(process.Head, "run_pass", lambda *_, **__: None)  # or a supervisor lives on
    monkeypatch.setattr(owner, name, fails)
    carry(running)
    everything = {"waiter", "history", "people are told", "fails"}
    left = {"ensure_waiter": "waiter", "collect": "history", "tell_end": "people are told"}.get(name)
    assert set(done) == everything - {left}


@pytest.fixture
def pauses(monkeypatch, own_copy):
    waited = []
    own_copy(process, "time", sleep=waited.append)
    return waited


SHORT = [
    StateDiskError("x: the disk is full"), OSError(errno.EMFILE, "is full"), OSError(errno.EAGAIN, "is full"),
    MemoryError("is full"), RuntimeError("can't start new thread: is full"),
]  # fmt: skip


@pytest.mark.parametrize("error", SHORT)
def test_a_supervisor_waits_for_a_state_directory_that_cannot_be_used(running, done, pauses, monkeypatch, capfd, error):
    """It begins anew with what is in the files, and holds the lease meanwhile."""
    folder, lease, _ = running
    ends(monkeypatch, State.SUCCEEDED)
    real, tries = process.live, []

    def live(job):
        tries.append(job)
        assert LeaseStore(folder.path.home).is_alive(lease.job)
        if len(tries) < 4:
            raise error
        return real(job)

    monkeypatch.setattr(process, "live", live)
    assert carry(running) is State.SUCCEEDED
    assert pauses == [1.0, 2.0, 4.0]
    assert len({id(job) for job in tries}) == 4
    assert capfd.readouterr().err.count("is full") == 3


def test_a_supervisor_whose_lease_is_gone_ends_at_once(running, done, pauses):
    folder, _lease, lock = running
    with AllocatorLock(folder.path.home).held():
        LeaseStore(folder.path.home).release(lock)
    with pytest.raises(StateError, match="the job's lease, the file that reserves its GPUs, does not exist"):
        process.carry(folder.path.home, lock)
    assert pauses == []


def test_a_supervisor_outlives_a_fence_whose_last_step_failed(running, done, pauses, monkeypatch):
    """The GPUs of the lost hosts are free; only what comes afterwards failed."""
    folder, lease, lock = running
    leases = LeaseStore(folder.path.home)
    with AllocatorLock(folder.path.home).held():
        _, lock = leases.abandon(lock, lease, {lease.grants[0].host})

    def fenced(_home, _lease, held):
        leases.release(held)
        raise StateUnavailable("too many open files")

    monkeypatch.setattr(process, "keep_asking", fenced)
    process.carry(folder.path.home, lock)
    assert pauses == [1.0]
    assert leases.names() == frozenset()


@pytest.mark.parametrize("leaves", [None, Path.mkdir], ids=["nothing", "an empty mount point"])
@pytest.mark.parametrize("error", [StateDiskError("it failed"), FileNotFoundError("no file"), BadInput("no such job")])
def test_no_lease_in_a_state_directory_that_is_away_frees_no_gpus(running, done, monkeypatch, own_copy, error, leaves):
    home = running[0].path.home
    away = home.with_name("away")
    ends(monkeypatch, State.SUCCEEDED)
    real, waited = process.live, []

    def live(job):
        if not waited:
            home.rename(away)
            if leaves is not None:
                leaves(home)
            raise error
        return real(job)

    def sleep(pause_s):
        waited.append(pause_s)
        if len(waited) == 3:
            if leaves is not None:
                home.rmdir()  # nothing was written there
            away.rename(home)

    monkeypatch.setattr(process, "live", live)
    own_copy(process, "time", sleep=sleep)
    assert carry(running) is State.SUCCEEDED
    assert len(waited) == 3


def test_a_supervisor_ends_if_its_state_directory_is_removed(running, done, pauses, monkeypatch):
    folder, _lease, lock = running

    def live(job):
        shutil.rmtree(folder.path.home)
        raise StateDiskError("it failed")

    monkeypatch.setattr(process, "live", live)
    with pytest.raises(FileNotFoundError, match="the state directory is gone"):
        process.carry(folder.path.home, lock)
    assert pauses == [1.0]


@pytest.mark.parametrize("error", [ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "no such file")])
def test_main_leaves_the_lease_after_a_defect(running, done, pauses, monkeypatch, error):
    def defect(_):
        raise error

    folder, lease, lock = running
    monkeypatch.setattr(process, "live", defect)
    monkeypatch.setattr(process.children, "live_on", lambda: None)
    monkeypatch.setenv("GPURUN_HOME", str(folder.path.home))
    assert process.main([lease.job, str(os.dup(lock.descriptor))]) == 70
    assert pauses == []
    assert Path(str(LeaseStore(folder.path.home).path(lease.job))).exists()
