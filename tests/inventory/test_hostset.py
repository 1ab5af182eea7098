"""Host sets: ClusterShell's syntax with gpurun's groups."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from ClusterShell.NodeSet import NodeSet, NodeSetParseError
from ClusterShell.RangeSet import RangeSetException
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput
from gpurun.inventory.hostset import expand, fold_by_clustershell, is_host_name, select
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import parse_inventory

TEXT = b"""\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks:
  r1: {hosts: {"gpu-r1-[01-16]": {labels: {team: vision}}}}
  r2: {hosts: {"gpu-r2-[01-08]": {generation: volta, gpus: 8}, solo: {}}}
"""


@pytest.fixture
def inventory() -> Inventory:
    return parse_inventory(TEXT, Path("/inventory.yaml"))


@pytest.mark.parametrize(
    ("selection", "folded"),
    [
        ("gpu-r1-[01-03]", "gpu-r1-[01-03]"),
        ("gpu-r1-[01-16],@rack:r1&!@cordoned", "gpu-r1-[01-06,08-16]"),
        ("@rack:r1!@cordoned", "gpu-r1-[01-06,08-16]"),
        ("@generation:pascal & !@cordoned", "gpu-r1-[01-06,08-16],solo"),
        ("!@rack:r1", "gpu-r2-[01-08],solo"),
        ("@label:team=vision", "gpu-r1-[01-16]"),
        ("@fabric:tcp^@rack:r1", "gpu-r2-[01-08],solo"),
        ("gpu-r2-0?", "gpu-r2-[01-08]"),
        ("solo", "solo"),
    ],
)
def test_select(inventory: Inventory, selection: str, folded: str) -> None:
    assert fold_by_clustershell(select(inventory, selection, {"cordoned": ["gpu-r1-07", "gone"]})) == folded


def test_the_order_is_the_inventorys(inventory: Inventory) -> None:
    assert select(inventory, "solo,gpu-r2-01,gpu-r1-02") == ("gpu-r1-02", "gpu-r2-01", "solo")
    assert select(inventory, "@all") == tuple(host.name for host in inventory.hosts)
    assert select(inventory, "@cordoned", {"cordoned": []}) == ()


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        ("gpu-r1-17", "has no host 'gpu-r1-17'"),
        ("gpu-r1-[15-18]", "has no host 'gpu-r1-[17-18]'"),
        ("@rack:r9", "no group @rack:r9"),
        ("@nope", "no group @nope"),
        ("@shelf:a", "shelf"),
        ("", "is not a host set"),
        ("a;b", "is not a host set"),
        ("$(reboot)", "is not a host set"),
        ("gpu-r1-[1-9999999]", "more than 100000 hosts"),
        ("gpu-[1-400]-[1-400]", "more than 100000 hosts"),
        ("gpu-r1-[01-16", "host set"),
        ("@rack:r1&", "host set"),
        ("gpü", "is not a host set"),
        ("a\nb\x00", "is not a host set"),
    ],
)
def test_what_is_refused(inventory: Inventory, selection: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        select(inventory, selection)
    assert said in str(refused.value)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 4), st.sampled_from(["a", "a-", "a1-", "a.b-"]))
def test_simple_ranges_are_what_clustershell_says(first: int, last: int, width: int, prefix: str) -> None:
    for folded in (f"{prefix}[{first:0{width}}-{last:0{width}}]", f"{prefix}[{first}-{last}].example"):
        try:
            expected = list(NodeSet(folded))
        except (NodeSetParseError, RangeSetException):
            with pytest.raises(BadInput):
                expand(folded)
        else:
            assert list(expand(folded)) == expected


@given(st.text(max_size=40))
def test_any_text_selects_or_is_refused(text: str) -> None:
    found = parse_inventory(TEXT, Path("/inventory.yaml"))
    with suppress(BadInput):
        assert set(select(found, text)) <= found.by_name.keys()


@given(st.sets(st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,3}){1,2}", fullmatch=True), min_size=1, max_size=30))
def test_fold_and_expand_are_each_others_inverse(names: set[str]) -> None:
    assert all(is_host_name(name) for name in names)
    assert set(expand(fold_by_clustershell(names))) == names
