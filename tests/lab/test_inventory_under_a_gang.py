"""A gang trains to its end even if the inventory file changes or its supervisor dies."""

from __future__ import annotations

import shutil
import time

import pytest
import yaml
from cluster import Cluster
from faulting import assert_no_step_lost, is_adopted, kill_supervisor, train, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("train")]


@pytest.fixture
def cluster(train_lab, tmp_path):
    made = Cluster(train_lab, tmp_path)
    shutil.copytree(
        train_lab.inventory.parent, tmp_path / "inventory", ignore=shutil.ignore_patterns("hosts", "*.sock")
    )
    made.inventory = tmp_path / "inventory" / train_lab.inventory.name
    sound = made.inventory.read_bytes()
    yield made
    made.inventory.write_bytes(sound)
    made.cancel_all()
    made.assert_nothing_left()


def remove_host(cluster, job):
    """Change the file without gpurun, like an edit by hand or a `git pull`."""
    written = yaml.safe_load(cluster.inventory.read_text())
    host = cluster.job(job)["hosts"][1]
    racks = [rack for rack in written["racks"].values() if host in rack["hosts"]]
    for rack in racks:
        del rack["hosts"][host]
    assert racks
    cluster.inventory.write_text(yaml.safe_dump(written))


def conflict(cluster, job):
    lines = cluster.inventory.read_text().splitlines(keepends=True)
    cluster.inventory.write_text(
        "<<<<<<< HEAD\n" + "".join(lines[:5]) + "=======\n" + "".join(lines[5:]) + ">>>>>>> theirs\n"
    )


def lose_file(cluster, job):
    cluster.inventory.unlink()


@pytest.mark.parametrize("damage", [remove_host, conflict, lose_file])
def test_training_goes_on_to_its_end(cluster, tmp_path, damage):
    job = train(cluster, tmp_path / "recipe")
    damage(cluster, job)
    kill_supervisor(cluster, job)
    cluster.gpurun("status", job)
    wait_until(lambda: is_adopted(cluster, job))
    done = cluster.gpurun("wait", job, "--timeout", "120")
    assert done.code == 0, done.err
    assert_no_step_lost(cluster, job)


@pytest.mark.parametrize("damage", [remove_host, conflict, lose_file])
def test_a_cancel_ends_it(cluster, tmp_path, damage):
    job = train(cluster, tmp_path / "recipe", steps=1000)
    damage(cluster, job)
    kill_supervisor(cluster, job)
    asked = time.monotonic()
    done = cluster.gpurun("cancel", job)
    assert done.code == 0, done.err
    cluster.gpurun("wait", job, "--timeout", "60")
    assert cluster.wait_for(job, "CANCELLED")
    assert time.monotonic() - asked <= 30
