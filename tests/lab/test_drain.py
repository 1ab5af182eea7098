"""A drained host is empty soon, and its gang trains elsewhere from its checkpoint."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise

import pytest
from cluster import TRAIN
from faulting import STEPS, events, kill_supervisor, train, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("recipes")]

GRACE_S = 3


@pytest.fixture
def cluster(mended):
    yield mended
    names = ",".join(host.name for host in mended.lab.hosts)
    mended.gpurun("inventory", "uncordon", names, "-i", str(mended.inventory))


def drain(cluster, host, *flags):
    return cluster.gpurun("inventory", "drain", host, "-i", str(cluster.inventory), "--reason", "fan'; x", *flags)


def state(cluster, host):
    return next(row["state"] for row in cluster.status()["hosts"] if row["host"] == host)


@pytest.mark.train
def test_a_gang_with_a_checkpoint_trains_elsewhere_and_the_host_is_empty_soon(cluster, tmp_path, record_property):
    job = train(cluster, tmp_path / "r")
    before = cluster.job(job)["hosts"]
    began = time.monotonic()
    done = drain(cluster, before[1], "--wait", "--json")
    empty_s = time.monotonic() - began
    record_property("empty_s", round(empty_s, 1))
    assert done.code == 0, done.err
    assert json.loads(done.out)["state"] == "drained"
    assert empty_s <= GRACE_S + 10
    assert state(cluster, before[1]) == "drained"
    assert cluster.gpurun("wait", job).code == 0
    found = cluster.job(job)
    assert (found["state"], found["attempt"], found["restarts"]) == ("SUCCEEDED", 2, 0)
    assert before[1] not in found["hosts"]
    steps = [int(step) for step in re.findall(r"\[0\]<stdout>:step (\d+)", cluster.log(job))]
    breaks = [after for before, after in pairwise(steps) if after != before + 1]
    assert sorted({*steps}) == list(range(1, STEPS + 1))
    assert all(after >= 4 for after in breaks), f"it did not continue from its checkpoint: {steps}"
    assert any("moved: " in str(event.get("reason")) for event in events(cluster, job))


@pytest.mark.train
@pytest.mark.parametrize("killed", [False, True])
def test_a_gang_that_cannot_move_is_waited_for_and_ended_at_the_deadline(cluster, tmp_path, killed):
    (tmp_path / "r.yaml").write_text(f"image: {TRAIN}\ngpus: 1\ngrace: 2s\ncommand: [sleep, '3600']\n")
    job = cluster.gpurun("submit", str(tmp_path / "r.yaml"), "-i", str(cluster.inventory)).out.strip()
    cluster.wait_for(job, "RUNNING")
    host = cluster.job(job)["hosts"][0]
    assert "is waited for: it is not preemptible, and max_restarts is 0" in drain(cluster, host).err
    if killed:
        kill_supervisor(cluster, job)
    done = drain(cluster, host, "--deadline", "3s", "--wait")
    assert done.code == 0, done.err
    found = cluster.job(job)
    assert (found["state"], found["reason"].split(":")[0]) == ("CANCELLED", "drained")
    wait_until(lambda: state(cluster, host) == "drained")
