"""A campaign on real hosts: interrupted and continued, with a size that never fits."""

from __future__ import annotations

import json

import pytest
from cluster import TINY, interrupt
from faulting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("scale")]

PROGRAM = """
import time
import gpurun_runtime as gpurun
for step in range(8):
    time.sleep(0.5)
    gpurun.report(step, images_per_s=10.0, batch=5, gradient_bytes=1000)
"""


def campaign(cluster, *flags):
    return [
        "scale", "-i", str(cluster.inventory), "--image", TINY, "--launcher", "tasks", "--repeat", "1", *flags,
        "--", "python3", "-c", PROGRAM,
    ]  # fmt: skip


def records(cluster):
    return [cluster.record(path.name) for path in (cluster.home / "jobs").glob("j-*") if (path / "state.json").exists()]


def test_a_campaign_is_interrupted_goes_on_and_measures_each_size_once(cluster, tmp_path):
    measure = campaign(cluster, "--gpus", "1,2,400", "--name", "curve")
    begun = cluster.start(*measure)
    # Ctrl-C while the second size runs.
    wait_until(lambda: ("RUNNING", 2) in [(record["state"], record["gpus"]) for record in records(cluster)])
    interrupt(begun)
    out, err = begun.communicate(timeout=60)
    assert begun.returncode == 130 and "Traceback" not in out + err, err
    jobs = cluster.status()["jobs"]
    assert sorted((job["gpus"], job["state"]) for job in jobs) == [(1, "SUCCEEDED"), (2, "CANCELLED")]
    cluster.assert_nothing_left()

    done = cluster.gpurun(*measure)
    assert done.code == 3 and "400 GPUs cannot run" in done.out + done.err, (done.out, done.err)
    states = sorted((job["gpus"], job["state"]) for job in cluster.status()["jobs"])
    assert states == [(1, "SUCCEEDED"), (2, "CANCELLED"), (2, "SUCCEEDED")]

    again = cluster.gpurun(*measure)  # a finished campaign only reports
    assert again.code == 3 and len(cluster.status()["jobs"]) == 3
    assert cluster.gpurun("scale", "report", "curve", "--to", str(tmp_path / "told")).code == 0
    told = json.loads((tmp_path / "told/curve.json").read_text())
    assert [(point["gpus"], point["rate"]) for point in told["curve"]] == [(1, 10.0), (2, 20.0)]
    assert "<svg" in (tmp_path / "told/curve.html").read_text()
    assert (tmp_path / "told/curve.csv").read_text().count("\n") == 1 + 2
