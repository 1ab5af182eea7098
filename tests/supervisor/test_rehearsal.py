"""A rehearsal: when it has been long enough, and what its end is for the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import GANG, SPEC, end_of, rank

from gpurun.jobs.record import CancelRequest, JobRecord, State
from gpurun.jobs.spec import Constraints
from gpurun.supervisor.verdict.decide import decide
from gpurun.supervisor.verdict.ends import End
from gpurun.supervisor.watch import judged

ALONE = replace(GANG, members=GANG.members[:1], rehearsed="one rank ran for 60 s")


def test_a_rehearsal_that_was_long_enough_ends_with_notice():
    end = end_of(decide(ALONE))
    assert (end.outcome, end.reason, end.ladder) == (State.SUCCEEDED, "one rank ran for 60 s", True)


def test_a_rank_that_has_failed_and_a_cancel_come_first():
    assert end_of(decide(replace(ALONE, ranks=[rank(0, "a", 7)]))).outcome is State.FAILED
    cancelled = replace(ALONE, request=CancelRequest("cancel", "me", 1.0))
    assert end_of(decide(cancelled)).outcome is State.CANCELLED


def test_after_a_rehearsal_that_passed_the_gang_is_queued():
    end = judged(End(State.SUCCEEDED, "", 0), 64)
    assert end.outcome is State.QUEUED
    assert end.reason == "the rehearsal passed: one rank returned 0; the job waits for 64 GPUs"


@pytest.mark.parametrize("outcome", [State.CANCELLED, State.QUEUED, State.TIMED_OUT])
def test_what_people_and_passes_want_is_no_matter_of_the_rehearsal(outcome):
    assert judged(End(outcome, "why", 1), 64) == End(outcome, "why", 1)


def test_a_failure_says_that_it_was_in_the_rehearsal():
    end = judged(End(State.FAILED, "rank 0 exited with 2", 1), 64)
    assert end.outcome is State.FAILED
    assert end.reason == "in the rehearsal on one GPU: rank 0 exited with 2"


def test_the_rehearsal_of_a_spec_is_the_same_program_on_one_gpu():
    spec = replace(SPEC, gpus=8, min_gpus=4, constraints=Constraints(gpus_per_host=4), outputs="/o", rehearse_s=9.0)
    one = spec.rehearsal
    assert (one.gpus, one.min_gpus, one.constraints.gpus_per_host) == (1, 1, None)
    assert (one.outputs, one.scratch, one.command, one.image) == (None, "/o", spec.command, spec.image)
    assert replace(spec, min_gpus=None).rehearsal.min_gpus is None


def test_status_says_that_a_job_rehearses():
    record = JobRecord("j-00000001", "n", "o", 0, "/i", 4, State.QUEUED, 0.0, 0.0, rehearsal="due")
    assert record.story(1.0) == "waits to rehearse on one GPU"
    assert record.but(state=State.RUNNING).story(1.0) == "rehearses on one GPU"
    assert record.but(state=State.FAILED, reason="x").story(1.0) == "x"
    assert record.but(rehearsal="", state=State.RUNNING).story(1.0) == ""
