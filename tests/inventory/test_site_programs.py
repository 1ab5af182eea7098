"""The site's programs in the inventory: ``health``, ``prolog``, ``epilog``, each a list of words."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.documents.plain import DocumentError
from gpurun.errors import BadInput
from gpurun.inventory.edit import SetFields, apply, parse_settings
from gpurun.inventory.fields import inventory_schema
from gpurun.inventory.read import parse_inventory

TEXT = """\
version: 1
defaults:
  generation: pascal
  gpus: 4
  fabric: tcp
  health: [/usr/local/bin/check, --fast, 30]   # for all
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks:
  r1:
    defaults: {prolog: [/site/prolog]}
    hosts:
      a1: {}
      a2: {health: [], epilog: ["/site/epi log", "$(x)", "é"]}
"""


def read(text):
    return parse_inventory(text.encode(), Path("/x"))


def test_programs_are_inherited_like_every_other_key():
    hosts = read(TEXT).by_name
    assert hosts["a1"].health == ("/usr/local/bin/check", "--fast", "30")
    assert (hosts["a1"].prolog, hosts["a1"].epilog) == (("/site/prolog",), ())
    assert hosts["a2"].health == () and hosts["a2"].epilog == ("/site/epi log", "$(x)", "é")


@pytest.mark.parametrize(
    "value",
    [
        "/site/check --fast", "[[/a], b]", "{a: b}", '["a\\nb"]', '["\\x1b[2J"]', '"\\x1b[2J"', '[""]', '""', "[null]",
        "null", f"[{', '.join(['a'] * 300)}]", f"[{'a' * 5000}]", "a" * 5000,
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_what_is_no_list_of_words_is_refused_with_its_place(value):
    text = TEXT.replace("a1: {}", f"a1: {{prolog: {value}}}")
    with pytest.raises(DocumentError) as refused:
        read(text)
    (problem, *_) = refused.value.problems
    assert "prolog" in str(problem) and ":12:" in str(problem)


def changed(text, setting):
    return apply(text.encode(), Path("/x"), SetFields(("a1",), (setting,))).decode()


def test_a_command_sets_and_removes_them():
    (setting,) = parse_settings(["health=[/site/check, '--word with space']"])
    assert setting.value == ("/site/check", "--word with space")
    text = changed(TEXT, setting)
    assert read(text).by_name["a1"].health == ("/site/check", "--word with space")
    assert "# for all" in text
    (empty,) = parse_settings(["health="])
    assert read(changed(text, empty)).by_name["a1"] == read(TEXT).by_name["a1"]
    (none,) = parse_settings(["health=[]"])
    assert none.value == ()
    with pytest.raises(BadInput):
        parse_settings(["health=/site/check --fast"])
    (alone,) = parse_settings(["health=/site/check"])
    assert alone.value == ("/site/check",)
    assert read(changed(TEXT, alone)).by_name["a1"].health == ("/site/check",)


def test_the_schema_describes_them():
    keys = inventory_schema()["properties"]["defaults"]["properties"]
    for name in ("health", "prolog", "epilog"):
        assert keys[name]["oneOf"][0]["type"] == "array" and keys[name]["description"]
