"""A drained host is empty soon, and its gang trains elsewhere from its checkpoint."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from cluster import TINY
from faulting import events, hosts_of, kill_supervisor, steps_of, train, wait_for_steps

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("drain")]

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


@pytest.mark.parametrize(
    "empty_s", [pytest.param(120, marks=pytest.mark.story), pytest.param(GRACE_S + 10, marks=pytest.mark.alone)]
)
def test_a_gang_with_a_checkpoint_trains_elsewhere_and_the_host_is_empty_soon(
    cluster, tmp_path, record_property, empty_s
):
    """Another job on the host cannot move: gpurun waits for it, and cancels it at the deadline."""
    job = train(cluster, tmp_path / "r")
    before = hosts_of(cluster, job)
    began = time.monotonic()
    done = drain(cluster, before[1], "--wait", "--json")
    took_s = time.monotonic() - began
    record_property("empty_s", round(took_s, 1))
    assert done.code == 0, done.err
    assert json.loads(done.out)["state"] == "drained"
    assert took_s <= empty_s
    assert state(cluster, before[1]) == "drained"
    cluster.wait_until(job, lambda: (cluster.record(job)["state"], cluster.record(job)["attempt"]) == ("RUNNING", 2))
    wait_for_steps(cluster, job)
    assert cluster.record(job)["restarts"] == 0
    assert before[1] not in hosts_of(cluster, job)
    steps = steps_of(cluster, job)
    assert sorted({*steps}) == list(range(1, steps[-1] + 1))
    breaks = [after for before, after in pairwise(steps) if after != before + 1]
    assert all(after >= 3 for after in breaks), f"it did not continue from its checkpoint: {steps}"
    assert any("moved: " in str(event.get("reason")) for event in events(cluster, job))


@pytest.mark.story
def test_a_gang_that_cannot_move_is_waited_for_and_ended_at_the_deadline(cluster, tmp_path):
    """The supervisor that learned of the drain dies: the next one cancels the job."""
    (tmp_path / "r.yaml").write_text(f"image: {TINY}\nlauncher: tasks\ngpus: 1\ngrace: 2s\ncommand: [sleep, '3600']\n")
    job = cluster.gpurun("submit", str(tmp_path / "r.yaml"), "-i", str(cluster.inventory)).out.strip()
    cluster.wait_for(job, "RUNNING")
    (host,) = hosts_of(cluster, job)
    assert (
        "must end before the drain is complete: the job is not preemptible, and max_restarts is 0"
        in drain(cluster, host).err
    )
    kill_supervisor(cluster, job)
    done = drain(cluster, host, "--deadline", "3s", "--wait")
    assert done.code == 0, done.err
    found = cluster.record(job)
    assert (found["state"], found["reason"].split(":")[0]) == ("CANCELLED", "drained")
    assert state(cluster, host) == "drained"
