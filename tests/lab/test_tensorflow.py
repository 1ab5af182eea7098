"""TensorFlow's own strategies on Fashion-MNIST: a task is killed, a host is lost, and training comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from at_once import finish, hosts_of
from cluster import ONE_THREAD
from faulting import kill_rank

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("tensorflow")]

RECIPES = Path(__file__).parents[2] / "recipes"
SAYS_WHERE = ("-e", "PYTHONFAULTHANDLER=1")
"""A chief of TensorFlow 2.15 has died by SIGSEGV as it began, once in some fifty runs. The next one says where."""


def start(cluster, recipe, *, epochs=3, images=10_000):
    """Start short epochs of a recipe. Returns the job once the first epoch is over."""
    done = cluster.gpurun(
        "submit", str(RECIPES / recipe), "-i", str(cluster.inventory), *ONE_THREAD, *SAYS_WHERE, "--",
        "python3", "train.py", "--epochs", str(epochs), "--images", str(images), "--accuracy", "0.65",
    )  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, f"epoch 1/{epochs}: ")
    return job


@pytest.mark.parametrize("recipe", ["fashion-mnist-ps", "fashion-mnist-mwms"])
def test_a_gang_that_loses_a_host_with_its_tasks_goes_on_from_its_checkpoint(mended, recipe):
    cluster = mended
    job = start(cluster, recipe)
    victim = hosts_of(cluster.record(job))[1]
    cluster.lab.crash(victim)
    record = finish(cluster, job, "SUCCEEDED", 0)
    log = cluster.log(job)
    assert record["restarts"] == 1 and victim not in hosts_of(record)
    assert re.search(r"resuming from /checkpoints/\S+: epoch [23]", log), log[-3000:]
    assert not re.search(r"@2/\S+ .*epoch 1/3: ", log), "what was trained before is trained again"
    assert float(re.search(r"test accuracy (0\.\d+)", log)[1]) >= 0.65
    assert list((cluster.home / "jobs" / job / "outputs").iterdir()), "the checkpoint came home"


@pytest.mark.parametrize(
    ("recipe", "rank", "name"), [("fashion-mnist-ps", 1, "worker 1"), ("fashion-mnist-mwms", 3, "worker 3")]
)
def test_a_task_that_is_killed_while_it_trains_is_the_one_that_is_named(cluster, recipe, rank, name):
    """The other tasks fail, too, because of its end."""
    job = start(cluster, recipe, epochs=100, images=2_000)
    kill_rank(cluster, job, rank)
    record = finish(cluster, job, "FAILED", 137)
    assert record["reason"].startswith(f"{name} (rank {rank}) on "), record
    assert record["first_failure"]["rank"] == rank
