"""Pools: Peloton's three phases, hierarchies, and pools that contradict each other."""

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput
from gpurun.inventory.model import Pool
from gpurun.scheduler.pools import OWN, tree_of


@pytest.mark.parametrize(
    ("pools", "demand", "expected"),
    [
        pytest.param(
            [Pool("a", 20), Pool("b", 20), Pool("c", 20)],
            {"a": 50, "b": 80, "c": 80},
            {"a": 100 / 3, "b": 100 / 3, "c": 100 / 3},
            id="Peloton: reservations of 20, demands 50/80/80",
        ),
        pytest.param(
            [Pool("a", 20), Pool("b", 20)], {"a": 10, "b": 200}, {"a": 10, "b": 90}, id="what one leaves, others get"
        ),
        pytest.param(
            [Pool("a", 0, share=1), Pool("b", 0, share=3)], {"a": 90, "b": 90}, {"a": 25, "b": 75}, id="by share"
        ),
        pytest.param(
            [Pool("a", 0, share=3), Pool("b", 0), Pool("c", 0)],
            {"a": 30, "b": 90, "c": 90},
            {"a": 30, "b": 35, "c": 35},
            id="a share that is not wanted is shared again",
        ),
        pytest.param(
            [Pool("a", 10, limit=30), Pool("b", 10)], {"a": 90, "b": 90}, {"a": 30, "b": 70}, id="up to the limit"
        ),
        pytest.param(
            [Pool("org", 60), Pool("x", 40, parent="org"), Pool("y", 20, parent="org"), Pool("other", 40)],
            {"x": 90, "y": 0, "other": 90},
            {"org": 60, "x": 60, "y": 0, "other": 40},
            id="a sibling's reservation is lent inside the family first",
        ),
    ],
)
def test_entitlements(pools, demand, expected):
    found = tree_of(pools, 100).entitlements(100, demand)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_what_is_in_no_pool_has_what_no_pool_reserves():
    found = tree_of([Pool("a", 70)], 100).entitlements(100, {"a": 100, OWN: 100})
    assert found["a"] == pytest.approx(70)
    assert found[OWN] == pytest.approx(30)


def test_hosts_that_are_out_shrink_reservations_in_proportion():
    found = tree_of([Pool("a", 60), Pool("b", 40)], 100).entitlements(50, {"a": 100, "b": 100})
    assert found["a"] == pytest.approx(30)
    assert found["b"] == pytest.approx(20)


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([Pool("a", parent="b"), Pool("b", parent="a")], "pool a is its own parent: a → b → a"),
        ([Pool("x"), Pool("a", parent="a")], "pool a is its own parent"),
        ([Pool("a", parent="nobody")], "pool a: there is no pool 'nobody'"),
        ([Pool("a", 60), Pool("b", 50)], "reserve 110 GPUs together, but the inventory has 100"),
        ([Pool("a", 10), Pool("b", 20, parent="a")], "its children reserve 20 GPUs, but its own reservation is 10"),
        ([Pool("a", 10, limit=5)], "pool a: reservation 10 is above its limit 5"),
        ([Pool("a", limit=5), Pool("b", 20, parent="a")], "pool a: its children reserve 20 GPUs, but its limit is 5"),
        ([Pool("a", -1)], "pool a: reservation"),
        ([Pool("a", share=float("nan"))], "pool a: reservation, limit and share"),
        ([Pool("a'; rm -rf /", parent="\n")], "pool a'; rm -rf /: there is no pool '\\n'"),
    ],
)
def test_pools_that_contradict_each_other_are_named(pools, said):
    with pytest.raises(BadInput) as caught:
        tree_of(pools, 100)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


@st.composite
def forests(draw):
    pools = [
        Pool(f"p{n}", 0, draw(st.sampled_from([None, 30, 60])), draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])))
        for n in range(draw(st.integers(1, 4)))
    ]
    children = []
    for n in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(pools))
        children.append(Pool(f"c{n}", draw(st.integers(0, 7)), None, 1.0, parent.name))
    demand = {pool.name: draw(st.integers(0, 150)) for pool in (*pools, *children)}
    return (*pools, *children), demand


@examples("forests of pools")
@given(forests(), st.integers(0, 100))
def test_entitlements_add_up(forest, capacity):
    pools, demand = forest
    tree = tree_of(pools, 100)
    leaves = {tree.leaf_of(name): float(amount) for name, amount in demand.items()}
    found = tree.entitlements(capacity, leaves)
    for node in tree.nodes.values():
        assert -1e-6 <= found[node.name] <= node.limit + 1e-6
        if node.children:
            assert sum(found[child] for child in node.children) <= found[node.name] + 1e-6
        elif capacity == 100:
            assert found[node.name] >= min(node.reservation, leaves.get(node.name, 0)) - 1e-6
