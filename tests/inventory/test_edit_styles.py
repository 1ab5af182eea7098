"""Edits of inventories in unusual styles of YAML: only the text of the edit's hosts changes, or the edit is refused."""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path

import pytest

from gpurun.errors import BadInput
from gpurun.inventory.edit import AddHosts, RemoveHosts, SetEach, SetFields, apply, parse_settings
from gpurun.inventory.exports import ansible
from gpurun.inventory.read import parse_inventory

HEAD = """\
version: 1
x-base: &base {gpus: 8, labels: {row: a}}
defaults: {gpus: 4, generation: pascal}
fabrics: {tcp: {kind: tcp, interface: eth0}}
"""


def set_(hosts, *words):
    return SetFields(tuple(hosts.split()), parse_settings(words))


CASES = {  # racks, edit → lines that go, lines that come
    "the first alias of an anchor gets the values": (
        "racks: {r: {hosts: {\n  a: &e {gpus: 2}, # one\n  b: *e,\n  c: {<<: *e, port: 9}}}}\n",
        set_("a", "gpus=3"),
        ["  a: &e {gpus: 2}, # one", "  b: *e,"],
        ["  a: {gpus: 3}, # one", "  b: &e {gpus: 2},"],
    ),
    "an anchor is given away before its host": (
        "racks:\n  r:\n    hosts:\n      a: &e\n        gpus: 2  # two\n      b: {<<: *e, port: 9}\n",
        RemoveHosts(("a",)),
        ["      a: &e", "        gpus: 2  # two", "      b: {<<: *e, port: 9}"],
        ["      b: {<<: &e {gpus: 2}, port: 9}"],
    ),
    "a host that moves up has values for an alias": (
        "racks:\n  p: {hosts: {z: {}}}\n  r:\n    hosts:\n      a: &e {gpus: 2}\n      b: {<<: *e, port: 9}  # nine\n",
        set_("b", "rack=p"),
        ["  p: {hosts: {z: {}}}", "      b: {<<: *e, port: 9}  # nine"],
        ["  # b: nine", "  p: {hosts: {z: {}, b: {gpus: 2, port: 9}}}"],
    ),
    "a label goes that a merge has": (
        "racks:\n  r:\n    hosts:\n      a: *base  # all\n      b: *base\n",
        set_("a", "labels.row="),
        ["      a: *base  # all"],
        ["      a: {gpus: 8}  # all"],
    ),
    "an empty mapping of labels hides a merge's labels": (
        "racks: {r: {hosts: {a: {<<: *base, labels: {}}}}}\n",
        set_("a", "labels.row=", "gpus=3"),
        ["racks: {r: {hosts: {a: {<<: *base, labels: {}}}}}"],
        ["racks: {r: {hosts: {a: {<<: *base, labels: {}, gpus: 3}}}}"],
    ),
    "a removal of a value that the host does not have": (
        "racks: {r: {hosts: {a: {labels: {x: y},  # note\n  port: 9}, 'b[1-2]': {labels: {x: y}}}}}\n",
        set_("a b1", "labels.z=", "user="),
        [],
        [],
    ),
    "several new entries in braces": (
        "racks: {r: {hosts: {\n    'a[1-3]': {port: 9},  # a\n    b: {},\n}}}\n",
        SetEach((set_("a1", "user=x"), set_("a2", "user=y"))),
        ["    'a[1-3]': {port: 9},  # a"],
        ["    'a3': {port: 9},  # a", "    'a1': {port: 9, user: x},", "    'a2': {port: 9, user: y},"],
    ),
    "keys without values": (
        "racks: {r: {hosts: {a, b: , c: ~}}}\n",
        set_("a b c", "port=9"),
        ["racks: {r: {hosts: {a, b: , c: ~}}}"],
        ["racks: {r: {hosts: {a: {port: 9}, b: {port: 9}, c: {port: 9}}}}"],
    ),
    "a new host behind a key without a value": (
        "racks: {r: {hosts: {a: }}}\n",
        AddHosts(("b",), "r"),
        ["racks: {r: {hosts: {a: }}}"],
        ["racks: {r: {hosts: {a: , b: {}}}}"],
    ),
    "values over several lines": (
        "racks:\n  r:\n    hosts:\n      a:\n        gpu_model: |-  \n          Tesla X\n\n"
        "        health:  # check\n        - /x\n",
        set_("a", "gpu_model=A 'b'", "health=[/y, \"c d\"]"),
        ["        gpu_model: |-  ", "          Tesla X", "        health:  # check", "        - /x"],
        ["        gpu_model: A 'b'", "        health: [/y, c d]  # check"],
    ),
    "a rack without hosts": (
        "racks:\n  r:  # new\n  p:\n    hosts:\n      a: {}  # one\n",
        set_("a", "rack=r"),
        ["  r:  # new", "      a: {}  # one"],
        ["  # a: one", "  r: {hosts: {a: {}}}  # new"],
    ),
    "no racks, and no line break at the end": (
        "pools: {p: {}}\n...",
        AddHosts(("a",), "r", parse_settings(["user=x"])),
        [],
        ["racks:", "  r:", "    hosts:", "      a: {user: x}"],
    ),
}  # fmt: skip


CASES |= {
    "a new host in a mapping that is an item of a list": (
        "x-h:\n- &h {a: {}}\nracks: {r: {hosts: *h}}\n",
        AddHosts(("b",), "r"),
        ["- &h {a: {}}"],
        ["- &h {a: {}, b: {}}"],
    ),
    "an anchor of an omitted value": (
        "racks: {r: {hosts: {a: &x, b: *x}}}\n",
        set_("a", "gpus=3"),
        ["racks: {r: {hosts: {a: &x, b: *x}}}"],
        ["racks: {r: {hosts: {a: {gpus: 3}, b: &x null}}}"],
    ),
    "a brace in a comment before an empty mapping": (
        "racks:\n  r:\n    hosts: &h  # { none\n      {}\n",
        AddHosts(("a",), "r"),
        ["      {}"],
        ["      {a: {}}"],
    ),
    "an alias as a key": (
        "x-k: &k a\nracks:\n  r:\n    hosts:\n      *k : {gpus: 2}\n      b: {}\n",
        set_("a b", "gpus=3"),
        ["      *k : {gpus: 2}", "      b: {}"],
        ["      *k : {gpus: 3}", "      b: {gpus: 3}"],
    ),
    "a comma at the beginning of a line": (
        "racks: {r: {hosts: {\n    a: {}  # one\n  , b: {}  # two\n  , c: {}\n}}}\n",
        set_("b", "rack=r2"),
        ["  , b: {}  # two", "}}}"],
        ["# b: two", "}}, r2: {hosts: {b: {}}}}"],
    ),
    "an alias of the defaults of a rack below": (
        "racks:\n  q: {hosts: {z: {}}}\n  r:\n    defaults: &d {port: 9}\n    hosts:\n      a: *d\n",
        set_("a", "rack=q"),
        ["  q: {hosts: {z: {}}}", "      a: *d"],
        ["  q: {hosts: {z: {}, a: {port: 9}}}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("case", CASES)
def test_only_these_lines_change(case: str, newline: str) -> None:
    racks, edit, gone, come = CASES[case]
    text = (HEAD + racks).replace("\n", newline)
    after = apply(text.encode(), Path("/i.yaml"), edit).decode()
    lines = list(ndiff(text.split(newline), after.split(newline)))
    assert ([line[2:] for line in lines if line[0] == "-"], [line[2:] for line in lines if line[0] == "+"]) == (
        gone,
        come,
    )


@pytest.mark.parametrize("line", ['"gpu-[001-600]": {gpus: 8}', '{"gpu-[001-600]": {gpus: 8}}'])
def test_no_key_is_longer_than_yaml_allows(line: str) -> None:
    text = (HEAD + f"racks:\n  r:\n    hosts:\n      {line}\n").encode()
    every_second = tuple(f"gpu-{number:03}" for number in range(1, 601, 2))
    others = RemoveHosts(tuple(f"gpu-{number:03}" for number in range(2, 601, 2)))
    for settings, value in ((["gpus=3"], 3), (["rack=q"], 8), (["gpus=3", "rack=r"], 3)):
        after = apply(text, Path("/i.yaml"), SetFields(every_second, parse_settings(settings)))
        changed = parse_inventory(after, Path("/i.yaml")).by_name
        assert {name: changed[name].gpus for name in every_second} == dict.fromkeys(every_second, value)
        assert all(host.gpus == 8 for host in changed.values() if host.name not in every_second)
    left = apply(text, Path("/i.yaml"), others)
    assert [host.name for host in parse_inventory(left, Path("/i.yaml")).hosts] == list(every_second)
    again = apply(left, Path("/i.yaml"), AddHosts(others.hosts, "r", parse_settings(["gpus=8"])))
    assert len(parse_inventory(again, Path("/i.yaml")).hosts) == 600


def test_lines_with_another_line_break_stay() -> None:
    text = HEAD.replace("\n", "\r\n", 2) + "racks:\n  r:\n    hosts:\n      a: {}\n"
    after = apply(text.encode(), Path("/i.yaml"), set_("a", "port=9")).decode()
    assert after == text.replace("a: {}", "a: {port: 9}")


@pytest.mark.parametrize("racks", ["racks:\n  r:\n    hosts:\n      ? a\n      : {gpus: 2}\n",
                                   "racks:\n  r:\n    hosts:\n      ? a\n"])  # fmt: skip
def test_a_style_that_gpurun_cannot_edit_is_refused_with_the_way_out(racks: str) -> None:
    for edit in (set_("a", "rack=q"), RemoveHosts(("a",)), AddHosts(("b",), "r")):
        with pytest.raises(BadInput, match="without a loss") as refused:
            apply((HEAD + racks).encode(), Path("/i.yaml"), edit)
        assert "gpurun inventory edit" in (refused.value.hint or "")


def test_ansible_reads_texts_as_texts() -> None:
    racks = 'racks: {r: {hosts: {"on": {labels: {a: "yes", b: "1.0"}}}}}\n'
    text = ansible(parse_inventory((HEAD + racks).encode(), Path("/i.yaml")).hosts)
    assert "'on':" in text and "a: 'yes'" in text and "b: '1.0'" in text
