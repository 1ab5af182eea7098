import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.content.chain import HostPace, LinkTrial, Want, chain, rate_of, slow_host, star

MIB = 1 << 20
SIZES = {"a": 10, "b": 20, "c": 30, "d": 5}

wants_of_some = st.lists(
    st.tuples(st.sampled_from(["r1", "r2", "r3"]), st.lists(st.sampled_from("abcd"), unique=True, max_size=4)),
    min_size=1,
    max_size=12,
).map(lambda found: [Want(f"h{at}", rack, tuple(sorted(digests))) for at, (rack, digests) in enumerate(found)])


@given(wants_of_some, st.integers(1, 3))
def test_every_lane_is_one_chain_in_which_nobody_misses_anything(wants, lanes):
    for lane in range(lanes):
        hops = chain(wants, SIZES, lane=lane, lanes=lanes)
        assert sorted(hop.host for hop in hops) == sorted(want.host for want in wants)
        assert [hop.upstream for hop in hops] == [None, *(hop.host for hop in hops[:-1])]
        by_host = {want.host: want for want in wants}
        for hop, following in zip(hops, [*hops[1:], None], strict=True):
            assert set(by_host[hop.host].digests) <= set(hop.digests)
            if following is not None:
                assert set(following.digests) <= set(hop.digests)


@given(wants_of_some)
def test_each_rack_is_entered_once(wants):
    racks = [hop.rack for hop in chain(wants, SIZES)]
    changes = [rack for at, rack in enumerate(racks) if at == 0 or racks[at - 1] != rack]
    assert len(changes) == len(set(changes))


def test_hosts_that_lack_most_come_first_in_their_rack():
    wants = [
        Want("x", "r1", ("a",)),
        Want("y", "r1", ("a", "b", "c")),
        Want("z", "r2", ()),
        Want("w", "r2", ("a", "b")),
    ]
    assert [hop.host for hop in chain(wants, SIZES)] == ["y", "x", "w", "z"]


def test_lanes_begin_with_different_hosts_of_a_rack():
    wants = [Want(f"h{at}", "r1", ("a",)) for at in range(4)]
    assert {chain(wants, SIZES, lane=lane, lanes=2)[0].host for lane in range(2)} == {"h0", "h2"}


def test_a_star_has_only_the_head_upstream():
    assert {hop.upstream for hop in star([Want("x", "r", ("a",)), Want("y", "r", ("a",))])} == {None}


def pace(host, upstream, rate, received=0, *, rack="r1", age=10.0, followed=True):
    return HostPace(host, rack, upstream, received, rate, age, followed)


def test_the_host_that_drags_is_found():
    paces = [
        pace("a", None, 100, 90 * MIB),
        pace("b", "a", 100, 88 * MIB),
        pace("c", "b", 10, 9 * MIB),
        pace("d", "c", 10, 8 * MIB),
    ]
    found = slow_host(paces, [])
    assert found is not None and found.host == "c"


@pytest.mark.parametrize(
    "slow",
    [
        pace("b", "a", 60, 9 * MIB),  # not that much slower
        pace("b", "a", 10, 80 * MIB),  # not far behind
        pace("b", "a", 10, 9 * MIB, age=1.0),  # too young to say
        pace("b", "a", 10, 9 * MIB, followed=False),  # in nobody's way
        pace("b", "a", None, 9 * MIB),
    ],
)
def test_who_is_left_alone(slow):
    assert slow_host([pace("a", None, 100, 90 * MIB), slow], []) is None


def test_a_host_is_tried_elsewhere_once():
    paces = [pace("a", None, 100, 90 * MIB), pace("b", "a", 10, 9 * MIB)]
    assert slow_host(paces, [LinkTrial("b", None, 10.0)]) is None


def test_a_slow_uplink_is_not_taken_for_a_slow_host():
    paces = [pace("a", None, 100, 90 * MIB), pace("c", "a", 10, 9 * MIB, rack="r2")]
    assert slow_host(paces, []) is not None  # the first of its rack is tried,
    assert slow_host(paces, [LinkTrial("b", "r2", 9.0)]) is None  # the second is not when that has not helped,
    faster = [pace("a", None, 100, 90 * MIB), pace("c", "a", 40, 9 * MIB, rack="r2")]
    assert slow_host(faster, [LinkTrial("b", "r2", 9.0)]) is not None  # but is when it has.


def test_rates():
    assert rate_of([]) is None and rate_of([(1.0, 5)]) is None and rate_of([(1.0, 5), (1.0, 9)]) is None
    assert rate_of([(1.0, 0), (3.0, 10)]) == 5.0
