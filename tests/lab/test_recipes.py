"""Recipes that train on Fashion-MNIST: each loses a host, and comes back from its checkpoint as accurate as before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import ONE_THREAD
from faulting import hosts_of

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("recipes")]

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    "recipe",
    [
        "fashion-mnist-torch",
        "fashion-mnist-keras",
        "fashion-mnist-mpi",
        "fashion-mnist-horovod-torch",
        "fashion-mnist-jax",
    ],
)
def test_a_recipe_loses_a_host_and_goes_on_from_its_checkpoint(mended, recipe):
    cluster = mended
    done = cluster.gpurun(
        "submit", str(RECIPES / recipe), "-i", str(cluster.inventory), "-n", "2", "--gpus-per-host", "1",
        *ONE_THREAD, "--", "python3", "train.py", "--epochs", "3", "--images", "10000", "--accuracy", "0.65",
    )  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "epoch 1/3: ")
    victim = hosts_of(cluster, job)[1]
    cluster.lab.crash(victim)
    cluster.wait_for(job, "SUCCEEDED")
    log = cluster.log(job)
    assert cluster.record(job)["restarts"] == 1 and victim not in hosts_of(cluster, job)
    assert re.search(r"resuming from /checkpoints/\S+: epoch [23]", log), log[-3000:]
    assert not re.search(r"@2/\S+ .*epoch 1/3: ", log), "what was trained before is trained again"
    assert float(re.search(r"test accuracy (0\.\d+)", log)[1]) >= 0.65
    outputs = cluster.home / "jobs" / job / "outputs"
    assert list(outputs.iterdir()), "the checkpoint came home"


def test_compressed_gradients_take_a_fiftieth_of_the_bytes(cluster):
    """Fifty steps: the network is not good yet, but what crosses the wire is the same in every step."""
    sent = {}
    for way in ("none", "top-k"):
        done = cluster.gpurun(
            "submit", str(RECIPES / "gradient-compression"), "-i", str(cluster.inventory), "--follow", "--",
            "train.py", "--compress", way, "--epochs", "1", "--images", "12800", "--accuracy", "0",
        )  # fmt: skip
        assert done.code == 0, done.err + done.out
        sent[way] = int(re.search(rf"{way}: (\d+) bytes sent", done.out)[1])
    assert sent["top-k"] > 0 and sent["none"] / sent["top-k"] >= 50, sent
