"""Cordons belong to machines, whatever inventories call them."""

from __future__ import annotations

import pytest

from gpurun.state.hosts import Cordon, Cordons, KnownAs, KnownMachines, cordons_on, lift_cordons, put_cordon

FAN = Cordon("cordoned", "alice", 1.0, "fan")
ONE, OTHER = "1" * 32, "2" * 32


def cordoned(*hosts: KnownAs) -> dict[str, Cordon]:
    cordons: dict[str, Cordon] = {}
    for host in hosts:
        assert put_cordon(cordons, host, FAN)
    return cordons


@pytest.mark.parametrize(
    ("then", "now", "is_kept"),
    [
        (KnownAs("h1", "h1:22", ONE), KnownAs("h1", "h1:22", ONE), True),
        (KnownAs("h1", "h1:22", ONE), KnownAs("node1", "10.0.0.1:22", ONE), True),  # renamed, and another address
        (KnownAs("h1", "h1:22", ONE), KnownAs("h1", "h1:22", OTHER), False),  # the name is another machine's now
        (KnownAs("h1", "h1:22", ONE), KnownAs("h1", "h1:22"), True),  # nobody has asked the host yet
        (KnownAs("h1", "h1:22", ONE), KnownAs("h1", "10.0.0.9:22"), True),
        (KnownAs("h1", "10.0.0.1:22"), KnownAs("node1", "10.0.0.1:22"), True),
        (KnownAs("h1", "10.0.0.1:22"), KnownAs("node1", "10.0.0.1:22", ONE), True),
        (KnownAs("h1", "10.0.0.1:22"), KnownAs("node1", "10.0.0.2:22", ONE), False),
        (KnownAs("h1"), KnownAs("h1", "10.0.0.1:22", ONE), True),  # a file of an older version
        (KnownAs("h1"), KnownAs("node1"), False),
        (KnownAs("h1", "", ""), KnownAs("h2", "", ""), False),
    ],
)
def test_a_cordon_follows_its_machine(then, now, is_kept):
    assert cordons_on(cordoned(then), [now]) == ({now.host: cordoned(then)[then.host]} if is_kept else {})


def test_two_machines_of_one_name_each_have_their_own():
    one, other = KnownAs("h1", "h1:22", ONE), KnownAs("h1", "h1:22", OTHER)
    cordons = cordoned(one, other)
    assert len(cordons) == 2 and cordons_on(cordons, [other])["h1"].id == OTHER
    assert [each.id for each in lift_cordons(cordons, other)] == [OTHER]
    assert cordons_on(cordons, [one])["h1"].id == ONE and not cordons_on(cordons, [other])


def test_uncordon_by_another_name_lifts_it_and_a_second_cordon_changes_nothing():
    h1, node1 = KnownAs("h1", "h1:22", ONE), KnownAs("node1", "10.0.0.1:22", ONE)
    cordons = cordoned(h1)
    assert not put_cordon(cordons, node1, FAN) and list(cordons) == ["h1"]
    assert put_cordon(cordons, node1, Cordon("draining", "bob", 2.0, "move"))
    assert cordons_on(cordons, [h1])["h1"].by == "bob"
    assert lift_cordons(cordons, node1) and not cordons and not lift_cordons(cordons, node1)


def test_a_cordon_without_an_id_is_every_machine_of_its_name_or_address_until_it_is_lifted():
    cordons = cordoned(KnownAs("h1", "h1:22"))
    for host in (KnownAs("h1", "h1:22", ONE), KnownAs("h1", "h1:22", OTHER)):
        assert cordons_on(cordons, [host])
    assert len(lift_cordons(cordons, KnownAs("h1", "h1:22", OTHER))) == 1


def test_a_deadline_moves_to_no_other_machine(tmp_path):
    """Members may change the cordons of a shared directory, only root its deadlines."""
    with Cordons(tmp_path).changing() as cordons:
        put_cordon(cordons, KnownAs("h1", "h1:22", ONE), Cordon("draining", "root", 5.0, "fan", until_s=77.0))
    assert Cordons(tmp_path).read()["h1"].until_s == 77.0
    file = Cordons(tmp_path).file().plain
    file.write_text(file.read_text().replace(ONE, OTHER))
    assert Cordons(tmp_path).read()["h1"].until_s is None


@pytest.mark.parametrize("name", ["h/1", "/", "", "'; rm", "h\n1", "ü"])
def test_keys_by_hand_are_only_keys(tmp_path, name):
    with Cordons(tmp_path).changing() as cordons:
        cordons[name] = FAN
    found = Cordons(tmp_path).read()
    host = KnownAs(name.partition("/")[0], "a:22", ONE)
    assert found == {name: FAN} and list(cordons_on(found, [host])) == [host.host]


def test_the_surest_entry_comes_first():
    known = KnownMachines(
        {"a": KnownAs("h1", "x:22"), "b": KnownAs("h9", "h1:22"), "c": KnownAs("h8", "y:22", ONE)}.items()
    )
    assert list(known.same(KnownAs("h1", "h1:22", ONE))) == ["c", "b", "a"]
    assert list(known.same(KnownAs("h1", "h1:22", ONE), by_name=False)) == ["c", "b"]
