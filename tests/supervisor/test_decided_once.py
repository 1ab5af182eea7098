"""An end is decided once: what fails while it is carried out is retries, and changes nothing about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpurun.errors import BadInput, HostFailure, StateDiskError, StateError
from gpurun.jobs.record import CancelRequest, FirstFailure, GpuHolder, Restart, Setback, State, Unjudged
from gpurun.jobs.spec import JobSpec, Retry
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.look import look
from gpurun.leases.store import LeaseStore
from gpurun.state.boot import ClockReading
from gpurun.state.clock import HeadClock
from gpurun.state.hosts import Cordons
from gpurun.supervisor import life, stop
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.verdict.ends import End, GangEnd, Reached

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
GOOD = End(State.SUCCEEDED, "", 0)
XID = FirstFailure("GPU 0: Xid 79", host="h1", kind="xid", cordon=True)
BROKEN = End(State.FAILED, "GPU 0: Xid 79", 4, failure=XID, suspects=("h1",))


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path / "home"


@pytest.fixture
def running(home, monkeypatch):
    """A job in RUNNING whose gang is about to end."""
    spec = JobSpec("n", "i", 4, ("true",), max_restarts=2)
    folder = JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=1.0)
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state)
    monkeypatch.setattr(life, "furthest", lambda job: Reached())
    yield SupervisedJob(home, lease, lock, clock=HeadClock(lambda: ClockReading("", 100.0, 100.0)))
    lock.close()


def ends_with(end, monkeypatch, **steps):
    def watch(job):
        raise GangEnd(end)

    monkeypatch.setattr(life, "STEPS", {**life.STEPS, State.RUNNING: watch, **steps})


@pytest.fixture
def pauses(own_copy):
    found = []
    own_copy(life, "time", sleep=found.append)
    return found


@pytest.mark.parametrize(
    "error", [StateError("damaged"), BadInput("conflict"), HostFailure("gone", host="h1")], ids=type
)
def test_what_fails_while_stopping_is_tried_again_and_decides_nothing(running, monkeypatch, pauses, error):
    def stop_at_last(job):
        if len(pauses) < 9:
            raise error
        return stop.stop(job)

    ends_with(GOOD, monkeypatch, **{State.STOPPING: stop_at_last})
    assert life.live(running) is State.SUCCEEDED
    record = running.folder.record()
    assert (record.state, record.code, record.exit_code, record.first_failure) == (State.SUCCEEDED, 0, 0, None)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert LeaseStore(running.home).read_all().leases == ()


def test_a_pause_before_the_next_placement_counts_as_no_restart(running, monkeypatch):
    pause = Restart(110.0, 3, 5)
    eve = GpuHolder((1,), user="eve", process="python3 of eve (pid 7)")
    end = End(State.QUEUED, "clock", 4, suspects=("h1",), refused={"h1": (eve,)}, restart=pause)
    ends_with(end, monkeypatch)
    assert life.live(running) is State.QUEUED
    record = running.folder.record()
    assert (record.restart, record.restarts, record.avoid) == (pause, 0, ("h1",))
    assert [each.holder for each in record.refusals] == [eve]
    assert record.story(101.0) == "restarts in 9s (attempt 3 of 5): clock"


def test_damaged_cordons_neither_lose_a_cordon_nor_change_the_end(running, monkeypatch, own_copy, pauses, home):
    cordons = home / "cordons.json"
    cordons.write_text("{torn")
    own_copy(life, "time", sleep=lambda s: (pauses.append(s), len(pauses) == 3 and cordons.unlink()))
    ends_with(BROKEN, monkeypatch)
    assert life.live(running) is State.QUEUED, "it has a restart left"
    record = running.folder.record()
    assert (record.state, record.restarts, record.avoid) == (State.QUEUED, 1, ("h1",))
    assert record.first_failure == XID
    assert Cordons(home).read()["h1"].state == "cordoned"
    texts = [json.loads(line).get("text", "") for line in running.folder.events.read_text().splitlines()]
    assert len([text for text in texts if "retries" in text]) == len(pauses) == 3


def test_a_gang_is_fenced_before_its_damaged_cordons_are_mended(running, monkeypatch, own_copy, home):
    (home / "cordons.json").write_text("{torn")
    fenced = []

    def give_up(_):
        raise KeyboardInterrupt

    own_copy(life, "time", sleep=give_up)
    monkeypatch.setattr(stop, "fence", lambda *_, **__: fenced.append("fenced") or {})
    monkeypatch.setattr(stop, "collect_outputs", lambda _: set())
    monkeypatch.setattr(stop, "_end_log", lambda *_: set())
    monkeypatch.setattr(running.links, "open", lambda *_, **__: {})
    running.amend(reached="containers")
    ends_with(BROKEN, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        life.live(running)
    assert fenced
    assert LeaseStore(home).read(running.lease.job) is not None, "its GPUs go to nobody before the cordon is there"


def test_once_gpus_are_given_back_nothing_on_their_hosts_is_ended_again(running, monkeypatch, pauses, home):
    """Another gang may have them, and be the next attempt of this very job."""

    def fail(*_, **__):
        raise StateError("damaged")

    monkeypatch.setattr(stop, "finish", fail)
    ends_with(GOOD, monkeypatch)
    with pytest.raises(StateError):
        life.live(running)
    assert pauses == []
    assert LeaseStore(home).read_all().leases == ()
    assert running.folder.record().outcome is State.SUCCEEDED, "the next command writes it"


def test_an_end_that_a_full_disk_keeps_from_being_written_is_written_later(running, monkeypatch, own_copy, home):
    waits, finish = [], stop.finish

    def full_at_first(*arguments, **named):
        if len(waits) < 3:
            raise StateDiskError("full")
        return finish(*arguments, **named)

    own_copy(stop, "time", sleep=waits.append)
    monkeypatch.setattr(stop, "finish", full_at_first)
    ends_with(GOOD, monkeypatch)
    assert life.live(running) is State.SUCCEEDED
    assert waits == [1.0, 2.0, 4.0]
    assert LeaseStore(home).read_all().leases == ()


def test_the_end_of_a_gang_that_stops_without_a_request_is_expected_from_when_it_began_to_stop(running, monkeypatch):
    """It copies outputs for long: its end was expected 30 s from now each time somebody asked."""
    seen = []

    def look_meanwhile(job):
        view = look(job.home, now_s=500.0)
        seen.extend(view.snapshot(job.inventory, view.waiting()).running)
        return stop.stop(job)

    ends_with(GOOD, monkeypatch, **{State.STOPPING: look_meanwhile})
    assert life.live(running) is State.SUCCEEDED
    assert [(run.stopping, run.told_s, run.free_s(500.0)) for run in seen] == [(True, 100.0, 500.0)]


FAILS = End(
    State.FAILED, "rank 0 on h1 failed first", 1, ladder=False,
    failure=FirstFailure("rank 0 on h1 failed first", rank=0, host="h1", exit_code=3, kind="rank"),
)  # fmt: skip


@pytest.fixture
def retried(running, monkeypatch):
    """The same job, with retries. Its ranks report step 5."""
    running.spec = replace(running.spec, retry=Retry(2, wait_s=9.0))
    monkeypatch.setattr(life, "furthest", lambda job: Reached(5, None))
    monkeypatch.setattr(stop, "furthest", lambda job: Reached(7, None))
    monkeypatch.setattr(running.links, "open", lambda *_, **__: {})
    return running


def test_a_failed_program_is_queued_for_its_retry_without_gpus(retried, monkeypatch, home):
    ends_with(FAILS, monkeypatch)
    assert life.live(retried) is State.QUEUED
    record = retried.folder.record()
    assert (record.retries, record.restarts, record.avoid, record.unjudged, record.outcome) == (1, 0, (), None, None)
    assert record.restart == Restart(109.0, 1, 2, is_retry=True, wait_s=9.0)
    assert record.reason == "rank 0 on h1 failed first; the job reached step 7", "also what ranks said after SIGTERM"
    assert LeaseStore(home).read_all().leases == ()
    assert Allocator(home).run_pass(now_s=105.0).granted == ()
    ((_, lock),) = Allocator(home).run_pass(now_s=109.0).granted
    lock.close()
    record = retried.folder.record()
    assert (record.attempt, record.retries, record.restart) == (2, 1, None)


def test_a_supervisor_that_dies_before_the_retry_is_decided_leaves_it_to_the_next(retried, monkeypatch):
    real, asked = stop._judge_retry, []

    def dies(job):
        asked.append(job.record.unjudged)
        if len(asked) == 1:
            raise KeyboardInterrupt
        real(job)

    monkeypatch.setattr(stop, "_judge_retry", dies)
    ends_with(FAILS, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        life.live(retried)
    assert retried.folder.record().outcome is State.QUEUED
    assert life.live(retried) is State.QUEUED
    assert asked == [Unjudged(State.FAILED, "failure")] * 2
    assert retried.folder.record().retries == 1


def test_a_rehearsal_uses_no_retry(retried, monkeypatch):
    retried.amend(rehearsal="due")
    ends_with(FAILS, monkeypatch)
    assert life.live(retried) is State.FAILED
    assert (retried.folder.record().retries, retried.folder.record().attempt) == (0, 1)


def test_a_hosts_fault_is_a_restart_and_without_one_the_reason_says_what_allows_it(retried, monkeypatch):
    retried.spec = replace(retried.spec, max_restarts=0)
    ends_with(BROKEN, monkeypatch)
    assert life.live(retried) is State.FAILED
    assert retried.folder.record().reason.endswith("a host's fault uses no retry, but --max-restarts N allows restarts")


def test_a_cancel_while_the_attempt_ends_prevents_the_retry(retried, monkeypatch):
    def watch(job):
        job.folder.ask_to_cancel(CancelRequest("cancel", by="alice", asked_s=100.0))
        raise GangEnd(FAILS)

    monkeypatch.setattr(life, "STEPS", {**life.STEPS, State.RUNNING: watch})
    assert life.live(retried) is State.CANCELLED
    assert retried.folder.record().reason == "cancelled by alice"


def test_the_last_retry_ends_with_the_last_attempts_code(retried, monkeypatch):
    retried.amend(retries=2)
    ends_with(FAILS, monkeypatch)
    assert life.live(retried) is State.FAILED
    record = retried.folder.record()
    assert (record.code, record.exit_code) == (1, 3)
    assert record.reason == "rank 0 on h1 failed first; no retry is left: the job had 2 retries"


@pytest.mark.parametrize(("step", "counts"), [(9, (0, 0)), (None, (2, 1))])
def test_a_hosts_fault_with_progress_forgives_what_was_in_vain_before(retried, monkeypatch, step, counts):
    retried.amend(setback=Setback(0, "rank", "", 0, 1, 5, 20.0, fruitless=1, futile=1), attempt=1)
    monkeypatch.setattr(life, "furthest", lambda job: Reached(step, None))
    ends_with(BROKEN, monkeypatch)
    assert life.live(retried) is State.QUEUED
    found = retried.folder.record().setback
    assert (found.fruitless, found.futile) == counts
