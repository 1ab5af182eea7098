"""``gpurun init``, with hosts that do not answer: the lab has those that do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurun.cli import init
from gpurun.doctor.survey import Survey
from gpurun.errors import BadInput, HostUnreachable
from gpurun.facts import Gpu, Hardware, Nic
from gpurun.inventory.read import load_inventory


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
    assert [host.name for host in load_inventory(place / "inventory.yaml").hosts] == ["dead-1", "dead-2"]
    assert "2 hosts did not answer" in err and "gpurun doctor" in err
    text = (place / "inventory.yaml").read_text()
    assert gpurun("init", "dead-[1-2]")[0] == 4, "it continues, and asks nothing, because there is no key to trust"
    assert (place / "inventory.yaml").read_text() == text


def test_a_file_of_another_tool_is_read(gpurun, place):
    (place / "machines").write_text("dead-1 slots=4\ndead-2 slots=8\n")
    assert gpurun("init", "./machines", "--yes")[0] == 4
    assert [host.gpus for host in load_inventory(place / "inventory.yaml").hosts] == [4, 8]


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


class Hosts:
    """Hosts that a probe reaches, and what they have."""

    def __init__(self, monkeypatch):
        self.gpus: dict[str, int] = {}
        self.trusted: list[bool] = []
        monkeypatch.setattr("gpurun.cli.probe.survey_of", self.survey)
        monkeypatch.setattr(init, "_trust", self.trust)

    def survey(self, inventory, names, timeout_s):
        hardware = {
            name: Hardware(
                name, gpus=tuple(Gpu(at, "V100", "volta", 16384) for at in range(self.gpus[name])),
                nics=(Nic("ens1", "up", speed_mbit=25000, addresses=("10.0.0.1/24",)),),
            ) for name in names if name in self.gpus
        }  # fmt: skip
        return Survey(
            hardware, {name: HostUnreachable("no answer", host=name) for name in names if name not in hardware}
        )

    def trust(self, target, *, yes):
        self.trusted.append(yes)
        if not yes:
            raise BadInput("gpurun cannot ask you", hint="--yes trusts the keys")


def gpus_in(place):
    return {host.name: host.gpus for host in load_inventory(place / "inventory.yaml").hosts}


@pytest.fixture
def hosts(monkeypatch):
    return Hosts(monkeypatch)


def test_a_second_init_continues_where_the_first_stopped(gpurun, place, hosts):
    hosts.gpus = {"n1": 4, "n2": 4, "n3": 4}
    code, _, err = gpurun("init", "n[1-3]")
    assert (
        code == 2
        and "then run `gpurun init` again to continue" in err
        and "Guessed: gpus 1" in (place / "inventory.yaml").read_text()
    )
    code, _, err = gpurun("init", "--yes")
    assert code == 0 and "continues with this inventory and its 3 hosts" in err and "[3/3]" in err
    text = (place / "inventory.yaml").read_text()
    found = load_inventory(place / "inventory.yaml")
    assert {(host.gpus, host.generation, host.gpu_model) for host in found.hosts} == {(4, "volta", "V100")}
    assert found.fabrics["tcp"].interface == "ens1"
    assert "Guessed: gpus" not in text and "Guessed: generation" not in text and "gpus: 1" not in text
    assert "Guessed: interface" not in text
    assert "defaults: {generation: volta, gpus: 4}" in text
    code, _, err = gpurun("init", "--yes")
    assert code == 2 and "the inventory already exists" in err and "gpurun inventory probe --write" in err


def test_the_first_init_leaves_no_guess_that_the_hosts_have_answered(gpurun, place, hosts):
    hosts.gpus = {"n1": 4, "n2": 1, "n3": 4}
    assert gpurun("init", "n[1-4]", "--yes")[0] == 4
    text = (place / "inventory.yaml").read_text()
    assert gpus_in(place) == {"n1": 4, "n2": 1, "n3": 4, "n4": 4}
    assert "# Guessed: gpus 4 for n4, as most others have" in text and "every host" not in text
    hosts.gpus["n4"] = 8
    assert gpurun("init", "n[1-4]", "--yes")[0] == 0
    assert gpus_in(place) == {"n1": 4, "n2": 1, "n3": 4, "n4": 8}
    assert "Guessed: gpus" not in (place / "inventory.yaml").read_text()


def test_what_a_person_has_edited_stays(gpurun, place, hosts):
    hosts.gpus = {"n1": 4, "n2": 4, "n3": 4}
    assert gpurun("init", "n[1-3]")[0] == 2
    file = place / "inventory.yaml"
    edited = file.read_text().replace('"n[1-3]": {}', 'n1: {gpus: 1}  # one is lent\n      "n[2-3]": {}')
    file.write_text(edited.replace("interface: eth0", "interface: ib0"))
    code, _, err = gpurun("init", "--yes")
    assert code == 0 and "n1: gpus is 4; the inventory says 1, and gpurun keeps this value" in err
    found = load_inventory(file)
    assert {host.name: host.gpus for host in found.hosts} == {"n1": 1, "n2": 4, "n3": 4}
    assert found.fabrics["tcp"].interface == "ib0" and "# one is lent" in file.read_text()


def test_a_second_init_of_other_hosts_or_for_another_user_changes_nothing(gpurun, place, hosts):
    gpurun("init", "n[1-3]", "--user", "train")
    text = (place / "inventory.yaml").read_text()
    for argv in (("m[1-3]",), ("n[1-4]",), ("--user", "root"), ("n[1-3]", "--user", "root")):
        code, _, err = gpurun("init", *argv, "--yes")
        assert code == 2 and err.count("gpurun: ") == 1 and (place / "inventory.yaml").read_text() == text
    (place / "inventory.yaml").write_text("racks: {")
    assert gpurun("init", "--yes")[0] == 2 and (place / "inventory.yaml").read_text() == "racks: {"


@pytest.mark.parametrize("lie", ["x, gpus: 99}", "'", "\x1b[2J", "a\nb", "ü"])
def test_a_host_that_lies_about_its_generation_writes_nothing_else(gpurun, place, hosts, monkeypatch, lie):
    hosts.gpus = {"n1": 2}
    honest = hosts.survey

    def lying(inventory, names, timeout_s):
        survey = honest(inventory, names, timeout_s)
        return replace(survey, hardware={"n1": replace(survey.hardware["n1"], gpus=(Gpu(0, "V100", lie),))})

    monkeypatch.setattr("gpurun.cli.probe.survey_of", lying)
    code, _, err = gpurun("init", "n1", "--yes")
    assert code == 2 and "\x1b" not in err
    (host,) = load_inventory(place / "inventory.yaml").hosts
    assert (host.gpus, host.generation) == (1, "unknown")


def test_an_inventory_of_another_tool_that_says_all_is_continued_until_its_hosts_were_probed(gpurun, place, hosts):
    (place / "hosts.csv").write_text("name,gpus,generation\nn1,4,volta\nn2,4,volta\n")
    assert gpurun("init", "./hosts.csv")[0] == 2
    assert "Guessed: gpus" not in (place / "inventory.yaml").read_text()
    hosts.gpus = {"n1": 4, "n2": 2}
    code, _, err = gpurun("init", "./hosts.csv", "--yes")
    assert code == 0 and "n2: gpus is 2; the inventory says 4, and gpurun keeps this value" in err
    assert [host.gpu_model for host in load_inventory(place / "inventory.yaml").hosts] == ["V100", "V100"]
    assert gpurun("init", "--yes")[0] == 2


def test_an_inventory_that_a_person_wrote_is_never_continued(gpurun, place, hosts):
    text = (
        "version: 1\ndefaults: {generation: unknown, gpus: 1}\nfabrics: {tcp: {kind: tcp, interface: eth0}}\n"
        "racks: {r1: {hosts: {n1: {}}}}\n"
    )
    (place / "inventory.yaml").write_text(text)
    hosts.gpus = {"n1": 4}
    assert gpurun("init", "--yes")[0] == 2 and (place / "inventory.yaml").read_text() == text


def test_an_interface_that_a_person_has_confirmed_stays(gpurun, place, hosts):
    hosts.gpus = {"n1": 4}
    gpurun("init", "n1")
    file = place / "inventory.yaml"
    file.write_text(file.read_text().replace("# Guessed: interface eth0 for every fabric\n", ""))
    assert gpurun("init", "--yes")[0] == 0
    assert load_inventory(file).fabrics["tcp"].interface == "eth0"


def test_a_probe_that_writes_settles_a_guess_only_if_all_hosts_have_answered_it(gpurun, place, hosts):
    hosts.gpus = {"n1": 4, "n2": 4}
    gpurun("init", "n[1-2]")
    assert gpurun("inventory", "probe", "n1", "--write", "--yes", "-i", "inventory.yaml")[0] == 0
    assert gpus_in(place) == {"n1": 4, "n2": 1}, "no other host is changed"
    assert "# Guessed: gpus 1 for every host" in (place / "inventory.yaml").read_text()
    assert gpurun("inventory", "probe", "--write", "--yes", "-i", "inventory.yaml")[0] == 0
    text = (place / "inventory.yaml").read_text()
    assert gpus_in(place) == {"n1": 4, "n2": 4} and "Guessed: gpus" not in text and "gpus: 1" not in text
