"""Shipping to sixteen hosts, and the training image to four."""

from __future__ import annotations

import os

import pytest
from imaging import MIB, Head, OnHost, layer

from gpurun.content.ship import ship
from gpurun.inventory.read import load_inventory
from gpurun.lab import Lab, LabSpec, network
from gpurun.remote import Fleet
from gpurun.remote.route import target_of

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("ship_many"), pytest.mark.timeout(1200)]

OVERHEAD = 1.02
TALK_BYTES = 1_500_000  # sixteen SSH sessions, sixteen agents


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A lab of 16 hosts in four racks, its inventory, agents on all, and the head's Docker."""
    lab = Lab(f"many{os.getpid()}")
    spec = LabSpec(lab.name, racks=4, hosts=4, gpus=1, host_link_bps=200_000_000, rack_uplink_bps=200_000_000)
    lab.up(spec)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # after up: the lab's own things are not moved
    inventory = load_inventory(lab.inventory)
    head = Head(inventory.docker_host)
    try:
        with Fleet.open([target_of(host, inventory) for host in inventory.hosts]) as fleet:
            assert not fleet.failures
            yield lab, inventory, fleet, head
    finally:
        head.close()
        monkeypatch.undo()
        lab.down(purge=True)


def test_ten_layers_to_sixteen_hosts_that_have_none_some_or_all_of_them(cluster):
    lab, inventory, fleet, head = cluster
    layers = [layer(f"l{number}", (number % 3) * MIB + 1000) for number in range(10)]
    part = head.make("many/part:1", layers[:5])
    whole = head.make("many/whole:1", layers)
    names = [host.name for host in inventory.hosts]
    options = {"inventory": inventory, "docker_host": inventory.docker_host}
    assert not ship("many/part:1", fleet, hosts=names[::3], **options).failed
    assert not ship("many/whole:1", fleet, hosts=names[1::5], **options).failed
    before = network.traffic(lab.name)
    report = ship("many/whole:1", fleet, hosts=names, **options)
    after = network.traffic(lab.name)
    assert {host.host: host.state for host in report.hosts} == {
        name: "present" if name in names[1::5] else "done" for name in names
    }
    for rack in inventory.racks:
        crossed = after[f"{rack.name}-up"].to_bytes - before[f"{rack.name}-up"].to_bytes
        assert crossed <= OVERHEAD * report.bytes_missing + TALK_BYTES
    assert after["head"].from_bytes - before["head"].from_bytes <= OVERHEAD * report.bytes_missing + TALK_BYTES
    for name in names:
        found = OnHost(lab, name).inspect("many/whole:1")
        assert found["Id"] == whole.id and found["RootFS"]["Layers"] == list(whole.layers)
        assert OnHost(lab, name).spool() == []
    assert part.layers == whole.layers[:5]


@pytest.mark.train
def test_the_training_image(train_lab, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inventory = load_inventory(train_lab.inventory)
    names = [host.name for host in inventory.hosts]
    with Fleet.open([target_of(host, inventory) for host in inventory.hosts]) as fleet:
        report = ship("gpurun/train:tf2.15", fleet, inventory=inventory, hosts=names, docker_host=inventory.docker_host)
        assert not report.failed
    for name in names:
        assert OnHost(train_lab, name).inspect("gpurun/train:tf2.15")["Id"] == report.id
    saved = OnHost(train_lab, names[-1]).saved_layers("gpurun/train:tf2.15")
    assert saved == OnHost(train_lab, names[-1]).inspect("gpurun/train:tf2.15")["RootFS"]["Layers"]
