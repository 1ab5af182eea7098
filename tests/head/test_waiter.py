"""A waiter on its way out, and a job that is queued in that very moment."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpurun.head import children, waiter
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Pass
from gpurun.leases.look import MAX_LOG_BYTES, WaiterLocks
from gpurun.state import clock, locks

UID = os.getuid()


@pytest.fixture
def lock(tmp_path):
    """The lock as a waiter has inherited it."""
    descriptor, _ = WaiterLocks(tmp_path).take()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def passes(tmp_path, monkeypatch, own_copy):
    """Passes that grant all there is, and no process that starts: the moments at which each was run."""
    started = []
    monkeypatch.setattr(waiter, "TICK_S", 0.0)
    monkeypatch.setattr(waiter, "PASS_EVERY_S", 0.01)
    own_copy(children, "subprocess", Popen=lambda *_, **__: started.append("waiter"))

    def run(head, **_):
        started.append("pass")
        store = JobStore(head.home)
        for record in store.records(pytest.fail):
            if record.state is State.QUEUED:
                store.get(record.id).move(State.GRANTED)
                store.get(record.id).move(State.PREPARING)
        return Pass()

    monkeypatch.setattr(waiter.Head, "run_pass", run)
    return started


def submit(home):
    """What `submit_jobs` does once the image is known to be there, for a job that does not fit."""
    folder = JobStore(home).create(JobSpec("n", "i", 1, ("true",)), inventory=home / "inventory.yaml", now_s=0.0)
    waiter.Head(home, {}).ensure_waiter()
    return folder


def at_look(monkeypatch, number, do):
    """Do something right after the waiter's n-th look at the queue, before it acts on what it saw."""
    real, looks = waiter.Waiter.is_needed, []

    def look(home, uid):
        seen = real(home, uid)
        looks.append(seen)
        if len(looks) == number:
            do()
        return seen

    monkeypatch.setattr(waiter.Waiter, "is_needed", look)


def test_a_job_that_comes_after_the_last_look_is_seen(tmp_path, lock, passes, monkeypatch):
    made = []
    at_look(monkeypatch, 1, lambda: made.append(submit(tmp_path)))
    waiter.Waiter(tmp_path, {}).hold(lock)
    assert made[0].record().state is State.PREPARING
    assert passes == ["pass"], "the waiter that lived took it; no other was started"


def test_a_job_that_comes_after_the_lock_is_free_gets_a_waiter_of_its_own(tmp_path, lock, passes, monkeypatch):
    made = []
    at_look(monkeypatch, 2, lambda: made.append(submit(tmp_path)))
    waiter.Waiter(tmp_path, {}).hold(lock)
    assert passes == ["waiter"]
    assert not WaiterLocks(tmp_path).lives(UID)


def test_who_finds_another_waiter_at_the_second_look_leaves_it_to_that_one(tmp_path, lock, passes, monkeypatch):
    others = []

    at_look(monkeypatch, 1, lambda: submit(tmp_path))
    real = locks.release_lock

    def let_go(descriptor):
        real(descriptor)
        others.append(WaiterLocks(tmp_path).take()[0])

    monkeypatch.setattr(locks, "release_lock", let_go)
    waiter.Waiter(tmp_path, {}).hold(lock)
    assert passes == []
    os.close(others[0])


def test_a_log_whose_size_cannot_be_asked_for_takes_no_lock_along(tmp_path, monkeypatch):
    real = locks.try_take

    def try_take(descriptor):
        is_taken = real(descriptor)
        monkeypatch.setattr(os, "fstat", failing)
        return is_taken

    def failing(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(locks, "try_take", try_take)
    descriptor, _ = WaiterLocks(tmp_path).take()
    monkeypatch.undo()
    os.close(descriptor)
    assert not WaiterLocks(tmp_path).lives(UID)


@pytest.fixture
def home(tmp_path):
    """A state directory that can go away, and its waiter's lock."""
    descriptor, _ = WaiterLocks(tmp_path / "home").take()
    yield tmp_path / "home", descriptor
    os.close(descriptor)


@pytest.mark.parametrize("leaves", [None, Path.mkdir], ids=["nothing", "an empty mount point"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_waiter_outlives_a_state_directory_that_is_away(home, passes, monkeypatch, own_copy, leaves, number):
    home, lock = home
    away, real, looks, waited = home.with_name("away"), waiter.Waiter.is_needed, [], []

    def look(*arguments):
        looks.append(1)
        if len(looks) == number:
            if number == 1:
                submit(home)
            home.rename(away)
            if leaves is not None:
                leaves(home)
        return real(*arguments)

    def sleep(seconds):
        if away.exists():
            waited.append(seconds)
        if len(waited) == 3 and away.exists():
            if leaves is not None:
                home.rmdir()  # nothing was written there
            away.rename(home)

    monkeypatch.setattr(waiter.Waiter, "is_needed", look)
    own_copy(waiter, "time", sleep=sleep)
    waiter.Waiter(home, {}).hold(lock)
    assert len(waited) == 3
    assert [record.state for record in JobStore(home).records(pytest.fail)] == [State.PREPARING] * (number == 1)


@pytest.mark.parametrize("how", ["removed", "moved for good"])
def test_a_waiter_ends_if_its_state_directory_is_gone(home, passes, monkeypatch, how):
    home, lock = home
    submit(home)
    monkeypatch.setattr(clock, "AWAY_MOST_S", 0.0 if how == "moved for good" else 1e9)

    def look(*_):
        home.rename(home.with_name("elsewhere")) if how == "moved for good" else shutil.rmtree(home)
        return False

    monkeypatch.setattr(waiter.Waiter, "is_needed", look)
    waiter.Waiter(home, {}).hold(lock)
    assert passes == []


def test_who_only_looks_keeps_nobody_from_the_lock(tmp_path, lock):
    """A pass of another user may look for a waiter in the moment in which it is to be started."""
    assert WaiterLocks(tmp_path).lives(UID)
    assert WaiterLocks(tmp_path).take() is None
    locks.release_lock(lock)
    assert not WaiterLocks(tmp_path).lives(UID)
    descriptor, path = WaiterLocks(tmp_path).take()
    assert path.name == f"{UID}.log"
    os.close(descriptor)


def test_a_read_lock_keeps_no_waiter_from_starting(tmp_path, lock):
    """Everybody of the group can read the log, so everybody can hold a read lock on it."""
    locks.release_lock(lock)
    meddler = os.open(tmp_path / "waiters" / f"{UID}.log", os.O_RDONLY)
    assert locks.try_take(meddler, shared=True)
    assert not locks.try_take(lock)
    descriptor, path = WaiterLocks(tmp_path).take()
    assert path.name != f"{UID}.log"
    assert WaiterLocks(tmp_path).lives(UID)
    assert WaiterLocks(tmp_path).take() is None
    for each in (descriptor, meddler):
        os.close(each)


@pytest.mark.parametrize("thing", ["folder", "pipe", "link", "link to nothing", "hard link", "writable by all"])
def test_what_lies_in_the_place_of_the_log_keeps_no_waiter_from_starting(tmp_path, thing):
    (tmp_path / "waiters").mkdir()
    place, other = tmp_path / "waiters" / f"{UID}.log", tmp_path / "other"
    other.write_text("precious")
    make = {
        "folder": place.mkdir,
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(other),
        "link to nothing": lambda: place.symlink_to(tmp_path / "made by mistake"),
        "hard link": lambda: place.hardlink_to(other),
        "writable by all": lambda: (place.touch(), place.chmod(0o666)),
    }
    make[thing]()
    descriptor, path = WaiterLocks(tmp_path).take()
    assert path.plain != place
    assert WaiterLocks(tmp_path).lives(UID)
    os.close(descriptor)
    assert not WaiterLocks(tmp_path).lives(UID)
    assert other.read_text() == "precious"
    assert not (tmp_path / "made by mistake").exists()


def test_the_log_does_not_grow_for_ever(tmp_path, lock):
    locks.release_lock(lock)
    log = tmp_path / "waiters" / f"{UID}.log"
    log.write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    descriptor, _ = WaiterLocks(tmp_path).take()
    assert log.stat().st_size == 0
    os.close(descriptor)
