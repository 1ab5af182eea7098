"""Crash tests: kill a process of gpurun at its N-th fault point, run one command, and look what is left.

The image's horovodrun is a shell script that prints numbered lines: what is tested is gpurun's life of a job, not
Horovod, and a crash should take seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import time

from cluster import Cluster

from gpurun.errors import StateError
from gpurun.jobs.store import JobStore
from gpurun.lab import engine
from gpurun.leases.store import LeaseStore

IMAGE = "gpurun/crashtest:1"
LINES = 8
LAUNCHER = f"""#!/bin/sh
i=0
while [ $i -lt {LINES} ]; do echo "[0]<stdout>:line $i"; i=$((i+1)); sleep 0.1; done
"""
DOCKERFILE = "FROM gpurun/tiny:1\nCOPY horovodrun /bin/horovodrun\n"


def build_image(folder, image: str = IMAGE, launcher: str = LAUNCHER) -> None:
    """An image whose horovodrun is a script, on the head's engine."""
    (folder / "horovodrun").write_text(launcher)
    (folder / "horovodrun").chmod(0o755)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    subprocess.run(
        ["docker", "build", "-q", "-t", image, str(folder)], env=environ, check=True, stdout=subprocess.DEVNULL
    )


def crash_once(cluster: Cluster, role: str, point: int) -> bool:
    """Submit a job whose `role` dies at its `point`-th fault point; check every promise afterwards.

    Returns:
        Whether the process died: False means that it has fewer points than that.
    """
    before = {job["id"] for job in cluster.status()["jobs"]}
    cluster.environ["GPURUN_FAULT"] = f"{role}:{point}"
    submitted = cluster.gpurun(*cluster.submit_args(image=IMAGE), "--", "true")
    del cluster.environ["GPURUN_FAULT"]
    died = submitted.code == -9 if role == "command" else _died(cluster, submitted.out.strip())
    cluster.gpurun("status", "-i", str(cluster.inventory))  # the one command that picks up what the crash left
    new = [job for job in cluster.status()["jobs"] if job["id"] not in before]
    assert len(new) <= 1
    for job in new:
        assert cluster.gpurun("wait", job["id"], "--timeout", "30").code == 0, cluster.job(job["id"])
        check_log(cluster, job["id"])
    check_invariants(cluster)
    return died


def _died(cluster: Cluster, job: str) -> bool:
    """Wait until the job's first supervisor has died or has done its work."""
    leases = LeaseStore(cluster.home)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        record = json.loads((cluster.home / "jobs" / job / "state.json").read_text())
        if not leases.is_alive(job):
            if record["state"] in ("SUCCEEDED", "FAILED"):
                return leases.path(job).exists() or (cluster.home / "live" / job).exists()
            return True
        time.sleep(0.02)
    raise AssertionError(f"{job} neither died nor ended: {record}")


def check_log(cluster: Cluster, job: str) -> None:
    """Every line once, in order: no gap, no duplicate."""
    texts = [line.rpartition(":")[2] for line in cluster.log(job).splitlines() if "line " in line]
    assert texts == [f"line {number}" for number in range(LINES)], texts


def check_invariants(cluster: Cluster) -> None:
    """No GPU in two leases, none lost for good, nothing left on any host or in the state directory."""
    holdings = LeaseStore(cluster.home).read_all()
    held = [(grant.host, gpu) for lease in holdings.leases for grant in lease.grants for gpu in grant.gpus]
    assert not holdings.damaged
    assert len(held) == len(set(held))
    deadline = time.monotonic() + 15  # the last supervisor may still be on its way out
    while LeaseStore(cluster.home).read_all().leases and time.monotonic() < deadline:
        time.sleep(0.05)
    cluster.assert_nothing_left()
    store = JobStore(cluster.home)
    assert [record.id for record in store.records(_raise, ids=store.live_ids())] == []


def _raise(error: StateError) -> None:
    raise error
