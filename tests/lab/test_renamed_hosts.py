"""Hosts that are renamed in the inventory are the machines that they say they are: their cordons and gangs stay theirs.

`tests/leases/test_machines_by_id.py` has every other case. Here, real hosts give their own ids.
"""

from __future__ import annotations

import pytest
from cluster import TINY, Cluster
from own_labs import own_lab

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("renamed hosts")]


@pytest.fixture
def cluster(tmp_path):
    """Two hosts, whose addresses stand in the ssh_config alone, and an inventory that the test may edit."""
    with own_lab("renamed", racks=1, hosts=2, gpus=2) as lab:
        made = Cluster(lab, tmp_path)
        made.inventory = tmp_path / "inventory.yaml"
        made.inventory.write_text(lab.inventory.read_text())
        (tmp_path / "ssh_config").write_text(lab.ssh_config.read_text())
        made.home.mkdir()  # `doctor` notes what it sees where a state directory is
        yield made
        made.cancel_all()
        made.assert_nothing_left()
        made.end_processes()


def rename(cluster, old, new):
    """Swap two names, or give a host a new one: in the inventory and in the ssh_config."""
    for file in (cluster.inventory, cluster.inventory.with_name("ssh_config")):
        text = file.read_text().replace(old, "\0").replace(new, old).replace("\0", new)
        file.write_text(text)


def states(cluster):
    """Host → state and free GPUs, after a look at all hosts."""
    done = cluster.gpurun("doctor", "-i", str(cluster.inventory))
    assert done.code in (0, 4), done.err
    return {row["host"]: (row["state"], row["free"]) for row in cluster.status()["hosts"]}


def test_a_cordon_and_a_gang_s_gpus_stay_with_the_machine_whatever_it_is_called(cluster):
    one, two = (host.name for host in cluster.lab.hosts)
    assert set(states(cluster)) == {one, two}
    assert cluster.gpurun("inventory", "cordon", one, "-i", str(cluster.inventory), "--reason", "Xid 79").code == 0
    assert states(cluster)[one] == ("cordoned", 2)
    rename(cluster, one, two)
    assert states(cluster) == {one: ("ok", 2), two: ("cordoned", 2)}, "the names are swapped, the cordon is not"
    assert cluster.gpurun("inventory", "uncordon", two, "-i", str(cluster.inventory)).code == 0
    assert states(cluster) == {one: ("ok", 2), two: ("ok", 2)}

    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", "2", "--image", TINY, "--launcher", "tasks", "--host", one,
        "--", "sleep", "600",
    )  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for(job, "RUNNING")
    rename(cluster, one, "node1")
    assert states(cluster) == {"node1": ("ok", 0), two: ("ok", 2)}, "the gang holds the GPUs under the old name"
    rename(cluster, "node1", one)
    assert cluster.gpurun("cancel", job).code == 0
