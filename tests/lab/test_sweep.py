"""Sweeps on real hosts: each trial runs once despite crashes, and bad trials save and stop early."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import LOOK_S, TINY
from faulting import kill_supervisor, wait_until
from waiting import until

from gpurun.lab.process import NoSuchLab
from gpurun.studies.store import SweepStore

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("sweep")]

PROGRAM = """
import os, signal, sys, time
import gpurun_runtime as gpurun
lr = gpurun.parameters()["lr"]
gpurun.stopping()
while "GATE" in os.environ and not os.path.exists("/tmp/go") and not gpurun.stopping():
    time.sleep(0.1)
steps = int(os.environ.get("STEPS", "3")) if lr == float(os.environ.get("ENDS", lr)) else 10_000
for step in range(1, steps + 1):
    time.sleep(float(os.environ.get("PAUSE", "0.1")))
    gpurun.report(step, accuracy=lr * step)
    if gpurun.stopping():
        open(gpurun.outputs() + "/saved", "w").write(str(step))
        sys.exit(143)
print("trial", os.environ["GPURUN_TRIAL"], sys.argv[1:], os.environ["GPURUN_PARAMETER_LR"])
"""
GO = "docker ps -q --filter label=gpurun.job | xargs -I{} docker exec {} touch /tmp/go"


@pytest.fixture
def cluster(mended):
    yield mended
    mended.gpurun("sweep", "stop", "lr")


def sweep(cluster, *flags, gpus=1):
    """Begin a sweep of ``PROGRAM``; its id."""
    done = cluster.gpurun(
        "sweep", "-i", str(cluster.inventory), "-n", str(gpus), "--image", TINY, "--launcher", "tasks", "--name", "lr",
        "--metric", "accuracy:max", *flags, "--", "python3", "-c", PROGRAM,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.strip()


def state(cluster, ident):
    """A sweep as the command shows it, which also starts a conductor if there is none."""
    return json.loads(cluster.gpurun("sweep", "status", ident, "--json").out)


def counts(cluster, ident):
    """How many trials are in each state, as the sweep's files have it: no command runs."""
    return SweepStore(cluster.home).get(ident).trials().counts()


def ended(cluster, ident):
    """Wait until a sweep is over, with all gates open; the sweep."""

    def found():
        for host in cluster.lab.hosts:
            with suppress(NoSuchLab):  # it is off
                cluster.lab.run(host.name, ["sh", "-c", GO])
        return (now := state(cluster, ident))["done"] and now

    return until(found, lambda: state(cluster, ident), every_s=1.0)


def conductor(ident):
    """The process of a sweep; None if it has none."""
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"gpurun.studies.sweep_main\0{ident}\0".encode() in (entry / "cmdline").read_bytes()
            ):
                return int(entry.name)
        except OSError:
            continue
    return None


def running(cluster):
    """A job that runs: its id and its host."""

    def found():
        for path in sorted((cluster.home / "jobs").glob("j-*")):
            record = cluster.record(path.name)
            if record["state"] == "RUNNING":
                return record["id"], record["granted"][0]["host"]
        return None

    return until(found, every_s=LOOK_S)


def test_a_grid_runs_every_point_and_names_the_best(cluster):
    ident = sweep(cluster, "--grid", "lr=0.1,0.3,0.2,0.05", "--as-flags")
    found = ended(cluster, ident)
    assert found["counts"] == {"open": 0, "complete": 4, "pruned": 0, "failed": 0, "cancelled": 0}
    assert [trial["parameters"]["lr"] for trial in found["trials"]] == [0.3, 0.2, 0.1, 0.05]
    best = json.loads(cluster.gpurun("sweep", "best", ident, "--json").out)
    assert (best["parameters"], best["step"], round(best["value"], 9)) == ({"lr": 0.3}, 3, 0.9)
    assert f"trial {ident}/1 ['--lr=0.3'] 0.3" in cluster.gpurun("logs", best["job"], "--rank", "0").out
    rows = list(csv.DictReader(io.StringIO(cluster.gpurun("sweep", "table", ident, "--csv").out)))
    assert [row["lr"] for row in rows] == ["0.3", "0.2", "0.1", "0.05"]
    assert "accuracy 0.9 with --lr=0.3" in cluster.gpurun("sweep", "status").out
    jobs = cluster.status()["jobs"]
    assert sorted(job["name"] for job in jobs) == ["lr-0", "lr-1", "lr-2", "lr-3"]
    wait_until(lambda: conductor(ident) is None)


def test_losers_are_stopped_early_save_and_leave(cluster):
    ident = sweep(
        cluster, "--grid", "lr=0.9,0.1,0.2", "--stop", "asha:min=2,factor=3", "--outputs", "/out",
        "--max-parallel", "1", "-e", "STEPS=8", "-e", "PAUSE=0.2", "-e", "ENDS=0.9",
    )  # fmt: skip
    found = ended(cluster, ident)
    assert found["counts"]["complete"] == 1 and found["counts"]["pruned"] == 2
    assert found["trials"][0]["parameters"]["lr"] == 0.9 and found["best"]["step"] == 8
    for trial in found["trials"][1:]:
        assert "stopped early: accuracy was" in trial["reason"]
        saved = (cluster.home / "jobs" / trial["job"] / "outputs" / "saved").read_text()
        assert int(saved) >= 2


def the_eight(cluster):
    """Eight trials have a GPU each and wait for the test; two more follow them."""
    values = ",".join(f"{n / 100}" for n in range(1, 11))
    ident = sweep(cluster, "--grid", f"lr={values}", "-e", "GATE=1")
    until(lambda: counts(cluster, ident)["open"] >= 8, every_s=LOOK_S)
    return ident


def assert_each_ran_once(cluster, ident):
    found = ended(cluster, ident)
    assert found["counts"]["complete"] == 10, found
    jobs = {path.name for path in (cluster.home / "jobs").glob("j-*")}
    assert {trial["job"] for trial in found["trials"]} == jobs and len(jobs) == 10
    assert sorted(trial["parameters"]["lr"] for trial in found["trials"]) == [n / 100 for n in range(1, 11)]
    assert all(round(trial["value"] / trial["parameters"]["lr"]) == 3 for trial in found["trials"])


@pytest.mark.story
def test_none_is_lost_and_none_runs_twice_if_the_conductor_and_a_supervisor_die(cluster):
    ident = the_eight(cluster)
    job, _ = running(cluster)
    os.kill(until(lambda: conductor(ident)), signal.SIGKILL)
    kill_supervisor(cluster, job)
    assert_each_ran_once(cluster, ident)


def test_none_is_lost_and_none_runs_twice_if_a_host_and_then_the_conductor_die(cluster):
    ident = the_eight(cluster)
    cluster.lab.crash(running(cluster)[1])
    os.kill(until(lambda: conductor(ident)), signal.SIGKILL)
    assert_each_ran_once(cluster, ident)


def test_stop_ends_its_jobs_and_resume_continues(cluster):
    ident = sweep(cluster, "--random", "3", "lr=log:1e-3..1", "--max-parallel", "2", "-e", "GATE=1")
    until(lambda: counts(cluster, ident)["open"] == 2, every_s=LOOK_S)
    done = cluster.gpurun("sweep", "stop", ident)
    assert "is stopped" in done.err
    assert all(job["state"] == "CANCELLED" for job in cluster.status()["jobs"])
    first = {trial["trial"]: trial["parameters"]["lr"] for trial in state(cluster, ident)["trials"]}
    assert cluster.gpurun("sweep", "stop", ident).code == 0, "it has ended already"
    assert "2 trials run again" in cluster.gpurun("sweep", "resume", ident).err
    found = ended(cluster, ident)
    assert found["counts"]["complete"] == 3
    points = {trial["trial"]: trial["parameters"]["lr"] for trial in found["trials"]}
    assert len(set(points.values())) == 3 and first.items() <= points.items()


def test_an_image_that_is_not_there_and_a_point_that_is_too_long_are_refused_before_anything_is_stored(cluster):
    for image, point, said in ((TINY, "x" * 70_000, "bytes when quoted"), ("no/such:image", "1", "no/such:image")):
        done = cluster.gpurun(
            "sweep", "-i", str(cluster.inventory), "-n", "1", "--metric", "accuracy", "--image", image,
            "--launcher", "tasks", "--grid", f"lr={point}", "--", "true",
        )  # fmt: skip
        assert done.code == 2 and said in done.err, done.err
    assert cluster.gpurun("sweep", "status").out == "" and cluster.status()["jobs"] == []
