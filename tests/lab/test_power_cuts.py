"""The power of a host is cut while its program writes a checkpoint in place: the job continues from a whole one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from cluster import TINY, Cluster
from faulting import hosts_of
from waiting import until

from gpurun.lab import LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("power cuts")]

WRITES_S = 1.0
SAVES = f"""
import gpurun_runtime, os, sys, time
path, pieces, rest_s = "/out/snapshot", 20, float(sys.argv[1])
step = 0
if os.path.exists(path):
    found = open(path, "rb").read()
    lines = found.split(b"\\n")
    step = int(lines[0] or 0)
    is_whole = len(lines) == pieces + 3 and lines[-2] == b"end %d" % step
    is_whole = is_whole and all(line == b"%d " % step + b"x" * 50_000 for line in lines[1:-2])
    print("begins with", step, "whole" if is_whole else "TORN", len(found), flush=True)
else:
    print("begins with 0 nothing", flush=True)
while True:
    step += 1
    with open(path, "wb") as file:
        file.write(b"%d\\n" % step)
        for _ in range(pieces):
            file.write(b"%d " % step + b"x" * 50_000 + b"\\n")
            file.flush()
            time.sleep({WRITES_S} / pieces)
        file.write(b"end %d\\n" % step)
    if rest_s < 5:
        gpurun_runtime.checkpointed(step)
    print("saved", step, flush=True)
    time.sleep(rest_s)
"""


def start(cluster: Cluster, folder: Path, rest_s: float) -> str:
    """Submit a program that saves in place again and again; return the job."""
    folder.mkdir()
    (folder / "save.py").write_text(SAVES)
    (folder / "job.yaml").write_text(
        f"image: {TINY}\ngpus: 1\nlauncher: tasks\nworkdir: .\noutputs: /out\noutputs_every: 1s\n"
        f"max_restarts: 1000\ngrace: 1s\ncommand: [python3, save.py, '{rest_s}']\n"
    )
    done = cluster.gpurun("submit", "-i", str(cluster.inventory), str(folder / "job.yaml"))
    assert done.code == 0, done.err
    return done.out.strip()


def beginnings(cluster: Cluster, job: str) -> list[list[str]]:
    """What each attempt began with: step, whether it was whole."""
    return [line.split("begins with ")[1].split() for line in cluster.log(job).splitlines() if "begins with" in line]


def has_whole(cluster: Cluster, job: str) -> bool:
    return any((cluster.home / "jobs" / job / "outputs.whole").glob("[0-9]*"))


def cut(cluster: Cluster, job: str, rest_s: float, chance: random.Random) -> list[str]:
    """Cut the power of the job's host at a random moment; return what the next attempt begins with."""
    until(lambda: has_whole(cluster, job) and beginnings(cluster, job), lambda: cluster.log(job), every_s=0.5)
    time.sleep(chance.uniform(0, WRITES_S + rest_s))
    before = len(beginnings(cluster, job))
    cluster.lab.crash(hosts_of(cluster, job)[0])
    until(lambda: len(beginnings(cluster, job)) > before, lambda: cluster.log(job), every_s=0.5)
    return beginnings(cluster, job)[before]


def test_a_job_continues_from_a_whole_checkpoint(named_lab, tmp_path):
    """Once it read 2 of 20 MB of the newest, and failed. More cuts: docs/evidence.md."""
    lab = named_lab("cuts")
    lab.up(LabSpec(lab.name, racks=1, gpus=1))
    cluster = Cluster(lab, tmp_path)
    seed = random.randrange(1 << 32)
    try:
        job = start(cluster, tmp_path / "recipe", 1.5)
        step, state, *_ = cut(cluster, job, 1.5, random.Random(seed))
        assert state == "whole" and int(step) > 0, (seed, cluster.log(job))
    finally:
        cluster.end_processes()
