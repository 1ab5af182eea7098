"""Sweeps on real hosts: each trial runs once despite crashes, and bad trials save and stop early."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
from cluster import TRAIN
from faulting import kill_supervisor, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("launchers")]

PROGRAM = """
import os, signal, sys, time
import gpurun_runtime as gpurun
lr = gpurun.parameters()["lr"]
gpurun.stopping()
for step in range(1, int(os.environ.get("STEPS", "3")) + 1):
    time.sleep(float(os.environ.get("PAUSE", "0.1")))
    gpurun.report(step, accuracy=lr * step)
    if gpurun.stopping():
        open(gpurun.outputs() + "/saved", "w").write(str(step))
        sys.exit(143)
print("trial", os.environ["GPURUN_TRIAL"], sys.argv[1:], os.environ["GPURUN_PARAMETER_LR"])
"""


@pytest.fixture
def cluster(mended):
    yield mended
    mended.gpurun("sweep", "stop", "lr")


def sweep(cluster, *flags, gpus=1):
    """Begin a sweep of ``PROGRAM``; its id."""
    done = cluster.gpurun(
        "sweep", "-i", str(cluster.inventory), "-n", str(gpus), "--image", TRAIN, "--launcher", "tasks", "--name", "lr",
        "--metric", "accuracy:max", *flags, "--", "python3", "-c", PROGRAM,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.strip()


def state(cluster, ident):
    return json.loads(cluster.gpurun("sweep", "status", ident, "--json").out)


def ended(cluster, ident, timeout_s=240):
    deadline = time.monotonic() + timeout_s
    while not (found := state(cluster, ident))["done"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return found


def conductor(ident):
    """The process of a sweep; None if it has none."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"gpurun.sweeps\0{ident}\0".encode() in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    return None


def running(cluster):
    """A job that runs."""
    found = []
    wait_until(lambda: found.extend(j for j in cluster.status()["jobs"] if j["state"] == "RUNNING") or found)
    return found[0]


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
        cluster, "--grid", "lr=0.9,0.1,0.2,0.3", "--stop", "asha:min=2,factor=4", "--outputs", "/out",
        "--max-parallel", "1", "-e", "STEPS=60", "-e", "PAUSE=0.2",
    )  # fmt: skip
    found = ended(cluster, ident)
    assert found["counts"]["complete"] == 1 and found["counts"]["pruned"] == 3
    assert found["trials"][0]["parameters"]["lr"] == 0.9 and found["best"]["step"] == 60
    for trial in found["trials"][1:]:
        assert "stopped early: accuracy was" in trial["reason"]
        saved = (cluster.home / "jobs" / trial["job"] / "outputs" / "saved").read_text()
        assert 2 <= int(saved) < 60


def test_none_is_lost_and_none_runs_twice_whoever_dies(cluster):
    """Kills the conductor, a trial's supervisor and a host, one after the other."""
    values = ",".join(f"{n / 100}" for n in range(1, 17))
    ident = sweep(cluster, "--grid", f"lr={values}", "-e", "STEPS=8", "-e", "PAUSE=0.5")
    wait_until(lambda: state(cluster, ident)["counts"]["open"] >= 8)
    os.kill(conductor(ident), signal.SIGKILL)
    kill_supervisor(cluster, running(cluster)["id"])
    wait_until(lambda: state(cluster, ident)["counts"]["complete"] >= 2)
    cluster.lab.crash(running(cluster)["hosts"][0])
    os.kill(conductor(ident), signal.SIGKILL)
    found = ended(cluster, ident, timeout_s=400)
    assert found["counts"]["complete"] == 16, found
    jobs = {path.name for path in (cluster.home / "jobs").glob("j-*")}
    assert {trial["job"] for trial in found["trials"]} == jobs and len(jobs) == 16
    assert sorted(trial["parameters"]["lr"] for trial in found["trials"]) == [n / 100 for n in range(1, 17)]
    assert all(round(trial["value"] / trial["parameters"]["lr"]) == 8 for trial in found["trials"])


def test_stop_ends_its_jobs_and_resume_goes_on(cluster):
    ident = sweep(cluster, "--random", "5", "lr=log:1e-3..1", "--max-parallel", "2", "-e", "STEPS=6", "-e", "PAUSE=0.5")
    wait_until(lambda: state(cluster, ident)["counts"]["open"] == 2)
    done = cluster.gpurun("sweep", "stop", ident)
    assert "is stopped" in done.err
    assert all(job["state"] == "CANCELLED" for job in cluster.status()["jobs"])
    first = {trial["trial"]: trial["parameters"]["lr"] for trial in state(cluster, ident)["trials"]}
    assert cluster.gpurun("sweep", "stop", ident).code == 2
    assert "2 trials run again" in cluster.gpurun("sweep", "resume", ident).err
    found = ended(cluster, ident)
    assert found["counts"]["complete"] == 5
    points = {trial["trial"]: trial["parameters"]["lr"] for trial in found["trials"]}
    assert len(set(points.values())) == 5 and first.items() <= points.items()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--grid", "lr=1..2"), "a grid needs a list"),
        (("--grid", "lr=1", "--stop", "never"), "no rule to stop by"),
        (("--random", "3"), "there is no parameter"),
        (("nonsense", "--grid", "lr=1"), "nonsense"),
        (("--grid", "lr=1", "--image", "no/such:image"), "no/such:image"),
        (("--grid", "lr=" + "x" * 70_000), "bytes when quoted"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_stored(cluster, flags, said):
    done = cluster.gpurun(
        "sweep", "-i", str(cluster.inventory), "-n", "1", "--metric", "accuracy",
        *(("--image", TRAIN) if "--image" not in flags else ()), *flags, "--", "true",
    )  # fmt: skip
    assert done.code == 2 and said in done.err, done.err
    assert cluster.gpurun("sweep", "status").out == "" and cluster.status()["jobs"] == []
