"""Whether a job is retried whose program failed, hung or reached its time limit, and what counts as progress."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs_world import outputs_job

from gpurun.history.row import row_of
from gpurun.jobs.record import FirstFailure, JobRecord, Restart, Setback, State, Unjudged
from gpurun.jobs.spec import JobSpec, Retry
from gpurun.jobs.store import JobStore, finish
from gpurun.supervisor.outputs import progress
from gpurun.supervisor.outputs.outputs import collect_outputs, send_outputs
from gpurun.supervisor.outputs.progress import BEGAN, new_checkpoint
from gpurun.supervisor.verdict import ends
from gpurun.supervisor.verdict.ends import End, Reached

FAILED = End(State.FAILED, "rank 0 failed", 1, failure=FirstFailure("rank 0 failed", rank=0, exit_code=1, kind="rank"))
OVER = End(State.TIMED_OUT, "the job ran longer than its time limit of 1h", 1)
RECORD = JobRecord(
    "j-00000001",
    "n",
    "o",
    0,
    "/i",
    4,
    State.STOPPING,
    0.0,
    0.0,
    attempt=1,
    outcome=State.QUEUED,
    reason="rank 0 failed",
)


def because(kind, **more):
    return replace(FAILED, failure=FirstFailure("why", kind=kind), **more)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (FAILED, "failure"),
        (because("launcher"), "failure"),
        (because("oom"), "failure"),
        (because("xid"), "failure"),
        (because("hang"), "hang"),
        (OVER, "time_limit"),
        (replace(FAILED, suspects=("h1",)), None),
        (replace(FAILED, code=2), None),
        (because(""), None),
        (because("host-lost"), None),
        (because("link"), None),
        (because("idle"), None),
        (replace(FAILED, failure=None), None),
        (End(State.SUCCEEDED, "", 0), None),
        (End(State.CANCELLED, "cancelled by you", 1), None),
        (End(State.QUEUED, "preempted", 1), None),
    ],
)
def test_only_what_the_program_did_is_its_end(end, cause):
    assert ends.programs_end(end, has_run=True) == cause
    assert ends.programs_end(end, has_run=False) is None


def attempt(number=1, before=None, *, step=None, saved=None, kind="rank", code=1, rank=0):
    failure = FirstFailure("rank failed", rank=rank, exit_code=code, kind=kind)
    return ends.setback_of(failure, attempt=number, step=step, saved=saved, ran_s=20.0, before=before)


def judged(retry, setback, before=None, *, written="", cause="failure", retries=0, now_s=1000.0):
    outcome = State.TIMED_OUT if cause == "time_limit" else State.FAILED
    record = RECORD.but(setback=setback, unjudged=Unjudged(outcome, cause, before), retries=retries)
    return ends.judged_retry(record, retry, written, now_s=now_s)


def test_one_failure_without_progress_is_retried_and_the_second_is_the_end():
    first = judged(Retry(3), attempt())
    assert (first.outcome, first.restart.attempt, first.restart.of) == (State.QUEUED, 1, 3)
    assert first.reason == "rank 0 failed; the attempt made no progress"
    second = judged(Retry(3), attempt(2, first.setback), first.setback, retries=1)
    assert (second.outcome, second.restart) == (State.FAILED, None)
    assert second.reason.endswith("; attempt 1 failed the same way, and the job has made no progress since")
    other = judged(Retry(3), attempt(2, first.setback, rank=7, code=134), first.setback, retries=1)
    assert (other.outcome, other.restart) == (State.FAILED, None)
    assert other.reason.endswith("; 2 attempts in a row made no progress, so gpurun does not retry the job again")
    anyway = judged(Retry(3, only_with_progress=False), attempt(2, first.setback), first.setback, retries=1)
    assert anyway.restart.retry_words == "retry 2 of 3"


@pytest.mark.parametrize(
    ("more", "written", "words"),
    [
        ({"step": 11}, "", "the job reached step 11"),
        ({"step": 3, "saved": 11}, "", "the job saved step 11"),
        ({}, "'model.pt'", "the job saved 'model.pt'"),
        ({"step": 10}, "", ""),
        ({"step": 10, "saved": 10}, "", ""),
        ({"step": -1}, "", ""),
    ],
)
def test_progress_is_a_further_step_a_further_saved_step_or_a_new_checkpoint(more, written, words):
    before = attempt(step=10, saved=10)
    found = judged(Retry(9), attempt(2, before, **more), before, written=written, retries=1)
    assert (found.outcome is State.QUEUED) == bool(words), "it failed the same way"
    assert found.reason.endswith(f"; {words}") if words else "no progress since" in found.reason
    assert found.setback.futile == (0 if words else 1)


def test_a_step_must_be_further_than_that_of_any_attempt_before_also_by_a_record_of_an_older_gpurun():
    far = attempt(step=100)
    near = attempt(2, far, step=None, rank=3)
    assert near.furthest == 100
    third = attempt(3, near, step=50, rank=5)
    assert ends.progress_of(third, near, "") == ""
    old = Setback(1, "rank", "", 0, 1, 100, 20.0)
    assert attempt(2, old, step=50).furthest == 100
    assert ends.progress_of(attempt(2, old, step=50), old, "") == ""


def test_a_time_limit_is_retried_only_with_progress():
    found = judged(Retry(3, ("time_limit",)), attempt(kind=""), cause="time_limit")
    assert (found.outcome, found.restart) == (State.TIMED_OUT, None)
    assert "another one would reach the time limit, too" in found.reason
    assert judged(Retry(3, ("time_limit",)), attempt(kind="", step=7), cause="time_limit").restart is not None
    anyway = Retry(3, ("time_limit",), only_with_progress=False)
    assert judged(anyway, attempt(kind=""), cause="time_limit").restart is not None


def test_a_hosts_fault_between_two_failures_neither_counts_nor_forgets():
    first = judged(Retry(3), attempt()).setback
    lost = ends.setback_of(FirstFailure("gone", kind="host-lost"), attempt=2, step=None, ran_s=1.0, before=first)
    assert lost.futile == 1
    found = judged(Retry(3), attempt(3, lost, rank=2), lost, retries=1)
    assert (found.outcome, found.setback.futile) == (State.FAILED, 2)


def test_what_ranks_report_late_only_adds():
    found = ends.with_steps(attempt(step=5, saved=3), Reached(4, None))
    assert (found.step, found.furthest, found.saved) == (5, 5, 3)
    found = ends.with_steps(found, Reached(6, 6))
    assert (found.step, found.furthest, found.saved) == (6, 6, 6)
    assert ends.with_steps(found, Reached()) == found


@given(
    st.builds(
        Retry,
        st.integers(1, 9),
        st.just(("failure",)),
        only_with_progress=st.booleans(),
        wait_s=st.none() | st.floats(0, 86400),
    ),
    st.lists(st.tuples(st.none() | st.integers(0, 9), st.booleans(), st.integers(0, 1)), min_size=1, max_size=12),
)
def test_no_job_is_retried_more_often_than_it_asks_and_none_without_progress_twice(retry, attempts):
    before, retries, in_vain = None, 0, 0
    for number, (step, has_written, rank) in enumerate(attempts, start=1):
        record = RECORD.but(retries=retries, setback=before, attempt=number)
        unjudged = ends.unjudged_of(record, retry, FAILED, "failure")
        if unjudged is None:
            assert retries == retry.times
            assert ends.has_used_all(record, retry, "failure")
            return
        setback = attempt(number, before, step=step, rank=rank)
        found = judged(retry, setback, before, written="'x'" if has_written else "", retries=retries)
        in_vain = 0 if found.setback.futile == 0 else in_vain + 1
        if found.restart is None:
            assert retry.only_with_progress and in_vain
            return
        assert not (retry.only_with_progress and in_vain > 1)
        assert found.restart.at_s >= 1000.0 + (retry.wait_s or 0.0)
        before, retries = found.setback, retries + 1


def test_a_retry_in_words_and_when_it_is_due():
    retry = Restart(1000.0, 2, 3, is_retry=True, wait_s=3600.0)
    assert retry.words(988.0) == "retries in 12s (retry 2 of 3)"
    assert retry.words(1000.0) == "waits to be retried (retry 2 of 3)"
    assert not retry.is_due(1000.0 - 3600.0), "its own wait may be longer than a restart's"
    assert retry.is_due(1000.0 - 3700.0), "the clock was set back: it waits no longer than it asks"
    record = RECORD.but(state=State.QUEUED, restart=retry, outcome=None)
    assert record.story(988.0) == "retries in 12s (retry 2 of 3): rank 0 failed"
    assert row_of(record, None, None).reason == "rank 0 failed; then retry 2 of 3"
    assert Retry(1, ("hang", "hang")).words == "up to 1 retry after a hang, only with progress"
    assert Retry(0).words == "no retry"


def test_a_job_whose_lease_is_removed_before_the_retry_is_decided_ends(tmp_path):
    inventory = tmp_path / "inventory.yaml"
    store = JobStore(tmp_path / "home")
    folder = store.create(JobSpec("n", "i", 4, ("true",), retry=Retry(3)), inventory=inventory, now_s=0.0)
    unjudged = Unjudged(State.TIMED_OUT, "time_limit")
    record = folder.write(
        folder.record().but(state=State.STOPPING, attempt=1, outcome=State.QUEUED, unjudged=unjudged, reason="over")
    )
    ended = finish(store, record, now_s=5.0)
    assert (ended.state, ended.unjudged, ended.reason) == (State.TIMED_OUT, None, "over")


# What an attempt has written, from real agents on folders of this machine.


@pytest.fixture
def job(tmp_path, world):
    made = outputs_job(tmp_path, world, "h1")
    made.spec.retry = Retry(3)
    return made


def begins(job):
    """An attempt begins with what the head has."""
    send_outputs(job)


def written(job):
    """What the attempt has written, when it has ended."""
    assert collect_outputs(job) == set()
    job.host().mkdir(parents=True, exist_ok=True)
    return new_checkpoint(job.outputs, job.folder.path)


def test_new_content_is_a_checkpoint_and_a_touched_one_is_not(job):
    begins(job)
    assert written(job) == ""
    begins(job)
    (job.host() / "model.pt").write_bytes(b"w" * 1_000_000)
    assert written(job) == "'model.pt'"
    assert written(job) == "'model.pt'", "a supervisor that takes over decides the same"
    begins(job)
    os.utime(job.host() / "model.pt", (1, 1))
    assert written(job) == ""
    begins(job)
    (job.host() / "new").write_bytes(b"w" * 1_000_000)
    (job.host() / "new").replace(job.host() / "model.pt")
    assert written(job) == "", "the same content, in another file"
    begins(job)
    (job.host() / "model.pt").rename(job.host() / "model-2.pt")
    assert written(job) == "", "another name"
    begins(job)
    with (job.host() / "model-2.pt").open("r+b") as file:
        file.write(b"v")
    (job.host() / ("b" * 200)).write_text("x")
    assert written(job).endswith("' and 1 more")


def test_a_file_that_the_disk_cannot_read_holds_no_gpus(job, monkeypatch):
    """The GPUs stay leased until it is decided whether the job is retried."""
    begins(job)
    (job.host() / "bad.pt").write_bytes(b"b" * 100_000)
    (job.host() / "good.pt").write_bytes(b"w" * 100_001)
    assert written(job) == "'bad.pt' and 1 more"
    read = os.pread

    def failing(descriptor, size, at):
        if os.fstat(descriptor).st_size == 100_000:
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, size, at)

    monkeypatch.setattr(os, "pread", failing)
    assert new_checkpoint(job.outputs, job.folder.path) == "'good.pt'"


def test_an_older_file_that_was_not_compared_is_not_new(job, monkeypatch):
    """Only the newest files are compared, and a file that goes lets an older one in."""
    monkeypatch.setattr(progress, "MOST_FILES", 3)
    begins(job)
    for n in range(6):
        (job.host() / f"{n}.pt").write_text(f"content {n}")
        os.utime(job.host() / f"{n}.pt", (n + 1, n + 1))
    assert written(job) == "'3.pt' and 2 more"
    begins(job)
    (job.host() / "5.pt").unlink()
    assert written(job) == ""
    (job.host() / "4.pt").write_text("content of the next attempt")
    assert written(job) == "'4.pt'"


def test_a_slow_disk_holds_the_gpus_only_for_a_while(job, monkeypatch):
    begins(job)
    for n in range(50):
        (job.host() / f"{n}.pt").write_text(f"content {n}")
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: [time.sleep(0.05), read(*arguments)][1])
    monkeypatch.setattr(progress, "COMPARED_S", 0.3)
    assert collect_outputs(job) == set()
    began_s = time.monotonic()
    assert new_checkpoint(job.outputs, job.folder.path)
    assert time.monotonic() - began_s < 2.0


def test_logs_links_and_empty_files_are_no_checkpoints(job):
    begins(job)
    (job.host() / "wandb/run").mkdir(parents=True)
    (job.host() / "wandb/run/output").write_text("step 1")
    for name in ("train.log", "events.out.tfevents.1700000000.h1", "core.17", "slurm.out", "x.tmp"):
        (job.host() / name).write_text(os.urandom(8).hex())
    (job.host() / "empty").touch()
    (job.host() / "link").symlink_to("/etc/passwd")
    os.mkfifo(job.host() / "pipe")
    assert collect_outputs(job) == set()
    assert new_checkpoint(job.outputs, job.folder.path) == ""


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"model.pt": 7}', b"\xff", b'"x"'])
def test_a_damaged_note_of_the_beginning_gives_a_retry_and_breaks_nothing(job, damage):
    (job.host() / "model.pt").write_text("w")
    assert written(job)
    begins(job)
    (job.folder.path / BEGAN).plain.write_bytes(damage)
    assert written(job) == "'model.pt'"


def test_a_name_of_any_bytes_is_shown_and_cannot_fill_the_record(job):
    begins(job)
    (job.host() / os.fsdecode(b"caf\xe9\n\x1b[31m" + b"x" * 200)).write_text("w")
    text = written(job)
    assert text.isprintable() and len(text) < 200
