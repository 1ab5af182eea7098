"""TensorFlow's own strategies on Fashion-MNIST: a task is killed, a host is lost, and training comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import ONE_THREAD
from faulting import kill_rank

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("launchers")]

RECIPES = Path(__file__).parents[2] / "recipes"


def start(cluster, recipe):
    """Three short epochs of a recipe; returns the job once the first is over."""
    done = cluster.gpurun(
        "submit", str(RECIPES / recipe), "-i", str(cluster.inventory), *ONE_THREAD, "--",
        "python3", "train.py", "--epochs", "3", "--images", "10000", "--accuracy", "0.65",
    )  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "epoch 1/3: ")
    return job


MULTI_WORKER = pytest.mark.thorough
"""What parameter servers show runs with each change; the other strategy's tests take as long again."""


@pytest.mark.parametrize("recipe", ["fashion-mnist-ps", pytest.param("fashion-mnist-mwms", marks=MULTI_WORKER)])
def test_a_gang_that_loses_a_host_with_its_tasks_goes_on_from_its_checkpoint(mended, recipe):
    cluster = mended
    job = start(cluster, recipe)
    victim = cluster.job(job)["hosts"][1]
    cluster.lab.crash(victim)
    cluster.wait_for(job, "SUCCEEDED")
    record, log = cluster.job(job), cluster.log(job)
    assert record["restarts"] == 1 and victim not in record["hosts"]
    assert re.search(r"resuming from /checkpoints/\S+: epoch [23]", log), log[-3000:]
    assert not re.search(r"@2/\S+ .*epoch 1/3: ", log), "what was trained before is trained again"
    assert float(re.search(r"test accuracy (0\.\d+)", log)[1]) >= 0.65
    assert list((cluster.home / "jobs" / job / "outputs").iterdir()), "the checkpoint came home"


@pytest.mark.parametrize(
    ("recipe", "rank", "name"),
    [
        ("fashion-mnist-ps", 1, "worker 1"),
        pytest.param("fashion-mnist-mwms", 3, "worker 3", marks=MULTI_WORKER),
    ],
)
def test_a_task_that_is_killed_while_it_trains_is_the_one_that_is_named(cluster, recipe, rank, name):
    """The other tasks fail, too, because of its end."""
    job = start(cluster, recipe)
    kill_rank(cluster, job, rank)
    cluster.wait_for(job, "FAILED")
    record = cluster.job(job)
    assert record["reason"].startswith(f"{name} (rank {rank}) on "), record
    assert (record["exit_code"], record["first_failure"]["rank"]) == (137, rank)
