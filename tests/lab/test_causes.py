"""What ends a gang or keeps its GPUs: found on the host where it began, named, and kept out of the next gang's way."""

from __future__ import annotations

import json
import time

import pytest
from cluster import Cluster
from crashing import build_image
from faulting import events
from own_labs import own_lab

from gpurun.jobs.cordons import read_cordons
from gpurun.lab.gpus import state
from gpurun.lab.paths import HostFolder

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("causes")]

IMAGE = "gpurun/causestest:1"
LAUNCHER = """#!/bin/sh
echo "[0]<stdout>:begun on attempt $GPURUN_ATTEMPT"
i=0
while [ ! -e /run/gpurun/end ] && [ $i -lt ${LINES:-600} ]; do i=$((i+1)); sleep 0.1; done
test ! -e /run/gpurun/end || cat /run/gpurun/end
exit ${CODE:-0}
"""


@pytest.fixture(scope="module")
def causes_lab(tmp_path_factory):
    with own_lab("causes", racks=1, hosts=4, gpus=2, disk_mib=1024) as lab:
        build_image(tmp_path_factory.mktemp("image"), IMAGE, LAUNCHER)
        yield lab


@pytest.fixture
def cluster(causes_lab, tmp_path):
    made = Cluster(causes_lab, tmp_path)
    yield made
    for host in causes_lab.hosts:
        causes_lab.boot(host.name)
        hardware(made, host.name).joinpath("kmsg").write_text("")
        state.save(state.healthy(causes_lab.name, host), hardware(made, host.name) / state.FILE)
    for job in made.status()["jobs"]:
        if job["ended_s"] is None:
            made.gpurun("cancel", job["id"])
    deadline = time.monotonic() + 90
    while list((made.home / "leases").glob("[!.]*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    made.assert_nothing_left()


def hardware(cluster, host):
    return HostFolder(cluster.lab.folder / "hosts" / host).hardware


def start(cluster, *args):
    """A gang of two hosts that runs; its id and its second host."""
    done = cluster.gpurun(*cluster.submit_args(*args, image=IMAGE), "--", "true")
    job = done.out.strip()
    assert done.code == 0, done.err
    cluster.wait_for_log(job, "begun on attempt 1")
    return job, cluster.job(job)["hosts"][1]


def gpu_of(cluster, job, host):
    return next(grant["gpus"][0] for grant in cluster.job(job)["grants"] if grant["host"] == host)


def test_a_stranger_keeps_the_gpu_out_of_use_until_it_is_gone(cluster):
    job, host = start(cluster)
    stranger = cluster.lab.run(host, ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], user="alice")
    pid = stranger.stdout.decode().strip()
    state.change(hardware(cluster, host) / state.FILE, gpu_of(cluster, job, host), {"processes": f"{pid}:512"})
    assert cluster.gpurun("cancel", job).code == 0
    rows = {row["host"]: row for row in cluster.status()["hosts"]}
    assert (rows[host]["state"], rows[host]["free"]) == ("lost", 1)
    named = f"held by pid {pid} of alice (sleep 300)"
    assert any(named in e.get("reason", "") for e in events(cluster, job) if e["kind"] == "host")
    assert named in read_cordons(cluster.home)[host].evidence
    cluster.lab.run(host, ["kill", pid])
    deadline = time.monotonic() + 60
    while list((cluster.home / "leases").glob("[!.]*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert host not in read_cordons(cluster.home)


def test_the_proof_costs_the_end_of_a_job_next_to_nothing(cluster):
    """From the launcher's end to the job's: the fence of two hosts and its question to NVML included."""

    def end_s() -> float:
        done = cluster.gpurun(*cluster.submit_args("-e", "LINES=1", image=IMAGE), "--follow", "--", "true")
        assert done.code == 0, done.err
        newest = max(cluster.status()["jobs"], key=lambda job: job["submitted_s"])["id"]
        times = {e["state"]: e["t"] for e in events(cluster, newest) if e["kind"] == "state"}
        return times["SUCCEEDED"] - times["STOPPING"]

    took = sorted(end_s() for _ in range(5))
    print(json.dumps({"end_of_a_job_s": took}))
    assert took[0] < 0.6
