"""``gpurun init``, with hosts that do not answer: the lab has those that do."""

from __future__ import annotations

import pytest

from gpurun.cli import init
from gpurun.facts.hardware import Hardware, Nic
from gpurun.inventory.load import load


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("GPURUN_INVENTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".ssh").mkdir(mode=0o700)
    # Nothing listens on port 9 of loopback
    (tmp_path / ".ssh" / "config").write_text("Host dead-*\n  HostName 127.0.0.1\n  Port 9\n")
    return tmp_path


def test_hosts_that_do_not_answer_are_in_the_inventory_and_named(gpurun, place):
    code, _, err = gpurun("init", "dead-[1-2]", "--user", "train", "--yes")
    assert code == 4, err
    assert [host.name for host in load(place / "inventory.yaml").hosts] == ["dead-1", "dead-2"]
    assert "2 hosts did not answer" in err and "gpurun doctor" in err
    assert gpurun("init", "dead-[1-2]")[0] == 2, "it does not replace an inventory"


def test_a_file_of_another_tool_is_read(gpurun, place):
    (place / "machines").write_text("dead-1 slots=4\ndead-2 slots=8\n")
    assert gpurun("init", "./machines", "--yes")[0] == 4
    assert [host.gpus for host in load(place / "inventory.yaml").hosts] == [4, 8]


@pytest.mark.parametrize("source", ["", "a b", "'; rm -rf", "../none", "h[1-", "@all", "a\nb", "ü", "-x"])
def test_what_is_no_list_of_hosts_writes_nothing(gpurun, place, source):
    code, _, err = gpurun("init", "--yes", "--", source)
    assert code == 2 and err.startswith(("gpurun: ", "Usage"))
    assert not (place / "inventory.yaml").exists()


def test_nobody_to_ask_is_an_error_that_shows_how(gpurun):
    code, _, err = gpurun("init")
    assert code == 2 and "gpurun init 'gpu-[01-16]'" in err


def test_the_interface_is_the_fastest_that_most_hosts_have():
    def machine(*nics):
        return Hardware("h", nics=nics)

    fast = Nic("ens1", "up", speed_mbit=25000, addresses=("10.0.0.1/24",))
    slow = Nic("eno1", "up", speed_mbit=1000, addresses=("10.1.0.1/24",))
    others = (
        Nic("lo", "up", addresses=("127.0.0.1/8",)),
        Nic("docker0", "up", speed_mbit=10**6, addresses=("172.17.0.1/16",)),
        Nic("ens2", "down", speed_mbit=10**6, addresses=("10.2.0.1/24",)),
        Nic("ens3", "up", speed_mbit=10**6),
    )
    assert init.interface_of([machine(*others, slow, fast), machine(fast, slow), machine(slow)]) == "ens1"
    assert init.interface_of([machine(*others)]) is init.interface_of([]) is None
