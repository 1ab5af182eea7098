"""`gpurun doctor` notes which hosts are out, as a waiter's look does: a repaired host returns at once."""

import os
from dataclasses import replace

import pytest

from gpurun.head import looking
from gpurun.inventory.read import load_inventory
from gpurun.state import hosts
from gpurun.state.hosts import Machine, Machines, Out

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {address: 127.0.0.1, port: 1}, h2: {address: 127.0.0.1, port: 2}}}}
"""
UID = os.getuid()


@pytest.fixture
def inventory(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path / "inventory.yaml"


def test_doctor_notes_the_hosts_that_it_has_checked(gpurun, inventory, tmp_path):
    old = Out("ssh", "power off", 5.0)
    Machines(tmp_path / "home").note({"127.0.0.1:2": Machine("h2", 5.0, out=old)})
    assert gpurun("doctor", "h1", "-i", str(inventory))[0] == 4
    found = Machines(tmp_path / "home").read(UID)
    machine = load_inventory(inventory).by_name["h1"].machine
    assert found[machine].out.check == "ssh" and "refused" in found[machine].out.reason
    assert found["127.0.0.1:2"].out == old, "not checked"


def test_doctor_looks_again_at_a_repaired_host_until_it_is_back(gpurun, inventory, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    out = Out("ssh", "power off", 5.0, passed=1, needed=3)
    outs = [{"h1": out, "h2": Out("ssh", "x", 5.0)}, {"h1": replace(out, passed=2)}, {"h1": None}]
    asked = []
    monkeypatch.setattr(hosts, "BURN_IN_GAP_S", 0.0)
    monkeypatch.setattr(looking, "note_survey", lambda *_: outs.pop(0))
    monkeypatch.setattr(looking, "look_at", lambda _home, _inventory, names: asked.append(names) or outs.pop(0))
    gpurun("doctor", "-i", str(inventory))
    assert (asked, outs) == ([["h1"], ["h1"]], [])
    outs = [{"h1": replace(out, needed=100)}]
    gpurun("doctor", "-i", str(inventory))
    assert (len(asked), outs) == (2, []), "waiters make a long burn-in"


def test_doctor_believes_no_host_broken_that_had_little_time(gpurun, inventory, tmp_path):
    (tmp_path / "home").mkdir()
    assert gpurun("doctor", "-i", str(inventory), "--timeout", "1s")[0] == 4
    assert Machines(tmp_path / "home").read(UID) == {}


def test_doctor_makes_no_state_directory(gpurun, inventory, tmp_path):
    assert gpurun("doctor", "-i", str(inventory))[0] == 4
    assert not (tmp_path / "home").exists()


def test_doctor_works_beside_a_state_directory_that_is_not_safe(gpurun, inventory, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    assert gpurun("doctor", "-i", str(inventory))[0] == 4
    assert not (tmp_path / "home/machines").exists()


def test_a_probe_notes_them_too(gpurun, inventory, tmp_path):
    (tmp_path / "home").mkdir()
    assert gpurun("inventory", "probe", "h1", "-i", str(inventory))[0] == 4
    assert list(Machines(tmp_path / "home").read(UID)) == ["127.0.0.1:1"]
    assert gpurun("inventory", "probe", "h2", "-i", str(inventory), "--timeout", "1s")[0] == 4
    assert list(Machines(tmp_path / "home").read(UID)) == ["127.0.0.1:1"]
