"""A gang trains on even if the inventory file changes and its supervisor dies."""

from __future__ import annotations

import shutil

import pytest
import yaml
from cluster import Cluster
from faulting import adopt, assert_no_step_lost, hosts_of, kill_supervisor, train, wait_for_steps

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("inventory_under_a_gang")]


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


def remove_host(inventory, host):
    """Change the file without gpurun, like an edit by hand or a `git pull`."""
    written = yaml.safe_load(inventory.read_text())
    racks = [rack for rack in written["racks"].values() if host in rack["hosts"]]
    for rack in racks:
        del rack["hosts"][host]
    assert racks
    inventory.write_text(yaml.safe_dump(written))


@pytest.mark.story
def test_training_continues_and_a_cancel_works_whatever_happens_to_the_inventory_file(cluster, tmp_path):
    """Each time the supervisor dies, too, so that another one has to begin with the file as it is."""
    job = train(cluster, tmp_path / "recipe")
    sound = cluster.inventory.read_text()
    for damage in ("a host is gone", "a conflict", "no file"):
        if damage == "a host is gone":
            remove_host(cluster.inventory, hosts_of(cluster, job)[1])
        elif damage == "a conflict":
            cluster.inventory.write_text(f"<<<<<<< HEAD\n{sound}=======\n{sound}>>>>>>> theirs\n")
        else:
            cluster.inventory.unlink()
        kill_supervisor(cluster, job)
        adopt(cluster, job)
        wait_for_steps(cluster, job)
    assert_no_step_lost(cluster, job)
    kill_supervisor(cluster, job)
    done = cluster.gpurun("cancel", job)
    assert done.code == 0, done.err
    cluster.wait_for(job, "CANCELLED")
