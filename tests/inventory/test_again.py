"""A source is imported again: what it changed is taken, what a person changed stays, a conflict is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.inventory.read import load_inventory

HOSTS = "[rack1]\nn[1:3] gpus=4 team=a\n[rack2]\nm1 gpus=8\n"


@pytest.fixture(name="place")
def folder(tmp_path, monkeypatch):
    """An inventory that was imported from ``hosts``, with a state directory of its own."""
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("GPURUN_INVENTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(HOSTS)
    return tmp_path


@pytest.fixture(name="imported")
def import_hosts(gpurun, place):
    """Import ``hosts`` again, after a text took its place; what the command said."""
    assert gpurun("inventory", "import", "hosts", "--generation", "volta")[0] == 0

    def run(text, *flags):
        Path("hosts").write_text(text)
        code, out, err = gpurun("inventory", "import", "hosts", *(flags or ("--yes",)))
        return code, out, err

    return run


def told(err: str) -> list[str]:
    titles = ("added:", "changed:", "gone:", "kept:", "guessed: the racks")
    return [line for line in err.splitlines() if line.startswith(titles)]


def test_what_both_changed_stays_and_is_said_until_somebody_decides(gpurun, imported):
    gpurun("inventory", "set", "n[1-2]", "gpus=2", "--yes")
    changed = HOSTS.replace("gpus=4", "gpus=6")
    for _ in range(2):
        code, _, err = imported(changed)
        assert code == 0
        assert (
            "kept: n[1-2]: gpus stays 2; the source said 4, now 6. To use 6: `gpurun inventory set 'n[1-2]' gpus=6`"
            in err
        )
    assert {host.name: host.gpus for host in load_inventory(Path("inventory.yaml")).hosts} == {
        "n1": 2,
        "n2": 2,
        "n3": 6,
        "m1": 8,
    }
    gpurun("inventory", "set", "n[1-2]", "gpus=6", "--yes")
    assert told(imported(changed)[2]) == []


def test_values_that_a_probe_or_a_person_added_are_no_conflict(gpurun, imported):
    gpurun("inventory", "set", "n1", "gpu_model=Tesla V100-SXM2-16GB", "generation=hopper", "--yes")
    assert told(imported(HOSTS)[2]) == []
    code, _, err = imported(HOSTS.replace("m1 gpus=8", "m1 gpus=7"))
    assert (code, told(err)) == (0, ["changed: m1: gpus 8 → 7"])
    first = load_inventory(Path("inventory.yaml")).by_name["n1"]
    assert (first.gpu_model, first.generation) == ("Tesla V100-SXM2-16GB", "hopper")


def test_hosts_that_a_person_removed_or_added_stay_so(gpurun, imported):
    gpurun("inventory", "remove", "n2", "--yes")
    gpurun("inventory", "add", "own1", "rack=rack2", "gpus=1", "--yes")
    code, _, err = imported(HOSTS + "m2 gpus=8\n")
    assert code == 0
    assert told(err) == [
        "kept: n2: somebody removed these hosts from the inventory, so gpurun does not add these hosts again",
        "added: m2",
    ]
    assert set(load_inventory(Path("inventory.yaml")).by_name) == {"n1", "n3", "m1", "m2", "own1"}


def test_a_host_that_is_gone_goes_with_a_word_about_its_labels(gpurun, imported):
    gpurun("inventory", "label", "n3", "ticket=hw-1", "--yes")
    before = Path("inventory.yaml").read_bytes()
    code, _, err = imported(HOSTS.replace("[1:3]", "[1:2]"))
    assert (code, told(err)) == (0, ["gone: n3, with labels.ticket from the inventory"])
    gpurun("inventory", "undo", "--yes")
    assert Path("inventory.yaml").read_bytes() == before


def test_nobody_agrees_so_nothing_changes(gpurun, imported):
    before = Path("inventory.yaml").read_bytes()
    code, out, err = imported(HOSTS + "m2 gpus=8\n", "--dry-run")
    assert (code, "+      m2: {}" in out or "m2" in out, told(err)) == (0, True, ["added: m2"])
    code, _, err = imported(HOSTS + "m2 gpus=8\n", "--from", "ansible")
    assert (code, "--yes makes the change without a question" in err) == (2, True)
    assert Path("inventory.yaml").read_bytes() == before


def test_a_leased_host_is_never_removed_in_silence(imported, place):
    from gpurun.jobs.spec import Grant
    from gpurun.leases.lease import Lease
    from gpurun.leases.occupancy import Occupancy
    from gpurun.leases.store import LeaseStore

    inventory = place / "inventory.yaml"
    lease = Lease("j-0000abcd", 1, "me", 0, "volta", ("rack1",), (Grant("n3", (0,)),), 40000, 0.0, str(inventory))
    LeaseStore(place / "state").grant(lease, Occupancy()).close()
    before = inventory.read_bytes()
    code, _, err = imported(HOSTS.replace("[1:3]", "[1:2]"))
    assert (code, inventory.read_bytes()) == (5, before)
    assert (
        "gone: n3" in err
        and "n3: you cannot remove the host now: j-0000abcd runs on the host" in err
        and "gpurun inventory drain n3 --wait" in err
    )


def test_a_host_that_the_source_moves_keeps_its_comment_and_values(imported):
    path = Path("inventory.yaml")
    path.write_text(
        path.read_text()
        .replace("      m1: {", "      # the new one\n      m1: {")
        .replace("gpus: 8}", "gpus: 8}  # serial 2101")
    )
    code, _, err = imported("[rack1]\nn[1:3] gpus=4 team=a\nm1 gpus=8\n")
    assert (code, told(err)) == (0, ["changed: m1: rack rack2 → rack1"])
    (line,) = [line for line in path.read_text().splitlines() if "m1:" in line]
    assert line == "      m1: {gpus: 8}  # serial 2101"


def test_another_source_is_added_only_on_request(gpurun, imported):
    Path("more").write_text("[rack3]\nk1 gpus=2\nn1 gpus=1 gpu_count=1\n")
    code, _, err = gpurun("inventory", "import", "more")
    assert (
        code,
        "gpurun did not import the inventory from this source" in err,
        "--merge adds the source's hosts" in err,
    ) == (
        2,
        True,
        True,
    )
    code, _, err = gpurun("inventory", "import", "more", "--merge", "--yes")
    assert code == 0
    assert "added: k1" in err
    assert "kept: n1: gpus stays 4; the source says 1. To use 1: `gpurun inventory set n1 gpus=1`" in err
    found = load_inventory(Path("inventory.yaml"))
    assert (found.by_name["k1"].gpus, found.by_name["k1"].generation, found.by_name["n1"].gpus) == (2, "volta", 4)
    Path("more").write_text("[rack3]\nn1 gpus=1\n")
    code, _, err = gpurun("inventory", "import", "more", "--yes")  # it is known now; the hosts of the first are not its
    assert (code, told(err)) == (0, ["gone: k1"])


def test_without_a_history_nothing_that_the_inventory_says_is_lost(gpurun, imported, place, monkeypatch):
    gpurun("inventory", "set", "n1", "gpus=2", "--yes")
    monkeypatch.setenv("GPURUN_HOME", str(place / "another"))
    code, _, err = imported(HOSTS.replace("[1:3]", "[1:2]") + "m2 gpus=8\n")
    assert code == 0
    assert "kept: n3: the source has no such hosts; to remove: `gpurun inventory remove n3`" in err
    assert "kept: n1: gpus stays 2; the source says 4" in err
    assert set(load_inventory(Path("inventory.yaml")).by_name) == {"n1", "n2", "n3", "m1", "m2"}


def test_a_fabric_that_the_inventory_lacks(imported):
    code, _, err = imported(HOSTS.replace("m1 gpus=8", "m1 gpus=8 fabric=ib"))
    assert (code, "kept: m1: the inventory has no fabric ib" in err) == (0, True)
    code, _, err = imported(HOSTS + "m2 gpus=8 fabric=ib\n")
    assert (code, "host m2 is on fabric ib, which the inventory does not have" in err) == (2, True)


def test_damaged_memory_is_no_memory(imported, place):
    for path in (place / "state").glob("inventory/*/texts/*"):
        if b'"rack1"' in path.read_bytes():
            path.write_bytes(b"{")
    code, _, err = imported(HOSTS.replace("[1:3]", "[1:2]"))
    assert (code, "kept: n3: the source has no such hosts" in err) == (0, True)


def test_a_range_that_gets_other_addresses_stays_a_range(imported):
    for net in (1, 2):
        lines = "".join(f"n{n} gpus=4 ansible_host=10.0.{net}.{n}\n" for n in range(1, 31))
        assert imported("[rack1]\n" + lines)[0] == 0
    assert "address: '10.0.2.[4-30]'" in Path("inventory.yaml").read_text()


def addresses(first: int) -> str:
    return "[rack1]\n" + "".join(f"n{n} gpus=4 ansible_host=10.0.{first + n}.1\n" for n in range(1, 60))


def test_hosts_that_exchange_their_addresses(imported):
    """One after the other, two hosts would be one machine in between."""
    assert imported(addresses(0))[0] == 0
    assert imported(addresses(1))[0] == 0
    there = "[rack1]\nn1 gpus=4 ansible_host=10.0.9.2\nn2 gpus=4 ansible_host=10.0.9.1\n"
    assert imported(there)[0] == 0
    back = there.replace("9.2", "9.3").replace("9.1", "9.2").replace("9.3", "9.1")
    code, _, err = imported(back)
    assert (code, told(err)[-1]) == (0, "changed: n[1-2]: another address")
    assert {host.name: host.address for host in load_inventory(Path("inventory.yaml")).hosts} == {
        "n1": "10.0.9.1",
        "n2": "10.0.9.2",
    }


def test_two_names_of_one_machine_are_one_host(imported):
    code, _, err = imported("[rack1]\nn1 gpus=4 ansible_host=10.0.0.1\nalias gpus=4 ansible_host=10.0.0.1\n")
    assert code == 0
    assert "hosts: alias: left out, because this is the same machine as n1: 10.0.0.1:22" in err
    assert set(load_inventory(Path("inventory.yaml")).by_name) == {"n1"}


@pytest.mark.parametrize(
    "last", [b"", b"[]", b"\xff", b'{"n1": 3}', b'{"n1": {"nosuch": "1", "gpus": "many", "labels": "x", "port": ""}}']
)  # fmt: skip
def test_whatever_the_record_of_the_last_import_says(place, last):
    from gpurun.inventory.imports.again import compose_inventory, merge
    from gpurun.inventory.imports.source import read_source

    draft = read_source(Path("hosts"))
    text = compose_inventory(draft, {"generation": "volta"}, {"kind": "tcp", "interface": "eth0"}).encode()
    assert merge(text, Path("/inventory.yaml"), draft, last, {}).after == text
