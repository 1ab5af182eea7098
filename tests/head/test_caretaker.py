"""Commands that wait for a job pick it up when its supervisor, or its owner's waiter, has died."""

from __future__ import annotations

import itertools
import threading

import pytest

from gpurun.cli.main import main
from gpurun.head import caretaker, waiter
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.look import WaiterLocks

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
COMMANDS = [("wait",), ("cancel",), ("logs", "--follow")]


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    monkeypatch.setattr(caretaker, "FIRST_PAUSE_S", 0.05)
    return tmp_path


@pytest.fixture
def job(home):
    return JobStore(home).create(JobSpec("n", "i", 4, ("true",)), inventory=home / "inventory.yaml", now_s=0.0)


@pytest.fixture
def resumed(job, monkeypatch):
    """How often everything was picked up; the third time, the job ends."""
    calls = []

    def resume(self):
        calls.append(self.home)
        if len(calls) == 3:
            end(job)

    monkeypatch.setattr(waiter.Waiter, "resume", resume)
    return calls


def end(folder):
    folder.write(folder.record().but(state=State.SUCCEEDED, code=0, ended_s=9.0))


def run(*words):
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    return exit_.value.code


@pytest.mark.parametrize("words", COMMANDS)
def test_a_job_whose_supervisor_died_is_picked_up_by_whoever_waits(home, job, resumed, words):
    ((_, lock),) = Allocator(home).run_pass(now_s=1.0).granted
    lock.close()
    assert run(words[0], job.id, *words[1:]) == 0
    assert len(resumed) == 3


@pytest.mark.parametrize("words", [("wait",), ("logs", "--follow")])
def test_a_queued_job_whose_waiter_died_is_picked_up(job, resumed, words):
    assert run(words[0], job.id, *words[1:]) == 0
    assert len(resumed) == 3


@pytest.mark.parametrize("queued", [True, False])
def test_a_job_that_is_looked_after_is_left_alone(home, job, resumed, queued):
    locks = [WaiterLocks(home).take()] if queued else Allocator(home).run_pass(now_s=1.0).granted
    resumed.clear()
    threading.Timer(0.6, end, [job]).start()
    assert run("wait", job.id) == 0
    assert resumed[1:] == [], "only the command's own first look"
    assert locks


def test_what_does_not_help_is_tried_less_and_less_often(job, resumed, monkeypatch, own_copy):
    now = [100.0]
    own_copy(caretaker, "time", monotonic=lambda: now[0])
    monkeypatch.setattr(caretaker, "FIRST_PAUSE_S", 2.0)
    care, looks = caretaker.Caretaker(), []
    resumed += ["never the third"] * 3
    while now[0] < 400.0:
        before = len(resumed)
        care.look([job])
        looks += [now[0]] * (len(resumed) > before)
        now[0] += 0.5
    pauses = [later - sooner for sooner, later in itertools.pairwise(looks)]
    assert pauses == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
