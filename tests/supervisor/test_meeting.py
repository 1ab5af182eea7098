"""Ranks that end with 0 and never formed a group are said, once, and only where it is known."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec, Roles
from gpurun.supervisor import health
from gpurun.supervisor.health import MeetingWatch, is_judged, warning_of_meeting
from gpurun.supervisor.verdict.ends import End

SPEC = JobSpec("n", "i", 2, ("python3", "train.py"), launcher="torchrun")
GOOD = End(State.SUCCEEDED, "", 0)
APART = {"a": {"ranks": [0], "ports": [29400], "met": False}, "b": {"ranks": [1], "ports": [29400], "met": False}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"launcher": "horovod"}, True), ({"launcher": "jax"}, True), ({"launcher": "deepspeed"}, True),
     ({"launcher": "horovod", "controller": "mpi"}, False), ({"launcher": "tasks"}, False),
     ({"launcher": "srun"}, False), ({"launcher": "mpirun"}, False), ({"launcher": "tensorflow"}, False),
     ({"roles": Roles()}, False), ({"gpus": 1}, False), ({"one_per_host": True}, False), ({"min_gpus": 1}, False)],
)  # fmt: skip
def test_only_gangs_that_need_a_group_are_judged(changes, expected):
    assert is_judged(replace(SPEC, **changes)) is expected


class World:
    """A job whose hosts answer each look from a list; its clock moves only by hand."""

    def __init__(self, monkeypatch, answers, **changes):
        self.now_s, self.notes, self.asked, self.answers = 100.0, [], [], list(answers)
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.started_s = 100.0
        spec = replace(SPEC, **changes)
        launcher = health.launcher_of(spec)
        self.job = SimpleNamespace(
            spec=spec, hosts=["a", "b"], launcher=launcher, lease=SimpleNamespace(job="j-1", ssh_port=29400),
            record=SimpleNamespace(attempt=3), accounts={h: SimpleNamespace(address="10.0.0.1") for h in "ab"},
            reports=SimpleNamespace(all=[SimpleNamespace(started_s=self.started_s)]),
            seating=SimpleNamespace(has=lambda host, rank: (host, rank) in (("a", 0), ("b", 1))),
            links=SimpleNamespace(each=self.each), note=lambda text, **more: self.notes.append((text, more)),
        )  # fmt: skip
        self.watch = MeetingWatch(self.job, threading.Event())

    def each(self, ask, hosts):
        ask(SimpleNamespace(call=lambda op, **more: self.asked.append(more) or SimpleNamespace(value=None)))
        return SimpleNamespace(ok=self.answers.pop(0))

    def after(self, *gaps_s, end=GOOD):
        for gap_s in gaps_s:
            self.now_s += gap_s
            self.watch.look()
        self.watch.end(end)
        return self.notes


ENDED = {host: {**said, "ranks": []} for host, said in APART.items()}
MET = {**ENDED, "b": {**APART["b"], "met": True}}


def test_copies_are_said_with_what_to_call(monkeypatch):
    notes = World(monkeypatch, [APART, ENDED]).after(0.3)
    assert notes == [(warning_of_meeting(SPEC), {"warning": 3})] and "init_process_group()" in notes[0][0]
    assert "horovod's init()" in warning_of_meeting(replace(SPEC, launcher="horovod"))


@pytest.mark.parametrize(
    ("answers", "gaps_s"),
    [([MET], [0.3]), ([APART, MET], [0.3]), ([APART, {"a": APART["a"]}], [0.3]), ([{}], [0.3]), ([ENDED], []),
     ([{**ENDED, "a": {**APART["a"], "ranks": [0, 1]}}] * 2, [0.3]), ([APART, ENDED], [health.LATE_S + 1]),
     ([APART, APART, ENDED], [0.3, health.GAP_S + 1])],
)  # fmt: skip
def test_nobody_is_accused_where_it_is_not_known(monkeypatch, answers, gaps_s):
    assert World(monkeypatch, answers).after(*gaps_s) == []


def test_a_gang_that_failed_or_whose_host_is_not_known_is_not_judged(monkeypatch):
    assert World(monkeypatch, [APART]).after(0.3, end=End(State.FAILED, "", 1)) == []
    world = World(monkeypatch, [APART, ENDED])
    del world.job.accounts["b"]
    assert world.after(0.3) == []


def test_horovods_rendezvous_must_be_known_and_the_jobs_sshd_is_no_meeting(monkeypatch):
    unknown = {host: {**said, "ports": []} for host, said in APART.items()}
    world = World(monkeypatch, [unknown, unknown], launcher="horovod")
    assert world.after(0.3) == []
    assert world.asked[0]["ports"] == [] and world.asked[0]["spared"] == [29400]
    world = World(monkeypatch, [APART, ENDED], launcher="horovod")
    assert len(world.after(0.3)) == 1
    assert world.asked[1]["ports"] == [29400]


def test_the_thread_ends_when_the_ranks_have_met(monkeypatch):
    monkeypatch.setattr(health, "FIRST_S", 0.0)
    monkeypatch.setattr(health, "OFTEN_S", 0.0)
    world = World(monkeypatch, [APART, APART, MET])
    world.watch.threads()[0].run()
    assert world.answers == [] and world.after() == []
    assert World(monkeypatch, [], gpus=1).watch.threads() == []
