"""`gpurun recover --by-timer`: looks at hosts, one run at a time."""

import json
import os
import time

import pytest
from waiting import until

from gpurun.cli import recover
from gpurun.inventory.read import load_inventory
from gpurun.state.hosts import Machine, Machines, Out

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {address: 127.0.0.1, port: 1}, h2: {address: 127.0.0.1, port: 2}}}}
"""
UID = os.getuid()


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def looked_at(home, since_s):
    return sorted(known.name for known in Machines(home).read(UID).values() if known.seen_s >= since_s)


def test_a_timer_looks_at_the_default_inventory_without_any_job(gpurun, home, tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    begun_s = time.time()
    assert gpurun("recover", "--by-timer")[0] == 0
    until(lambda: looked_at(home, begun_s) == ["h1", "h2"])
    assert {known.out.check for known in Machines(home).read(UID).values()} == {"ssh"}


def test_a_timer_looks_again_at_a_host_that_is_out(gpurun, home, tmp_path):
    begun_s, inventory = time.time(), load_inventory(tmp_path / "inventory.yaml")
    h1, h2 = (host.machine for host in inventory.hosts)
    out = Out("ssh", "power off", begun_s - 60)
    Machines(home).note({
        h1: Machine("h1", begun_s - 60, out=out, inventory=inventory.source),
        h2: Machine("h2", begun_s - 60, inventory=inventory.source),
    })  # fmt: skip
    assert gpurun("recover", "--by-timer")[0] == 0
    until(lambda: looked_at(home, begun_s) == ["h1"])
    assert "refused" in Machines(home).read(UID)[h1].out.reason


def test_a_recover_that_a_person_types_starts_no_look(gpurun, home, tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.setattr("gpurun.head.children.start_detached", lambda *_, **__: pytest.fail("a look"))
    assert gpurun("recover")[0] == 0


def test_a_timer_starts_no_second_run_while_one_lasts(gpurun, home):
    with Machines(home).own_lock("recover"):
        code, out, err = gpurun("recover", "--by-timer")
        assert code == 0 and "another `gpurun recover` runs" in out + err
        assert json.loads(gpurun("recover", "--json")[1])["adopted"] == [], "a person's command does its work"


def test_the_timer_that_is_installed_looks_at_hosts(home):
    assert recover.recovery().argv[-2:] == ("recover", "--by-timer")
