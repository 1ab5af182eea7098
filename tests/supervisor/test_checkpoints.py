"""From a rank's word that its work is safe to the pass that preempts what loses least."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import LIMIT_S, until

from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator, mark_granted, snapshot
from gpurun.leases.look import look
from gpurun.node.agent.frames import Call
from gpurun.node.job import gang, parts
from gpurun.remote.agent import Reply
from gpurun.remote.fleet import Results
from gpurun.runtime import gpurun_runtime
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.outputs import outputs
from gpurun.supervisor.outputs.outputs import CheckpointWatch

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


class Links:
    """Two hosts that are this process: `h1` runs ranks, `h2` tells nothing."""

    def is_open(self, _host):
        return True

    def each(self, call, hosts):
        return Results({host: call(self if host == "h1" else Silent()) for host in hosts}, {})

    def call(self, op, *, job, timeout_s):
        assert op == "gang.progress"
        return Reply(gang.progress(Call(1, lambda *_: None, False, b""), job))


class Silent:
    def call(self, _op, **_):
        return Reply({"age_s": None, "checkpoint_age_s": None, "ranks": {}})


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A gang of two hosts; what its ranks say lies where a host keeps it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home of h1"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    JobStore(tmp_path).create(JobSpec("n", "i", 8, ("true",)), inventory=tmp_path / "inventory.yaml", now_s=0.0)
    ((lease, lock),) = Allocator(tmp_path).run_pass(now_s=1.0).granted
    made = SupervisedJob(tmp_path, lease, lock)
    made.links = Links()
    folder = Path(parts.job_folder(lease.job), "run")
    folder.mkdir(parents=True)
    monkeypatch.setattr(gpurun_runtime, "_FOLDER", str(folder))
    yield made
    lock.close()


def seen_by_a_pass(job):
    (running,) = snapshot(look(job.home, now_s=2.0), load_inventory(job.home / "inventory.yaml")).running
    return running.checkpoint_s


def test_a_pass_knows_when_a_gang_saved_its_work(job):
    watch = CheckpointWatch(job, threading.Event())
    watch.look()
    watch.keep()
    assert seen_by_a_pass(job) is None
    gpurun_runtime.progress(7)
    watch.look()
    watch.keep()
    assert seen_by_a_pass(job) is None, "to be alive is not to be safe"
    before_s = time.time()
    gpurun_runtime.checkpointed(7)
    watch.look()
    watch.keep()
    assert before_s - 0.1 < seen_by_a_pass(job) < time.time() + 0.1


def test_what_hosts_say_is_handed_on_soon_after_the_start_and_seldom_later(job, monkeypatch):
    heard = []
    monkeypatch.setattr(gpurun_runtime, "_last_s", 0.0)
    watch = CheckpointWatch(job, threading.Event(), heard.append)
    gpurun_runtime.progress(7)
    watch.look()
    assert heard[0]["h1"]["ranks"]["0"]["progress"]["step"] == 7
    assert heard[0]["h2"]["ranks"] == {}
    pauses = []
    for ran_s in (0.0, 10.0, 100.0, 1e6):
        job.record = job.record.but(started_s=job.clock() - ran_s)
        pauses.append(watch._pause_s())
    assert pauses == [1.0, 1.0, pytest.approx(5.0, abs=0.1), outputs.EVERY_S]


def test_a_rank_says_how_long_it_has_saved_since_its_last_progress(job, monkeypatch):
    times = iter([100.0, 103.0, 103.5, 110.0, 130.0, 131.5])
    monkeypatch.setattr(gpurun_runtime, "_moved_s", None)
    monkeypatch.setattr(gpurun_runtime, "_saved_s", 0.0)
    monkeypatch.setattr(gpurun_runtime, "time", SimpleNamespace(monotonic=lambda: next(times), time=time.time))
    (folder,) = Path(gpurun_runtime._FOLDER).parent.glob("run")

    def saved_s(step):
        gpurun_runtime.checkpointed(step)
        return json.loads((folder / "checkpoint.0").read_text())["saved_s"]

    assert saved_s(0) == 0.0, "no step was reported before"
    gpurun_runtime.progress(1)
    assert saved_s(1) == 0.5
    assert saved_s(1) == 7.0, "in parts"
    gpurun_runtime.progress(2)
    assert saved_s(2) == 8.5


def test_the_record_is_written_only_for_a_newer_one(job, monkeypatch):
    watch = CheckpointWatch(job, threading.Event())
    gpurun_runtime.checkpointed(7)
    watch.look()
    watch.keep()
    written = []
    monkeypatch.setattr(job.folder, "write", written.append)
    for _ in range(3):
        watch.look()
        watch.keep()
    assert written == []


def test_the_next_attempt_has_saved_nothing_yet(job):
    job.folder.write(job.record.but(checkpoint_s=5.0))
    for state in (State.PREPARING, State.STOPPING, State.QUEUED):
        job.folder.move(state)
    mark_granted(job.store, job.lease)
    assert job.folder.record().checkpoint_s is None


def test_it_asks_again_after_a_moment_without_threads(job, monkeypatch):
    monkeypatch.setattr(outputs, "EVERY_S", 0.0)
    stop, answers = threading.Event(), [RuntimeError("can't start new thread"), MemoryError()]
    watch = CheckpointWatch(job, stop)

    def look():
        if answers:
            raise answers.pop()
        stop.set()

    monkeypatch.setattr(watch, "look", look)
    watch._follow()
    assert answers == []


def test_its_thread_ends_with_the_watch(job, monkeypatch):
    monkeypatch.setattr(outputs, "EVERY_S", 0.01)
    stop = threading.Event()
    watch = CheckpointWatch(job, stop)
    thread = watch.thread()
    gpurun_runtime.checkpointed(1)
    thread.start()
    until(lambda: watch.keep() or job.record.checkpoint_s is not None)
    stop.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
