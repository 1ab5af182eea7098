"""What a step costs, for given parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpurun.scaling import model
from gpurun.scaling.model import (
    LinkClass,
    LinkRates,
    Shape,
    exchange_seconds,
    expected_slowest,
    step_seconds,
    traffic_of,
)

ALL = frozenset(LinkClass)
RATES = LinkRates(100e9, 10e9, 25e9)


def values(compute_s=0.1, spread=0.0, ahead=1e-9, byte_s=0.0, latency_s=0.0, inverse=1.0):
    found = [1.0] * model.PARAMETERS
    found[model.COMPUTE], found[model.SPREAD], found[model.AHEAD], found[model.BYTE] = compute_s, spread, ahead, byte_s
    for link in LinkClass:
        found[model.latency_at(link)], found[model.inverse_at(link)] = latency_s, inverse
    return found


def exchange(shape, kind, sent=1e9, **changed):
    return exchange_seconds(values(**changed), traffic_of(shape, sent, kind, ALL))


def test_a_ring_costs_what_the_slowest_link_that_it_crosses_lets_through():
    four = Shape((2, 2), ("a", "a"), rates=RATES)
    assert exchange(four, "ring") == pytest.approx(2 * 3 / 4 * 8e9 / 10e9)
    assert exchange(four, "ring", latency_s=1e-3) == pytest.approx(2 * 3 / 4 * 8e9 / 10e9 + 6e-3)
    assert exchange(four.on(replace(RATES, host=1e9)), "ring") == pytest.approx(2 * 3 / 4 * 8)
    apart = replace(four, racks=("a", "b"))
    assert exchange(apart, "ring") == pytest.approx(2 * 3 / 4 * 8e9 / 10e9)  # a host's own link is the slower one
    assert exchange(apart.on(replace(RATES, racks=1e9)), "ring") == pytest.approx(2 * 3 / 4 * 8)


def test_flows_of_a_ring_that_goes_to_and_fro_share_a_racks_link():
    slow = replace(RATES, racks=1e9)
    straight = Shape((1, 1, 1, 1), ("a", "a", "b", "b"), rates=slow)
    mixed = replace(straight, racks=("a", "b", "a", "b"))
    assert exchange(mixed, "ring") == pytest.approx(2 * exchange(straight, "ring"))


def test_a_hierarchical_exchange_is_one_ring_in_the_hosts_and_one_of_the_hosts():
    shape = Shape((4, 4), ("a", "a"), rates=RATES)
    assert exchange(shape, "hierarchical") == pytest.approx(2 * 3 / 4 * 8e9 / 100e9 + 2 * 1 / 2 * 8e9 / 10e9)
    assert exchange(Shape((4,), ("a",), rates=RATES), "hierarchical") == pytest.approx(2 * 3 / 4 * 8e9 / 100e9)


def test_ranks_share_the_links_of_parameter_servers():
    def at(ranks, servers):
        shape = Shape((1,) * ranks + (0,) * servers, ("a",) * (ranks + servers), (0,) * ranks + (1,) * servers, RATES)
        return exchange(shape, "servers")

    assert at(4, 1) == pytest.approx(4 * 8e9 / 10e9)
    assert at(4, 2) == pytest.approx(at(4, 1) / 2)
    assert at(1, 4) == pytest.approx(8e9 / 10e9)  # the rank's own link
    together = Shape((1, 1), ("a", "a"), (1, 1), RATES)  # half of each rank's gradients stays on its host
    assert exchange(together, "servers") == pytest.approx(8e9 / 10e9)


def test_servers_behind_a_racks_link_share_it():
    shape = Shape((1, 1, 0), ("a", "a", "b"), (0, 0, 1), replace(RATES, racks=1e9))
    assert exchange(shape, "servers") == pytest.approx(2 * 8)


def test_one_rank_exchanges_nothing_and_the_slowest_of_many_takes_longer():
    alone = traffic_of(Shape((1,), ("a",)), 1e9, "ring", ALL)
    assert step_seconds(values(0.1, spread=0.5), alone) == pytest.approx(0.1)
    assert expected_slowest(1) == 0
    assert expected_slowest(2) == pytest.approx(0.564, abs=0.03)
    assert expected_slowest(512) == pytest.approx(3.04, abs=0.05)


def test_computation_hides_exchange_only_after_the_first_gradient():
    traffic = traffic_of(Shape((1, 1), ("a", "a"), rates=RATES), 1e8, "ring", ALL)  # exchanges for 0.08 s
    assert step_seconds(values(0.2), traffic) == pytest.approx(0.2, rel=1e-3)  # all of it is hidden
    assert step_seconds(values(0.2, ahead=1e9), traffic) == pytest.approx(0.28)  # nothing is
    assert step_seconds(values(0.06, ahead=1.0), traffic) == pytest.approx(0.03 + 0.08, rel=1e-3)
    assert step_seconds(values(1e-300), traffic) == pytest.approx(0.08)
    alone = traffic_of(Shape((1,), ("a",)), 1e8, "ring", ALL)
    assert step_seconds(values(0.2, ahead=1.0), alone) == 0.2


shapes = st.integers(1, 6).flatmap(
    lambda hosts: st.builds(
        Shape,
        st.tuples(*[st.integers(1, 8)] * hosts),
        st.tuples(*[st.sampled_from("abc")] * hosts),
        rates=st.builds(LinkRates, *[st.floats(1e6, 1e12)] * 3),
    )
)
with_servers = shapes.flatmap(
    lambda shape: st.builds(
        Shape,
        st.just(shape.ranks_per_host),
        st.just(shape.racks),
        st.tuples(*[st.integers(0, 3)] * len(shape.racks)),
        st.just(shape.rates),
    )
)
parameters = st.builds(
    values, st.floats(1e-6, 1e3), st.floats(0, 1), st.floats(1e-3, 30), st.floats(0, 1e-6), st.floats(0, 0.1),
    st.floats(1, 10),
)  # fmt: skip


@given(with_servers, parameters, st.floats(1, 1e12), st.floats(1, 100), st.sampled_from(list(LinkClass)))
def test_a_faster_link_is_never_slower_and_more_bytes_never_faster(shape, found, sent, more, link):
    faster = shape.on(replace(shape.rates, **{link.name.lower(): shape.rates.of(link) * more}))
    for kind in ("servers",) if any(shape.servers_per_host) else ("ring", "hierarchical"):
        now = step_seconds(found, traffic_of(shape, sent, kind, ALL))
        assert step_seconds(found, traffic_of(faster, sent, kind, ALL)) <= now * (1 + 1e-9)
        assert step_seconds(found, traffic_of(shape, sent * more, kind, ALL)) >= now * (1 - 1e-9)


@given(shapes, parameters, st.floats(1, 1e12))
def test_a_step_takes_at_least_its_longer_part_and_at_most_both(shape, found, sent):
    traffic = traffic_of(shape, sent, "ring", ALL)
    parts = model.compute_seconds(found, traffic), exchange_seconds(found, traffic)
    assume(max(parts) > 0)
    assert max(parts) * (1 - 1e-9) <= step_seconds(found, traffic) <= sum(parts) * (1 + 1e-9)
