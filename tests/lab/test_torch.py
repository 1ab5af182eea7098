"""PyTorch on real hosts: the recipe trains, loses a host, and comes back from its checkpoint as accurate as before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import TORCH

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("train")]

RECIPE = Path(__file__).parents[2] / "recipes/fashion-mnist-torch"
RAISES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 1:
    raise ValueError(f"no such layer, {one.item():g} ranks")
dist.all_reduce(one)
"""


@pytest.fixture
def cluster(mended):
    return mended


def test_a_gang_of_pytorch_trains_loses_a_host_and_goes_on_from_its_checkpoint(cluster):
    done = cluster.gpurun(
        "submit", str(RECIPE), "-i", str(cluster.inventory), "--", "train.py", "--epochs", "2", "--accuracy", "0.8"
    )
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "epoch 1/2: ", timeout_s=240)
    victim = cluster.job(job)["hosts"][1]
    cluster.lab.crash(victim)
    cluster.wait_for(job, "SUCCEEDED", timeout_s=240)
    record, log = cluster.job(job), cluster.log(job)
    assert record["restarts"] == 1 and victim not in record["hosts"]
    assert re.search(r"resuming from /checkpoints/last\.pt: epoch 2, \d+ images into it", log), log[-3000:]
    assert len(re.findall(r"epoch 1/2: ", log)) == 4, "what was trained before the host died is trained again"
    assert float(re.search(r"test accuracy (0\.\d+)", log)[1]) >= 0.8
    outputs = cluster.home / "jobs" / job / "outputs"
    assert [path.name for path in outputs.iterdir()] == ["last.pt"]


def test_the_traceback_of_the_rank_that_failed_first_is_in_the_report(cluster):
    """The others fail, too, because it is gone: their tracebacks are not the cause."""
    done = cluster.submit("--launcher", "torchrun", image=TORCH, command=["python3", "-c", RAISES])
    assert done.code == 1
    (record,) = cluster.status()["jobs"]
    failure = record["first_failure"]
    assert (failure["rank"], failure["host"], record["exit_code"]) == (1, record["hosts"][1], 1)
    assert failure["excerpt"][-1].endswith("ValueError: no such layer, 2 ranks"), failure
    assert any("Traceback (most recent call last)" in line for line in failure["excerpt"])
