"""When a running gang's GPUs are free: one definition for the watch, the pass and the words."""

from dataclasses import replace

import pytest
from clusters import cluster, runs

from gpurun.jobs.spec import FENCE_S, PREPARE_S, JobSpec, is_over_limit, limit_ends_s
from gpurun.scheduler.model import ENDLESS, Gang, Reason, Snapshot, new_gang
from gpurun.scheduler.passes import schedule

SPEC = JobSpec(name="j'; touch x", image="i", gpus=8, command=("true",), time_limit_s=100.0, grace_s=20.0)
LIMITED = new_gang(SPEC, job="r", submitted_s=0.0)


@pytest.mark.parametrize(
    ("running_s", "limit_s", "ends_s"), [(10.0, 100.0, 110.0), (None, 100.0, None), (10.0, None, None), (0.0, 0.0, 0.0)]
)
def test_a_limit_counts_from_running(running_s, limit_s, ends_s):
    assert limit_ends_s(running_s, limit_s) == ends_s
    if ends_s is not None:
        assert not is_over_limit(ends_s - running_s, limit_s)
        assert is_over_limit(ends_s - running_s + 0.1, limit_s)
    else:
        assert not is_over_limit(None if running_s is None else 1e12, limit_s)


def test_gpus_are_free_after_limit_grace_and_fence():
    run = runs(LIMITED, ("r0h0", range(8)), granted_s=0.0, running_s=40.0)
    assert run.free_s(50.0) == 40.0 + 100.0 + 20.0 + FENCE_S
    assert run.free_s(9999.0) == 9999.0, "it should be free by now"
    assert replace(run, gang=LIMITED.wanting(time_limit_s=None)).free_s(50.0) == ENDLESS


def test_while_a_gang_prepares_its_end_is_an_estimate_that_moves_with_the_time():
    run = runs(LIMITED, ("r0h0", range(8)), granted_s=0.0, running_s=None)
    assert run.free_s(1.0) == PREPARE_S + 100.0 + 20.0 + FENCE_S
    assert run.free_s(PREPARE_S + 500.0) == PREPARE_S + 500.0 + 100.0 + 20.0 + FENCE_S


def test_a_gang_that_stops_keeps_its_gpus_for_grace_and_fence():
    run = runs(LIMITED, ("r0h0", range(8)), running_s=40.0, stopping=True)
    assert run.free_s(50.0) == 50.0 + 20.0 + FENCE_S


@pytest.mark.parametrize(("limit_s", "starts"), [(15.0, True), (16.0, False)])
def test_backfill_counts_what_surrounds_the_limit_of_both_gangs(limit_s, starts):
    """`first` is expected when r is fenced, 135 s after RUNNING; `small` needs 60 s before RUNNING and 35 s after."""
    assert (PREPARE_S, FENCE_S) == (60.0, 15.0)
    running = (runs(LIMITED.but(gpus=6), ("r0h0", range(6)), granted_s=0.0, running_s=0.0),)
    small = new_gang(replace(SPEC, gpus=2, time_limit_s=limit_s), job="small", submitted_s=2.0)
    queue = (Gang("first", 8, 1.0), small)
    found = schedule(Snapshot(cluster(1, 1, 8), running, queue, now_s=25.0))
    assert found.waits["first"].expected_start_s == 135.0
    assert [gang.id for gang, _ in found.starts] == (["small"] if starts else [])
    if not starts:
        assert found.waits["small"].reason is Reason.RESERVED
