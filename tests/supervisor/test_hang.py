"""The hang watch reads what ranks say of themselves, whatever they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.errors import HostUnreachable
from gpurun.jobs.spec import Grant
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor import health
from gpurun.supervisor.ranks import Seating

ODD = [[], None, "7", 7, {}, {"step": None}, {"step": "7"}, {"step": True}, {"step": 1.5}, {"step": []}]


def job(told, hang_timeout_s=10.0, failed=None):
    results = SimpleNamespace(ok=told, failed={} if failed is None else failed)
    links = SimpleNamespace(each=lambda call, hosts=None: results, is_open=lambda host: True)
    return SimpleNamespace(
        spec=SimpleNamespace(hang_timeout_s=hang_timeout_s), links=links, hosts=list(told),
        lease=SimpleNamespace(job="j-00000001", grants=()), seating=Seating((), 2),
    )  # fmt: skip


def said(*ranks, age_s=99.0):
    files = {str(number): {"progress": progress} for number, progress in enumerate(ranks)}
    return {"age_s": age_s, "checkpoint_age_s": None, "ranks": files}


@pytest.mark.parametrize("odd", ODD)
def test_odd_progress_neither_saves_nor_breaks_the_verdict(odd, own_copy):
    now = [1000.0]
    own_copy(health, "time", monotonic=lambda: now[0])
    watch = health.HangWatch(job({"a": said({"step": 9}, odd), "b": said({"step": 8})}))
    now[0] += 60
    assert watch.hung(60.0) == (
        "no rank has printed, reported progress or used its GPU for 10s; rank 0 on b is furthest behind, at step 8"
    )


@pytest.mark.parametrize("odd", ODD)
def test_the_furthest_step_is_that_of_a_rank_that_told_one(odd):
    assert health.furthest_step(job({"a": said({"step": 9}, odd), "b": said({"step": 8}, odd)})) == 9
    assert (
        health.furthest_step(job({"a": said(odd), "b": {"age_s": None, "checkpoint_age_s": None, "ranks": {}}})) is None
    )


def test_a_host_does_not_say_how_far_the_ranks_of_others_are():
    watched = job({"a": said({"step": 9}, {"step": 1000}), "b": said({"step": 0}, {"step": 8})})
    watched.seating = Seating((Grant("a", (0,)), Grant("b", (3,))))
    assert health.furthest_step(watched) == 9
    assert health._furthest_behind(watched.links.each(None).ok, watched.seating).endswith(
        "rank 1 on b is furthest behind, at step 8"
    )


@pytest.fixture
def clock(own_copy):
    now = [1000.0]
    own_copy(health, "time", monotonic=lambda: now[0])
    return now


def test_a_host_that_does_not_answer_is_not_a_silent_one(clock):
    """Its ranks may have printed a second ago."""
    failed = {"b": HostUnreachable("cut", host="b")}
    watch = health.HangWatch(job({"a": said()}, failed=failed))
    clock[0] += 60
    assert watch.hung(60.0) is None
    failed.clear()
    clock[0] += 9
    assert watch.hung(69.0) is None, "what was printed meanwhile is on its way"
    clock[0] += 2
    assert "no rank has printed" in watch.hung(71.0)


def test_a_host_out_of_reach_has_its_time_after_it_is_back(clock):
    watch = health.HangWatch(job({"a": said(), "b": said()}))
    for _ in range(60):
        clock[0] += 1
        assert watch.hung(60.0, is_heard=False) is None
    clock[0] += 9
    assert watch.hung(69.0) is None
    clock[0] += 2
    assert watch.hung(71.0) is not None


def test_a_gpu_that_nobody_can_ask_about_may_be_busy(clock):
    """Progress is not told; the host falls silent between the two questions."""
    answers = iter([{}, {"b": HostUnreachable("cut", host="b")}])
    watched = job({"a": said(age_s=None)})
    watched.links.each = lambda call, hosts=None: SimpleNamespace(
        ok={"a": said(age_s=None)} if (failed := next(answers)) == {} else {"a": False}, failed=failed
    )
    watch = health.HangWatch(watched)
    clock[0] += 60
    assert watch.hung(60.0) is None


def test_a_host_that_answers_that_it_cannot_know_saves_no_gang(clock):
    """A rank may have taken away its folder's permissions."""
    failed = {"b": RemoteOpFailed("permission denied", kind="internal")}
    watch = health.HangWatch(job({"a": said()}, failed=failed))
    clock[0] += 60
    assert watch.hung(60.0) is not None
