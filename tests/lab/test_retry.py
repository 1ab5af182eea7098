"""A program that fails is started again by ``retry``, from its checkpoint, with each launcher, on real hosts."""

from __future__ import annotations

import json
import re
import time

import pytest
from at_once import finish, start
from cluster import TINY, TRAIN
from faulting import events, kill_supervisor
from waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("retry")]

LAUNCHERS = {
    "tasks": TINY, "torchrun": TINY, "jax": TINY, "deepspeed": TINY, "tensorflow": TINY, "mpirun": TRAIN,
    "horovod": TRAIN,
}  # fmt: skip
RANK = (
    'rank = next(os.environ[n] for n in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "GPURUN_RANK") if n in os.environ)\n'
)
BEGINS = f"""
import os, sys, time
{RANK}
attempt, path = int(os.environ["GPURUN_ATTEMPT"]), os.environ["GPURUN_OUTPUTS"] + "/model.pt"
step = int(open(path).read().split()[0]) if os.path.exists(path) else 0
print("attempt", attempt, "rank", rank, "begins at", step, flush=True)
"""
SAVES = """
if rank == "0":
    with open(path + ".tmp", "w") as file:
        file.write(f"{step + 1} " + "w" * 100_000)
    os.replace(path + ".tmp", path)
"""
FAILS = """
time.sleep(0.5)
sys.exit(3 if rank == "0" else time.sleep(60))
"""
FAILS_TWICE_WITH_A_CHECKPOINT = BEGINS + "if attempt < 3:\n" + (SAVES + FAILS).replace("\n", "\n    ")
TOUCHES = BEGINS + "if step: os.utime(path)\n" + "else:" + SAVES.replace("\n", "\n    ") + FAILS
"""The first attempt saves; later ones touch the checkpoint, and write the same content again."""


def retried(cluster, launcher, program, retry, **more):
    flags = ("--launcher", launcher, *more.pop("flags", ()))
    more = {"outputs": "/out", "grace": "1s", **more}
    return start(
        cluster, "tasks", "python3", "-c", program, image=LAUNCHERS[launcher], flags=flags, retry=retry, **more
    )


def said(cluster, job):
    """The words of each state, and of the notes."""
    found = events(cluster, job)
    return [event.get("reason", "") + event.get("text", "") for event in found if event["kind"] in ("state", "note")]


@pytest.mark.parametrize("launchers", [("tasks", "torchrun", "jax", "deepspeed"), ("tensorflow", "mpirun", "horovod")])
def test_a_program_that_fails_twice_after_a_new_checkpoint_goes_on_and_without_one_is_stopped(cluster, launchers):
    quick = {"times": 3, "wait": "1s"}
    works = {each: retried(cluster, each, FAILS_TWICE_WITH_A_CHECKPOINT, quick) for each in launchers}
    for launcher, job in works.items():
        found = finish(cluster, job, "SUCCEEDED", 0)
        assert (found["attempt"], found["retries"], found["restarts"], found["avoid"]) == (3, 2, 0, []), launcher
        log = cluster.log(job)
        assert [f"attempt {number} rank 0 begins at {number - 1}" in log for number in (1, 2, 3)] == [True] * 3, log
        words = said(cluster, job)
        assert "retry 1 of 3" in words and "retry 2 of 3" in words
        assert any(
            re.match(r"retries in 1s \(retry 1 of 3\): (rank 0|\w+ 0 \(rank 0\)) on ", text) for text in words
        ), words
        assert any(text.endswith("; the job saved 'model.pt'") for text in words), words
    stops = {each: retried(cluster, each, BEGINS + FAILS, quick) for each in launchers}
    for launcher, job in stops.items():
        found = finish(cluster, job, "FAILED", 3)
        assert (found["attempt"], found["retries"], found["code"]) == (2, 1, 1), (launcher, found["reason"])
        assert "; attempt 1 failed the same way, and the job has made no progress since" in found["reason"]


LIMITED = BEGINS + SAVES + "if attempt < 3: time.sleep(60)\n"
SAVES_AT_SIGTERM = (
    BEGINS
    + "import signal\nif attempt > 1: sys.exit()\ndef save(*_):"
    + SAVES.replace("\n", "\n    ")
    + "    sys.exit(1)\nsignal.signal(signal.SIGTERM, save)\ntime.sleep(60)\n"
)
LIMIT = {"times": 3, "on": "time_limit", "wait": "1s"}


def test_a_time_limit_that_is_reached_with_progress_goes_on_from_its_checkpoint_and_without_is_the_end(cluster):
    goes_on = retried(cluster, "tasks", LIMITED, LIMIT, time_limit="3s")
    at_the_end = retried(cluster, "torchrun", SAVES_AT_SIGTERM, LIMIT, time_limit="3s", grace="10s")
    stays = retried(cluster, "tasks", BEGINS + "time.sleep(60)", LIMIT, time_limit="3s")
    unasked = retried(cluster, "tasks", LIMITED, 3, time_limit="3s")
    found = finish(cluster, goes_on, "SUCCEEDED", 0)
    assert (found["attempt"], found["retries"]) == (3, 2)
    assert "attempt 3 rank 0 begins at 2" in cluster.log(goes_on)
    assert finish(cluster, at_the_end, "SUCCEEDED", 0)["retries"] == 1
    assert "attempt 2 rank 0 begins at 1" in cluster.log(at_the_end)
    found = finish(cluster, stays, "TIMED_OUT")
    assert (found["attempt"], found["retries"], found["code"]) == (1, 0, 1)
    assert "the attempt made no progress, so another one would reach the time limit, too" in found["reason"]
    assert finish(cluster, unasked, "TIMED_OUT")["attempt"] == 1, "a number alone is for failures and hangs"


FAKES = BEGINS + "import gpurun_runtime as g\ng.progress(attempt * 10 ** 15)\n" + FAILS
HANGS = BEGINS + "if attempt == 1: time.sleep(600)\n"


def test_a_touched_checkpoint_is_no_progress_and_steps_that_are_not_true_cost_only_the_jobs_own_retries(cluster):
    touches = retried(cluster, "tasks", TOUCHES, {"times": 5, "wait": "1s"})
    fakes = retried(cluster, "tasks", FAKES, {"times": 2, "wait": "1s"})
    anyway = retried(cluster, "tasks", BEGINS + FAILS, {"times": 3, "only_with_progress": "false", "wait": "1s"})
    hangs = retried(cluster, "tasks", HANGS, {"times": 1, "wait": "1s"}, hang_timeout="3s")
    found = finish(cluster, touches, "FAILED", 3)
    assert (found["attempt"], found["retries"]) == (2, 1), found["reason"]
    for job, times in ((fakes, 2), (anyway, 3)):
        found = finish(cluster, job, "FAILED", 3)
        assert (found["attempt"], found["retries"]) == (times + 1, times)
        assert found["reason"].endswith(f"; no retry is left: the job had {times} retries")
        assert cluster.gpurun("wait", job).code == 1
    assert finish(cluster, hangs, "SUCCEEDED", 0)["retries"] == 1


def test_a_job_that_waits_for_its_retry_holds_no_gpu_says_so_everywhere_and_can_be_cancelled(cluster):
    job = retried(cluster, "tasks", BEGINS + SAVES + FAILS, {"times": 3, "wait": "10m"})
    until(lambda: cluster.record(job)["state"] == "QUEUED" and cluster.record(job)["restart"], every_s=0.2)
    record = cluster.record(job)
    assert record["granted"] == [] and record["restart"]["at_s"] > time.time() + 500
    assert not list((cluster.home / "leases").glob("[!.]*"))
    place = ("-i", str(cluster.inventory))
    for args in (("status", job), ("why", job), ("show", job), ("status", *place)):
        done = cluster.gpurun(*args)
        assert "(retry 1 of 3): rank 0 on " in done.out and "retries in " in done.out, (args, done.out)
    assert "1 of 3 retries" in cluster.gpurun("status", job).out
    told = json.loads(cluster.gpurun("status", job, "--json").out)["jobs"][0]
    assert (told["retries"], told["restart"]["is_retry"], told["restart"]["attempt"]) == (1, True, 1)
    rows = json.loads(cluster.gpurun("history", "--json").out)
    rows = rows["attempts"] if isinstance(rows, dict) else rows
    assert rows[0]["outcome"] == "RETRIED" and rows[0]["reason"].endswith(
        "; the job saved 'model.pt'; then retry 1 of 3"
    )
    assert cluster.gpurun("cancel", job, "--yes").code == 0
    found = finish(cluster, job, "CANCELLED")
    assert found["attempt"] == 1


def test_a_supervisor_that_is_killed_while_it_ends_an_attempt_does_not_cost_a_retry(cluster):
    """It dies between the end and the retry; its successor decides the same, once."""
    program = BEGINS + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif attempt == 1:"
    program += (SAVES + "if rank == '0': sys.exit(3)\ntime.sleep(60)\n").replace("\n", "\n    ")
    job = retried(cluster, "tasks", program, {"times": 1, "wait": "2s"}, grace="8s")
    until(lambda: cluster.record(job)["state"] == "STOPPING", every_s=0.1)
    assert cluster.record(job)["unjudged"]["outcome"] == "FAILED"
    kill_supervisor(cluster, job)
    assert cluster.gpurun("status", "-i", str(cluster.inventory)).code == 0  # adopts it
    found = finish(cluster, job, "SUCCEEDED", 0)
    assert (found["attempt"], found["retries"]) == (2, 1), found


TRIAL = """
import os, sys
import gpurun_runtime as g
path, attempt = g.outputs() + "/model.pt", int(os.environ["GPURUN_ATTEMPT"])
saved = os.path.exists(path)
open(path, "w").write(str(attempt))
g.report(attempt, accuracy=g.parameters()["lr"])
sys.exit(0 if saved else 5)
"""


def test_a_trial_of_a_sweep_is_retried_as_a_job_is_and_a_rehearsal_is_not(cluster):
    place = ("-i", str(cluster.inventory), "--image", TINY, "--launcher", "tasks", "--retry", "2", "--retry-wait", "1s")
    command = ("--", "python3", "-c", TRIAL)
    done = cluster.gpurun(
        "sweep", *place, "-n", "1", "--outputs", "/out", "--name", "again", "--metric", "accuracy:max",
        "--grid", "lr=1,2", *command,
    )  # fmt: skip
    assert done.code == 0, done.err
    sweep = done.out.strip()
    rehearsed = cluster.gpurun("submit", *place, "-n", "2", "--gpus-per-host", "1", "--rehearse", "60s", *command)
    assert rehearsed.code == 0, rehearsed.err
    until(lambda: json.loads(cluster.gpurun("sweep", "status", sweep, "--json").out)["done"], every_s=1.0)
    found = json.loads(cluster.gpurun("sweep", "status", sweep, "--json").out)
    jobs = [cluster.record(job) for job in (path.name for path in (cluster.home / "jobs").glob("j-*"))]
    trials = [job for job in jobs if job["name"].startswith("again-")]
    assert [(job["state"], job["retries"], job["attempt"]) for job in trials] == [("SUCCEEDED", 1, 2)] * 2, found
    found = finish(cluster, rehearsed.out.strip(), "FAILED")
    assert (found["retries"], found["attempt"]) == (0, 1)
