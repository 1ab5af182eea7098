"""Faults while a gang trains: gangs continue if they can or restart elsewhere, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from cluster import TRAIN
from faulting import (
    LAUNCHER,
    RANK,
    STEPS,
    assert_no_step_lost,
    events,
    is_adopted,
    kill_supervisor,
    tell,
    train,
    wait_until,
)

from gpurun.jobs.record import CancelRequest
from gpurun.jobs.store import JobStore

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("faults")]


@pytest.fixture
def cluster(mended):
    return mended


def record(story):
    if path := os.environ.get("GPURUN_STORIES"):
        with Path(path).open("a") as stream:
            stream.write(json.dumps(story.row()) + "\n")


def test_the_supervisor_is_killed(cluster, tmp_path):
    job = train(cluster, tmp_path / "recipe")
    since = time.time()
    kill_supervisor(cluster, job)
    time.sleep(2)
    asked = time.monotonic()
    cluster.gpurun("status", job)
    wait_until(lambda: is_adopted(cluster, job))
    assert time.monotonic() - asked <= 3.0
    story = tell(cluster, job, "supervisor killed", since)
    record(story)
    assert (story.state, story.restarts) == ("SUCCEEDED", 0)
    assert_no_step_lost(cluster, job)


def test_a_host_is_powered_off(cluster, tmp_path):
    job = train(cluster, tmp_path / "recipe")
    victim = cluster.job(job)["hosts"][1]
    since = time.time()
    cluster.lab.crash(victim)
    story = tell(cluster, job, "host powered off", since)
    record(story)
    assert (story.state, story.restarts) == ("SUCCEEDED", 1)
    assert story.noticed_s <= 20
    assert story.again_s <= 60
    assert victim not in cluster.job(job)["hosts"]
    rows = {row["host"]: row for row in cluster.status()["hosts"]}
    assert rows[victim]["state"] == "lost"
    assert rows[victim]["free"] < rows[victim]["gpus"]
    cluster.lab.boot(victim)
    wait_until(lambda: {r["host"]: r for r in cluster.status()["hosts"]}[victim]["state"] == "ok")


def test_the_first_host_is_powered_off(cluster, tmp_path):
    """The host has the outputs; the gang resumes from the head's copy."""
    job = train(cluster, tmp_path / "recipe", steps=60)
    copied = cluster.home / "jobs" / job / "outputs" / "step"
    wait_until(lambda: copied.exists() and int(copied.read_text() or 0) >= 5)
    at_least = int(copied.read_text())
    since = time.time()
    cluster.lab.crash(cluster.job(job)["hosts"][0])
    story = tell(cluster, job, "first host powered off", since)
    record(story)
    assert (story.state, story.restarts) == ("SUCCEEDED", 1)
    assert story.noticed_s <= 20
    assert story.again_s <= 60
    assert story.resumed_from is None or story.resumed_from >= at_least, "what the head had is lost"


def test_a_cable_is_pulled_and_put_back(cluster, tmp_path):
    job = train(cluster, tmp_path / "recipe")
    victim = cluster.job(job)["hosts"][1]
    since = time.time()
    cluster.lab.cut(victim)
    time.sleep(5)
    cluster.lab.heal(victim)
    story = tell(cluster, job, "cable pulled for 5 s", since)
    record(story)
    assert (story.state, story.restarts) == ("SUCCEEDED", 0)
    assert_no_step_lost(cluster, job)


def test_the_head_is_cut_off_and_loses_all_its_supervisors(cluster, tmp_path):
    jobs = [train(cluster, tmp_path / f"recipe{number}", steps=200) for number in range(2)]
    since = time.time()
    for job in jobs:
        kill_supervisor(cluster, job)
    cluster.lab.cut("head")
    time.sleep(60)
    cluster.lab.heal("head")
    cluster.gpurun("status")
    for job in jobs:
        story = tell(cluster, job, "head cut off for a minute, all supervisors killed", since)
        record(story)
        assert (story.state, story.restarts) == ("SUCCEEDED", 0)
        assert_no_step_lost(cluster, job, steps=200)


@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(0, id="the launcher's host"),
        pytest.param(1, id="a worker's host", marks=pytest.mark.thorough),
    ],
)
def test_dockerd_is_restarted(cluster, tmp_path, rank):
    """Without live-restore every container of the host ends; the gang starts again from its outputs."""
    job = train(cluster, tmp_path / "recipe")
    victim = cluster.job(job)["hosts"][rank]
    since = time.time()
    assert cluster.lab.run(victim, ["pkill", "-TERM", "-x", "dockerd"]).code == 0
    story = tell(cluster, job, f"dockerd restarted on {'a worker' if rank else 'the launcher'}'s host", since)
    record(story)
    assert (story.state, story.restarts) == ("SUCCEEDED", 1)
    stopping = next(e for e in events(cluster, job) if e.get("state") == "STOPPING")
    assert f"{victim}: its Docker engine" in stopping["reason"]
    told = [e for e in events(cluster, job) if e["kind"] == "host" and "Docker does not answer" in e["state"]]
    assert len(told) <= 3, "an engine that is out must not be told of again and again"


@pytest.mark.parametrize("how", [pytest.param("TERM", marks=pytest.mark.thorough), "KILL"])
def test_dockerd_of_the_launchers_host_stops_for_good(cluster, tmp_path, how):
    """Its configuration is broken. The gang restarts elsewhere; the host is fenced after the repair."""
    job = train(cluster, tmp_path / "recipe")
    victim = cluster.job(job)["hosts"][0]
    cluster.lab.run(victim, ["tee", "/etc/docker/daemon.json"], stdin=b"no JSON")
    try:
        since = time.time()
        assert cluster.lab.run(victim, ["pkill", f"-{how}", "-x", "dockerd"]).code == 0
        if how == "KILL":  # the container survives dockerd, and its exit code is lost
            main = json.loads(cluster.lab.run(victim, ["cat", f"/home/train/.gpurun/jobs/{job}/main.json"]).stdout)
            cluster.lab.run(victim, ["kill", "-KILL", str(main["pid"])])
        story = tell(cluster, job, f"dockerd of the launcher's host stopped for good ({how})", since)
        record(story)
        assert (story.state, story.restarts) == ("SUCCEEDED", 1)
        assert story.noticed_s < 30
        stopping = next(e for e in events(cluster, job) if e.get("state") == "STOPPING")
        assert f"{victim}: its Docker engine has stopped" in stopping["reason"]
        assert {row["host"]: row["state"] for row in cluster.status()["hosts"]}[victim] == "lost"
    finally:
        cluster.lab.run(victim, ["rm", "/etc/docker/daemon.json"])
    wait_until(lambda: cluster.gpurun("recover").code == 0 and not list((cluster.home / "leases").glob("*.lost.json")))


@pytest.mark.parametrize(
    ("victim", "state"),
    [("1", "FAILED"), ("$$", "FAILED"), ("-1", "FAILED")],
    ids=["the container's main process", "itself", "everything else"],
)
def test_a_rank_that_kills_is_no_fault_of_the_host(cluster, tmp_path, victim, state):
    """The signals are those of an engine that stops; the engine is not.

    The one that kills everything else ends the launcher's connections: without them ranks elsewhere are told to end.
    """
    (tmp_path / "recipe.yaml").write_text(
        f"launcher: {LAUNCHER}\nimage: {TRAIN}\ngpus: 2\nmax_restarts: 3\ngrace: 1s\n"
        "constraints: {gpus_per_host: 1}\n"
        f"command: [sh, -c, 'sleep 1; test {RANK} != 0 || kill -TERM {victim}; sleep 30']\n"
    )
    job = cluster.gpurun("submit", str(tmp_path), "-i", str(cluster.inventory)).out.strip()
    cluster.gpurun("wait", job)
    found = cluster.job(job)
    if victim == "1" and LAUNCHER not in ("horovod", "mpirun"):
        state = "SUCCEEDED"  # the process that starts the ranks there heeds no SIGTERM: they go on
    assert (found["state"], found["restarts"]) == (state, 0), found["reason"]
    assert "Docker" not in found["reason"]


@pytest.mark.parametrize("silent_s", [0, 8], ids=["", "its engine tells late"])
def test_a_worker_container_is_killed(cluster, tmp_path, silent_s):
    """Has the effect of an OOM kill. The launcher may end long before Docker reports the container's end."""
    job = train(cluster, tmp_path / "recipe")
    victim = cluster.job(job)["hosts"][1]
    since = time.time()
    main = json.loads(cluster.lab.run(victim, ["cat", f"/home/train/.gpurun/jobs/{job}/main.json"]).stdout)["pid"]
    late = f"kill -STOP $(pidof dockerd); kill -KILL {main}; sleep {silent_s}; kill -CONT $(pidof dockerd)"
    cluster.lab.run(victim, ["sh", "-c", late if silent_s else f"docker kill gpurun-{job}-1"])
    story = tell(cluster, job, "worker's container killed", since)
    record(story)
    assert story.state == "SUCCEEDED"
    assert story.restarts == 1


def test_cancel_is_bounded_by_the_grace(cluster, tmp_path):
    job = train(cluster, tmp_path / "recipe", gpus=4)
    began = time.monotonic()
    assert cluster.gpurun("cancel", job).code == 0
    assert time.monotonic() - began <= 3 + 5
    assert cluster.job(job)["state"] == "CANCELLED"
    asked_s = JobStore(cluster.home).get(job).cancel_request().asked_s
    stopping_s = next(e["t"] for e in events(cluster, job) if e.get("state") == "STOPPING")
    assert stopping_s - asked_s < 3, "the supervisor waited for the end of a log that had none"


STUBBORN = f"""
trap '' TERM; i=0
while :; do i=$((i+1)); echo "line $i"; test "{RANK}" != 0 || echo "$i" >"$GPURUN_OUTPUTS/last"; sleep 0.05; done
"""


def test_a_cancelled_gang_s_log_holds_what_ranks_printed_until_they_were_killed(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"launcher: {LAUNCHER}\nimage: {TRAIN}\ngpus: 2\noutputs: /out\ngrace: 3s\nconstraints: {{gpus_per_host: 1}}\n"
        f"command: {json.dumps(['sh', '-c', STUBBORN])}\n"
    )
    job = cluster.gpurun("submit", str(tmp_path), "-i", str(cluster.inventory)).out.strip()
    cluster.wait_for_log(job, "line 5")
    assert cluster.gpurun("cancel", job).code == 0
    assert cluster.job(job)["state"] == "CANCELLED"
    printed = [int(n) for n in re.findall(r"\[0\]<stdout>:line (\d+)", cluster.log(job))]
    assert printed == list(range(1, len(printed) + 1))
    # The line that it was killed over may have got no further than the launcher.
    assert len(printed) >= int((cluster.home / "jobs" / job / "outputs" / "last").read_text()) - 1


def test_a_preempted_gang_gives_way_and_resumes(cluster, tmp_path):
    """After the scheduler's request: notice, grace, fence, queue; then the gang resumes from its outputs."""
    job = train(cluster, tmp_path / "recipe")
    folder = JobStore(cluster.home).get(job)
    since = time.time()
    folder.ask_to_cancel(CancelRequest("preempt", by="scheduler", asked_s=since, reason="its pool wants it back"))
    story = tell(cluster, job, "preempted", since)
    record(story)
    assert (story.state, story.restarts) == ("SUCCEEDED", 0)
    assert cluster.job(job)["attempt"] == 2
    assert folder.cancel_request() is None
    steps = [int(n) for n in re.findall(r"\[0\]<stdout>:step (\d+)", cluster.log(job))]
    assert steps[-1] == STEPS
    assert len(steps) <= STEPS + 2, "it began again from the beginning"


GROWS = """
import os, sys, time
rank = next(os.environ[name] for name in ("GPURUN_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK") if name in os.environ)
print("up", flush=True)
held = []
while True:
    if rank == "1" and os.path.exists("/tmp/grow"):
        held.append(bytearray(16 << 20))
    time.sleep(0.05)
"""
MEMORY_LIMIT = "192m"


def submit_python(cluster, folder, program, *lines):
    """Start a gang of two ranks of a Python program, one on each host, and wait until both are up; its id."""
    recipe = [f"launcher: {LAUNCHER}", f"image: {TRAIN}", "gpus: 2", "grace: 3s", "constraints: {gpus_per_host: 1}"]
    recipe += ["max_restarts: 2", *lines, f"command: {json.dumps(['python3', '-c', program])}"]
    (folder / "recipe.yaml").write_text("\n".join(recipe) + "\n")
    done = cluster.gpurun("submit", str(folder), "-i", str(cluster.inventory))
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "]<stdout>:up", times=2)
    return job


def test_a_rank_outgrows_the_memory_limit_of_its_container(cluster, tmp_path):
    """The kernel kills only the rank, not the container, so the rank is the cause."""
    job = submit_python(cluster, tmp_path, GROWS)
    victim, container = cluster.job(job)["hosts"][1], f"gpurun-{job}-1"
    limits = ["--memory", MEMORY_LIMIT, "--memory-swap", MEMORY_LIMIT]
    limited = cluster.lab.run(victim, ["docker", "update", *limits, container])
    assert limited.code == 0, limited.stderr
    since = time.time()
    assert cluster.lab.run(victim, ["docker", "exec", container, "touch", "/tmp/grow"]).code == 0
    story = tell(cluster, job, "a rank outgrew its container's memory limit", since)
    record(story)
    found = cluster.job(job)
    assert (story.state, story.restarts) == ("FAILED", 0), found["reason"]
    assert found["exit_code"] == 128 + signal.SIGKILL
    assert (found["first_failure"]["rank"], found["first_failure"]["host"]) == (1, victim), found["first_failure"]
    assert story.noticed_s <= 20


HANG_S = 20
"""A rank that starts so much later than the other one counts as hanging, and a busy machine starts it seconds later."""

HANGS = """
import os, sys, time
sys.path.append("/gpurun/python")
import gpurun_runtime as gpurun
rank = next(os.environ[name] for name in ("GPURUN_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK") if name in os.environ)
print("up", flush=True)
for step in range(1, 6 - int(rank)):
    gpurun.progress(step)
    time.sleep(1.2)  # progress is written once a second at most
print("waits since", time.time(), flush=True)
time.sleep(600)
"""


def test_a_rank_hangs_and_the_others_wait_for_it(cluster, tmp_path):
    """Rank 1 makes one step less than rank 0, which waits for it: the gang is stopped, and not restarted."""
    job = submit_python(cluster, tmp_path, HANGS, f"hang_timeout: {HANG_S}s")
    cluster.wait_for_log(job, "waits since", times=2)
    since = max(float(each) for each in re.findall(r"waits since ([\d.]+)", cluster.log(job)))
    story = tell(cluster, job, "a rank hangs", since)
    record(story)
    found = cluster.job(job)
    assert (story.state, story.restarts) == ("FAILED", 0), found["reason"]
    assert f"rank 1 on {found['hosts'][1]} is furthest behind, at step 4" in found["reason"]
    assert HANG_S <= story.noticed_s <= HANG_S + 15
