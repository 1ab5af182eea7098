"""A waiter on its way out, and a job that is queued in that very moment."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases import waiters
from gpurun.leases.waiters import take_waiter_lock, waiter_lives, waiter_lock
from gpurun.supervisor import waiter

UID = os.getuid()


@pytest.fixture
def lock(tmp_path):
    """The lock as a waiter has inherited it."""
    path = waiter_lock(tmp_path, UID)
    path.parent.mkdir()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    assert take_waiter_lock(descriptor)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def passes(tmp_path, monkeypatch):
    """Passes that grant all there is, and no process that starts: the moments at which each was run."""
    started = []
    monkeypatch.setattr(waiter, "TICK_S", 0.0)
    monkeypatch.setattr(waiter.subprocess, "Popen", lambda *_, **__: started.append("waiter"))

    def run(home, **_):
        started.append("pass")
        store = JobStore(home)
        for record in store.records(pytest.fail):
            if record.state is State.QUEUED:
                store.get(record.id).move(State.GRANTED)
        return waiter.Pass()

    monkeypatch.setattr(waiter, "run_pass_and_start", run)
    return started


def submit(home):
    """What `submit_job` does once the image is known to be there, for a job that does not fit."""
    folder = JobStore(home).create(JobSpec("n", "i", 1, ("true",)), inventory=home / "inventory.yaml", now_s=0.0)
    waiter.ensure_waiter(home, {})
    return folder


def at_look(monkeypatch, number, do):
    """Do something right after the waiter's n-th look at the queue, before it acts on what it saw."""
    real, looks = waiter.has_queued, []

    def look(home, uid):
        seen = real(home, uid)
        looks.append(seen)
        if len(looks) == number:
            do()
        return seen

    monkeypatch.setattr(waiter, "has_queued", look)


def test_a_job_that_comes_after_the_last_look_is_seen(tmp_path, lock, passes, monkeypatch):
    made = []
    at_look(monkeypatch, 1, lambda: made.append(submit(tmp_path)))
    waiter.hold(tmp_path, lock, {})
    assert made[0].record().state is State.GRANTED
    assert passes == ["pass"], "the waiter that lived took it; no other was started"


def test_a_job_that_comes_after_the_lock_is_free_gets_a_waiter_of_its_own(tmp_path, lock, passes, monkeypatch):
    made = []
    at_look(monkeypatch, 2, lambda: made.append(submit(tmp_path)))
    waiter.hold(tmp_path, lock, {})
    assert passes == ["waiter"]
    assert not waiter_lives(tmp_path, UID)


def test_who_finds_another_waiter_at_the_second_look_leaves_it_to_that_one(tmp_path, lock, passes, monkeypatch):
    others = []

    def another_begins():
        submit(tmp_path)
        others.append(os.open(waiter_lock(tmp_path, UID), os.O_RDWR))

    at_look(monkeypatch, 1, another_begins)
    real = waiter.fcntl.flock

    def let_go(descriptor, how):
        real(descriptor, how)
        if descriptor == lock and how == fcntl.LOCK_UN:
            assert take_waiter_lock(others[0])

    monkeypatch.setattr(waiter.fcntl, "flock", let_go)
    waiter.hold(tmp_path, lock, {})
    assert passes == []
    os.close(others[0])


def test_who_only_looks_keeps_nobody_from_the_lock(tmp_path, lock):
    """A pass of another user asks whether a waiter lives in the moment in which it is to be started."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    looking = os.open(waiter_lock(tmp_path, UID), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.2, os.close, [looking])
    timer.start()
    assert take_waiter_lock(lock)
    timer.join()


def test_who_looks_for_ever_makes_nobody_wait_for_ever(tmp_path, lock, monkeypatch):
    monkeypatch.setattr(waiters, "LOOK_S", 0.1)
    fcntl.flock(lock, fcntl.LOCK_UN)
    looking = os.open(waiter_lock(tmp_path, UID), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not take_waiter_lock(lock)
    os.close(looking)
    other = os.open(waiter_lock(tmp_path, UID), os.O_RDWR)
    assert take_waiter_lock(other), "and leaves no shared lock behind"
    os.close(other)
