"""Faults while a gang trains: gangs continue if they can or restart elsewhere, and nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from cluster import TINY
from faulting import (
    IMAGE,
    LAUNCHER,
    RANK,
    adopt,
    assert_no_step_lost,
    events,
    hosts_of,
    kill_supervisor,
    steps_of,
    stopping_reason,
    tell,
    train,
    wait_for_steps,
    wait_until,
)

from gpurun.jobs.record import CancelRequest
from gpurun.jobs.store import JobStore

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("faults")]

STARTS_RANKS = LAUNCHER not in ("horovod", "mpirun")
"""gpurun starts the ranks: no process of the launcher, on the first host, starts them all."""


@pytest.fixture
def cluster(mended):
    return mended


def main_of(cluster, job, host):
    """Return the pid of the container's main process, as its host numbers it."""
    return json.loads(cluster.lab.run(host, ["cat", f"/home/train/.gpurun/jobs/{job}/main.json"]).stdout)["pid"]


def state_of(cluster, host):
    """Return the row of the host in `gpurun status`."""
    return {row["host"]: row for row in cluster.status()["hosts"]}[host]


def wait_for_fences(cluster):
    """Wait until no host is lost."""
    wait_until(lambda: not list((cluster.home / "leases").glob("*.lost.json")))


@pytest.mark.story
def test_training_continues_without_its_supervisor_a_cable_or_the_head(cluster, tmp_path):
    job = train(cluster, tmp_path / "recipe")
    kill_supervisor(cluster, job)
    adopt(cluster, job)
    wait_for_steps(cluster, job)

    cluster.lab.cut(hosts_of(cluster, job)[1])
    time.sleep(5)
    cluster.lab.heal(hosts_of(cluster, job)[1])
    wait_for_steps(cluster, job)

    kill_supervisor(cluster, job)
    cluster.lab.cut("head")
    time.sleep(5)
    cluster.lab.heal("head")
    adopt(cluster, job)
    wait_for_steps(cluster, job)
    assert_no_step_lost(cluster, job)


@pytest.mark.story
def test_a_host_that_is_slow_or_cut_off_while_a_supervisor_takes_over_is_not_lost(cluster, tmp_path):
    """Its sshd accepts connections and does not answer for 10 s; later no packet reaches it for 5 s."""
    job = train(cluster, tmp_path / "recipe")
    host = hosts_of(cluster, job)[1]
    cluster.lab.run(host, ["sh", "-c", 'kill -STOP "$(cat /run/sshd.pid)"'])
    try:
        kill_supervisor(cluster, job)
        adopt(cluster, job)
        time.sleep(10)
    finally:
        cluster.lab.run(host, ["sh", "-c", 'kill -CONT "$(cat /run/sshd.pid)"'])
    wait_for_steps(cluster, job)
    cluster.lab.cut(host)
    kill_supervisor(cluster, job)
    adopt(cluster, job)
    time.sleep(5)
    cluster.lab.heal(host)
    wait_for_steps(cluster, job)
    assert_no_step_lost(cluster, job)


def test_the_head_is_cut_off_for_longer_than_a_lost_host(cluster, tmp_path):
    """One of two gangs has no supervisor meanwhile. The other supervisor hears nobody, so it takes no host for lost."""
    jobs = [train(cluster, tmp_path / f"recipe{number}") for number in range(2)]
    kill_supervisor(cluster, jobs[0])
    cluster.lab.cut("head")
    time.sleep(20)  # a host that is silent for 14 s is lost
    cluster.lab.heal("head")
    adopt(cluster, jobs[0])
    for job in jobs:
        wait_for_steps(cluster, job)
        assert_no_step_lost(cluster, job)


@pytest.mark.parametrize(
    ("which", "noticed_s", "again_s"),
    [
        pytest.param(0, 120, 240, id="the first, which has the outputs", marks=pytest.mark.story),
        pytest.param(1, 20, 60, id="another", marks=pytest.mark.alone),
    ],
)
def test_a_host_is_powered_off(cluster, tmp_path, which, noticed_s, again_s):
    """The gang resumes elsewhere from the head's copy of the outputs. The host is lost until it has been fenced."""
    job = train(cluster, tmp_path / "recipe")
    copied = cluster.home / "jobs" / job / "outputs" / "step"
    cluster.wait_until(job, lambda: copied.exists() and int(copied.read_text().split()[0]) >= 3)
    at_least = int(copied.read_text().split()[0])
    victim = hosts_of(cluster, job)[which]
    since = time.time()
    cluster.lab.crash(victim)
    story = tell(cluster, job, f"{'another' if which else 'the first'} host powered off", since)
    assert (story.state, story.restarts) == ("RUNNING", 1)
    assert story.noticed_s <= noticed_s
    assert story.again_s <= again_s
    assert story.resumed_from is None or story.resumed_from >= at_least, "what the head had is lost"
    assert victim not in hosts_of(cluster, job)
    row = state_of(cluster, victim)
    assert row["state"] == "lost" and row["free"] < row["gpus"]
    cluster.lab.boot(victim)
    wait_for_fences(cluster)
    assert state_of(cluster, victim)["state"] == "ok"


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, marks=pytest.mark.story), *([] if STARTS_RANKS else [1])],
    ids=lambda rank: f"rank {rank}'s host",
)
def test_dockerd_is_restarted(cluster, tmp_path, rank):
    """Without live-restore every container of the host ends; the gang starts again from its outputs."""
    job = train(cluster, tmp_path / "recipe")
    victim = hosts_of(cluster, job)[rank]
    since = time.time()
    assert cluster.lab.run(victim, ["pkill", "-TERM", "-x", "dockerd"]).code == 0
    story = tell(cluster, job, f"dockerd restarted on rank {rank}'s host", since)
    assert (story.state, story.restarts) == ("RUNNING", 1)
    assert f"{victim}: the host's Docker engine" in stopping_reason(cluster, job)
    told = [e for e in events(cluster, job) if e["kind"] == "host" and "Docker does not answer" in e["state"]]
    assert len(told) <= 3, "gpurun must not report an engine that is out again and again"


@pytest.mark.parametrize("how", ["TERM", pytest.param("KILL", marks=pytest.mark.story)])
def test_dockerd_of_the_first_host_stops_for_good(cluster, tmp_path, how):
    """Its configuration is broken. The gang restarts elsewhere; the host is fenced after the repair."""
    job = train(cluster, tmp_path / "recipe")
    victim = hosts_of(cluster, job)[0]
    cluster.lab.run(victim, ["tee", "/etc/docker/daemon.json"], stdin=b"no JSON")
    try:
        since = time.time()
        assert cluster.lab.run(victim, ["pkill", f"-{how}", "-x", "dockerd"]).code == 0
        if how == "KILL":  # the container survives dockerd, and its exit code is lost
            cluster.lab.run(victim, ["kill", "-KILL", str(main_of(cluster, job, victim))])
        story = tell(cluster, job, f"dockerd of the first host stopped for good ({how})", since)
        assert (story.state, story.restarts) == ("RUNNING", 1)
        assert f"{victim}: the host's Docker engine has stopped" in stopping_reason(cluster, job)
        assert victim not in hosts_of(cluster, job)
        assert state_of(cluster, victim)["state"] == "lost"
    finally:
        cluster.lab.run(victim, ["rm", "/etc/docker/daemon.json"])
    wait_until(lambda: cluster.gpurun("recover").code == 0 and not list((cluster.home / "leases").glob("*.lost.json")))


@pytest.mark.story
def test_a_rank_that_kills_is_no_fault_of_its_host(cluster, tmp_path):
    """The signals are those of an engine that stops; the engine does not.

    A rank that kills everything else also ends what connects it with its launcher.
    """
    jobs = {}
    for name, victim in (("main", "1"), ("itself", "$$"), ("all", "-1")):
        (tmp_path / f"{name}.yaml").write_text(
            f"launcher: {LAUNCHER}\nimage: {IMAGE}\ngpus: 2\nmax_restarts: 3\ngrace: 1s\n"
            "constraints: {gpus_per_host: 1}\n"
            f"command: [sh, -c, 'sleep 1; test {RANK} != 0 || kill -TERM {victim}; sleep 3']\n"
        )
        done = cluster.gpurun("submit", str(tmp_path / f"{name}.yaml"), "-i", str(cluster.inventory))
        assert done.code == 0, done.err
        jobs[name] = done.out.strip()
    wait_until(lambda: all(cluster.record(job)["ended_s"] for job in jobs.values()))
    # Where gpurun starts the ranks, the main process ignores SIGTERM; busybox passes no signal on to its rank.
    passes = {"main": not STARTS_RANKS, "itself": True, "all": IMAGE != TINY}
    for name, job in jobs.items():
        state = "FAILED" if passes[name] else "SUCCEEDED"
        found = cluster.record(job)
        assert (found["state"], found["restarts"]) == (state, 0), (name, found["reason"])
        assert "Docker" not in found["reason"]


@pytest.mark.parametrize("silent_s", [pytest.param(0, marks=pytest.mark.story), 8], ids=["", "its engine tells late"])
def test_a_worker_container_is_killed(cluster, tmp_path, silent_s):
    """Has the effect of an OOM kill. The other ranks and the launcher may end long before Docker reports it."""
    job = train(cluster, tmp_path / "recipe")
    victim = hosts_of(cluster, job)[1]
    main = main_of(cluster, job, victim)
    late = f"kill -STOP $(pidof dockerd); kill -KILL {main}; sleep {silent_s}; kill -CONT $(pidof dockerd)"
    since = time.time()
    cluster.lab.run(victim, ["sh", "-c", late if silent_s else f"docker kill gpurun-{job}-1"])
    story = tell(cluster, job, f"worker's container killed, Docker silent for {silent_s} s", since)
    assert (story.state, story.restarts) == ("RUNNING", 1)
    assert stopping_reason(cluster, job).startswith(f"{victim}: the job's container ended")


@pytest.mark.story
def test_a_preempted_gang_saves_ends_and_resumes(cluster, tmp_path):
    """After the scheduler's request: notice, grace, fence, queue; then the gang resumes from its outputs."""
    job = train(cluster, tmp_path / "recipe", gpus=4)
    folder = JobStore(cluster.home).get(job)
    since = time.time()
    folder.ask_to_cancel(CancelRequest("preempt", by="scheduler", asked_s=since, reason="its pool wants it back"))
    story = tell(cluster, job, "preempted", since)
    assert (story.state, story.restarts) == ("RUNNING", 0)
    assert cluster.record(job)["attempt"] == 2
    assert folder.cancel_request() is None
    steps = steps_of(cluster, job)
    assert len(steps) <= steps[-1] + (0 if LAUNCHER == "tasks" else 2), "it began again from the beginning"
    assert cluster.gpurun("cancel", job).code == 0
    assert cluster.record(job)["state"] == "CANCELLED"
    saved = (cluster.home / "jobs" / job / "outputs" / "step").read_text().split()[0]
    assert steps_of(cluster, job)[-1] == int(saved), "the last step is not in the log, or its checkpoint is not here"


STUBBORN = f"""
trap '' TERM; i=0
while :; do i=$((i+1)); echo "line $i"; test "{RANK}" != 0 || echo "$i" >"$GPURUN_OUTPUTS/last"; sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("stopping_s", "free_s"),
    [
        pytest.param(9, 60, marks=pytest.mark.story, id="in the order"),
        pytest.param(3, 8, marks=pytest.mark.alone, id="in the time"),
    ],
)
def test_a_cancel_is_bounded_by_the_grace_and_its_log_is_complete(cluster, tmp_path, stopping_s, free_s):
    """All ranks ignore SIGTERM. The log has what they print until they are killed."""
    (tmp_path / "recipe.yaml").write_text(
        f"launcher: {LAUNCHER}\nimage: {IMAGE}\ngpus: 4\noutputs: /out\ngrace: 3s\nconstraints: {{gpus_per_host: 1}}\n"
        f"command: {json.dumps(['sh', '-c', STUBBORN])}\n"
    )
    job = cluster.gpurun("submit", str(tmp_path), "-i", str(cluster.inventory)).out.strip()
    cluster.wait_for_log(job, "<stdout>:line 5\n", times=4)
    assert cluster.gpurun("cancel", job).code == 0
    found = cluster.record(job)
    assert found["state"] == "CANCELLED"
    assert not list((cluster.home / "leases").glob("*.json")), "it has ended before its GPUs were free"
    asked_s = JobStore(cluster.home).get(job).cancel_request().asked_s
    began_s = next(e["t"] for e in events(cluster, job) if e.get("state") == "STOPPING")
    assert began_s - asked_s < stopping_s, "the supervisor waited for the end of a log that had none"
    assert 3 <= found["ended_s"] - asked_s <= free_s
    printed = [int(n) for n in re.findall(r"\[0\]<stdout>:line (\d+)", cluster.log(job))]
    assert printed == list(range(1, len(printed) + 1))
    # The line that it was killed over may have got no further than the launcher.
    assert len(printed) >= int((cluster.home / "jobs" / job / "outputs" / "last").read_text()) - 1


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
    recipe = [f"launcher: {LAUNCHER}", f"image: {IMAGE}", "gpus: 2", "grace: 3s", "constraints: {gpus_per_host: 1}"]
    recipe += ["max_restarts: 2", *lines, f"command: {json.dumps(['python3', '-c', program])}"]
    (folder / "recipe.yaml").write_text("\n".join(recipe) + "\n")
    done = cluster.gpurun("submit", str(folder), "-i", str(cluster.inventory))
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "]<stdout>:up", times=2)
    return job


@pytest.mark.story
def test_a_rank_outgrows_the_memory_limit_of_its_container(cluster, tmp_path):
    """The kernel kills only the rank, not the container, so the rank is the cause."""
    job = submit_python(cluster, tmp_path, GROWS)
    victim, container = hosts_of(cluster, job)[1], f"gpurun-{job}-1"
    limits = ["--memory", MEMORY_LIMIT, "--memory-swap", MEMORY_LIMIT]
    limited = cluster.lab.run(victim, ["docker", "update", *limits, container])
    assert limited.code == 0, limited.stderr
    since = time.time()
    assert cluster.lab.run(victim, ["docker", "exec", container, "touch", "/tmp/grow"]).code == 0
    story = tell(cluster, job, "a rank outgrew its container's memory limit", since)
    found = cluster.record(job)
    assert (story.state, story.restarts) == ("FAILED", 0), found["reason"]
    assert found["first_failure"]["exit_code"] == 128 + signal.SIGKILL
    assert (found["first_failure"]["rank"], found["first_failure"]["host"]) == (1, victim), found["first_failure"]


HANG_S = 8
"""A rank that starts so much later than the last step of the other one counts as hanging."""

HANGS = """
import os, sys, time
sys.path.append("/gpurun/python")
import gpurun_runtime as gpurun
rank = next(os.environ[name] for name in ("GPURUN_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK") if name in os.environ)
print("up", flush=True)
for step in range(1, 4 - int(rank)):
    gpurun.progress(step)
    time.sleep(1.2)  # progress is written once a second at most
print("waits since", time.time(), flush=True)
time.sleep(600)
"""


@pytest.mark.story
def test_a_rank_hangs_and_the_others_wait_for_it(cluster, tmp_path):
    """Rank 1 makes one step less than rank 0, which waits for it: the gang is stopped, and not restarted."""
    job = submit_python(cluster, tmp_path, HANGS, f"hang_timeout: {HANG_S}s")
    cluster.wait_for_log(job, "waits since", times=2)
    since = max(float(each) for each in re.findall(r"waits since ([\d.]+)", cluster.log(job)))
    story = tell(cluster, job, "a rank hangs", since)
    found = cluster.record(job)
    assert (story.state, story.restarts) == ("FAILED", 0), found["reason"]
    assert f"rank 1 on {hosts_of(cluster, job)[1]} is furthest behind, at step 2" in found["reason"]
    assert story.noticed_s >= HANG_S - 1  # its last progress is up to 1.2 s older
