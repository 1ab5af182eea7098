"""Guesses of an imported inventory: what counts as one, and what is left of it once hosts have told."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.inventory.imports.again import (
    compose_inventory,
    guessed_hosts,
    guesses,
    is_imported,
    settled,
    with_interface,
)
from gpurun.inventory.imports.draft import Draft
from gpurun.inventory.read import parse_inventory

PATH = Path("/inventory.yaml")


def imported(*hosts: str, given: dict[str, str] | None = None, **gpus: str) -> str:
    draft = Draft("the command line")
    for host in hosts:
        draft.host(host, "x")
    for host, count in gpus.items():
        draft.put(host, "gpus", count, "x")
    return compose_inventory(draft, given or {}, {"kind": "tcp", "interface": "eth0"})


def test_what_compose_guesses_is_found_again():
    text = imported("n1", "n2", "n3")
    found = {guess.key: guess for guess in guesses(text)}
    assert {key: guess.value for key, guess in found.items()} == {"gpus": "1", "generation": "unknown"}
    for guess in found.values():
        assert guessed_hosts(text, guess, PATH) == ("n1", "n2", "n3")
    assert guesses(imported("n1", given={"gpus": "8", "generation": "pascal"})) == ()


def test_a_value_that_most_others_have_is_a_guess_for_the_rest():
    text = imported("n1", "n2", "n3", n1="8", n2="8")
    guess = next(guess for guess in guesses(text) if guess.key == "gpus")
    assert (guess.value, guessed_hosts(text, guess, PATH)) == ("8", ("n1", "n2", "n3"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpus: 1}", "gpus: 4}"), ("generation: unknown, gpus: 1", "generation: unknown, gpus: 2"),
        ("# Guessed: gpus 1 for every host: the source does not say\n", ""),
        ("defaults: {generation: unknown, gpus: 1}", "defaults:\n  generation: unknown\n  gpus: 1"),
        ("gpus: 1}", "gpus: 10}"),
    ],
)  # fmt: skip
def test_a_default_that_a_person_has_changed_is_no_guess(old, new):
    text = imported("n1").replace(old, new)
    assert "gpus" not in [guess.key for guess in guesses(text)]


def test_a_host_with_a_value_of_its_own_is_not_guessed_even_if_the_value_is_the_default_s():
    text = imported("n1", "n2", "n3").replace('"n[1-3]": {}', 'n1: {gpus: 1}\n      "n[2-3]": {}')
    guess = next(guess for guess in guesses(text) if guess.key == "gpus")
    assert guessed_hosts(text, guess, PATH) == ("n2", "n3")


def test_what_hosts_have_told_is_no_guess_any_more():
    text = imported("n1", "n2")
    for guess in guesses(text):
        text = settled(text, guess, {"gpus": "4", "generation": "ada-2.x"}[guess.key], ())
    assert "Guessed: gpus" not in text and "Guessed: generation" not in text and "# Guessed: rack r1" in text
    assert {(host.gpus, host.generation) for host in parse_inventory(text.encode(), PATH).hosts} == {(4, "ada-2.x")}


def test_hosts_that_have_not_told_are_named_in_what_stays_a_guess():
    text = imported("n1", "n2", "n3")
    for guess in guesses(text):
        text = settled(text, guess, {"gpus": "4", "generation": "v100"}[guess.key], ["n2", "n3"])
    assert "# Guessed: gpus 4 for n[2-3], as most others have\n" in text
    again = {guess.key: guess.value for guess in guesses(text)}
    assert again == {"gpus": "4", "generation": "v100"}, "a later init continues"


@pytest.mark.parametrize(
    "text",
    [
        "", "# Guessed: gpus 1 for x\n", "# Guessed: gpus 1 for x\ndefaults: {gpus: 1}\n",
        "# Guessed: gpus \x00 for x\ndefaults: {gpus: \x00}\n", "# Guessed: gpus [1 for x\ndefaults: {gpus: [1}\n",
        "# Guessed: gpus ١ for x\ndefaults: {gpus: ١}\n",
    ],
)  # fmt: skip
def test_text_that_is_no_inventory_has_no_guessed_hosts(text):
    assert all(guessed_hosts(text, guess, PATH) == () for guess in guesses(text))


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("# Guessed: interface eth0 for every fabric\n{interface: eth0}", "{interface: ens1}"),
        ("# Guessed: interface eth0: see probe\n{interface: eth0, x: eth0}", "{interface: ens1, x: eth0}"),
        ("# Guessed: interface eth0\n{interface: eth01}\ninterface: eth0\n", "{interface: eth01}\ninterface: ens1\n"),
        ("{interface: eth0}", "{interface: eth0}"),
        ("# Guessed: interface e.h0\n{interface: eth0}", "{interface: eth0}"),
    ],
)
def test_a_guessed_interface_is_replaced_by_what_the_hosts_have(text, after):
    assert with_interface(text, "ens1") == after


def test_only_what_was_imported_is_unfinished():
    assert is_imported(imported("n1")) and not is_imported("version: 1\n") and not is_imported("# Imported from x\n")
