"""A gang outlives whatever becomes of its inventory file."""

from __future__ import annotations

import json

import pytest

from gpurun.errors import StateUnavailable
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.supervisor import life, links
from gpurun.supervisor.job import SupervisedJob

INVENTORY = """
version: 1
ssh_config: config
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {address: 10.0.0.1, port: 2222, labels: {a: "1"}}, h2: {address: 10.0.0.2}}},
        r2: {hosts: {"far-[0001-3000]": {}}}}
"""
CONFLICT = f"<<<<<<< HEAD\n{INVENTORY}=======\n{INVENTORY}>>>>>>> theirs\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    (tmp_path / "config").touch()
    return path


@pytest.fixture
def carried(tmp_path, file):
    """A function: a new supervisor's view of the job."""
    spec = JobSpec("n", "i", 8, ("true",))
    JobStore(tmp_path).create(spec, inventory=file, now_s=0.0)
    ((lease, lock),) = Allocator(tmp_path).run_pass(now_s=1.0).granted
    yield lambda: SupervisedJob(tmp_path, lease, lock)
    lock.close()


def spoil(file, how):
    if how == "gone":
        file.unlink()
    elif how == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_text(how)


@pytest.mark.parametrize("how", ["gone", "a folder", CONFLICT, "", "version: 99", "\0"], ids=range(6))
def test_a_later_supervisor_goes_on_with_the_hosts_of_the_grant(carried, file, how):
    first = carried()
    before = first.inventory
    spoil(file, how)
    later = carried()
    after = later.inventory
    for name in later.hosts:
        assert after.by_name[name] == before.by_name[name]
        assert after.fabric_of(after.by_name[name]) == before.fabric_of(before.by_name[name])
    assert (after.ssh_config, after.docker_host, after.source) == (before.ssh_config, before.docker_host, before.source)
    assert {target.name for target in later.links.targets.values()} == set(later.hosts)
    notes = [json.loads(line)["text"] for line in later.folder.events.read_text().splitlines()]
    assert len(notes) == 1 and "the job continues with its present hosts" in notes[0]


def test_a_sound_inventory_counts_for_more_than_what_was_stored(carried, file):
    assert carried().inventory.by_name["h1"].labels == {"a": "1"}
    file.write_text(INVENTORY.replace('a: "1"', 'a: "2"'))
    assert carried().inventory.by_name["h1"].labels == {"a": "2"}
    spoil(file, "gone")
    assert carried().inventory.by_name["h1"].labels == {"a": "2"}


def test_only_what_the_gang_needs_is_stored(carried):
    job = carried()
    assert len(job.inventory.hosts) == 3002
    stored = job.folder.path / "cluster.json"
    assert len(stored.read_bytes()) < 4096
    before = stored.stat().st_ino
    assert carried().inventory
    assert stored.stat().st_ino == before, "the same again is not written"


@pytest.mark.parametrize("damage", [None, b"", b"[]", b'{"inventory": {}}', b"[" * 99_999, "another host"])
def test_without_anything_that_would_do_the_inventorys_error_is_told(carried, file, damage):
    job = carried()
    assert job.inventory
    stored = job.folder.path / "cluster.json"
    if damage is None:
        stored.unlink()
    elif damage == "another host":
        stored.plain.write_text(stored.read_text().replace('"h1"', '"h9"'))
    else:
        stored.plain.write_bytes(damage)
    spoil(file, CONFLICT)
    with pytest.raises(StateUnavailable, match=str(file)):
        links.cluster_of(job.folder, job.lease)
    with pytest.raises(StateUnavailable):
        life.live(carried())
    assert job.folder.record().state is State.PREPARING, "nothing is decided"
