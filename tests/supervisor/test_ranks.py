"""What ranks tell of themselves, and what follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.supervisor.verdict.ends import (
    IDLE_S,
    Rank,
    first_failed,
    have_succeeded,
    hosts_without_ranks,
    rank_in_event,
)

START = {"kind": "start", "id": "3.17", "rank": 3, "age_s": 5.0}
END = {"kind": "end", "id": "3.17", "rank": 3, "code": 1, "age_s": 2.0}


def take(*events):
    known = {}
    for now_s, event in enumerate(events, 100):
        if rank := rank_in_event(known, "h", event, float(now_s)):
            known["h", rank.id] = rank
    return list(known.values())


def test_a_start_and_an_end_are_told_at_the_time_they_happened():
    assert take(START) == [Rank("h", "3.17", 3, 95.0)]
    assert take(START, END) == [Rank("h", "3.17", 3, 95.0, 99.0, 1)]
    assert take(END, START) == [Rank("h", "3.17", 3, 98.0, 98.0, 1)], "an end is an end, whatever was not heard"


def test_what_is_told_again_changes_nothing():
    """Every new connection hears it all once more, and the ages have grown meanwhile."""
    assert take(START, END, START, END) == take(START, END)


def test_a_real_end_corrects_one_that_was_only_noticed():
    noticed = {**END, "code": 137, "killed": True}
    assert take(START, noticed)[0].is_cut_off
    assert not take(START, noticed)[0].with_container
    assert take(START, {**noticed, "container": True})[0].with_container
    assert take(START, {**noticed, "container": True}, noticed)[0].with_container, "a new agent has not seen it"
    assert not take(START, {**END, "container": True})[0].with_container, "it ended before its container"
    (after,) = take(START, noticed, END)
    assert (after.code, after.is_cut_off, after.ended_s) == (1, False, 99.0)


@pytest.mark.parametrize(
    "event",
    [
        None, [], "x", {}, {"kind": "start"}, {**START, "rank": "3"}, {**START, "rank": True}, {**START, "id": 5},
        {**START, "age_s": "1"}, {**START, "kind": "middle"}, {**END, "code": None}, {**END, "code": "1"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_passed_over(event):
    assert take(event) == []


def test_a_time_in_the_future_is_now():
    assert take({**START, "age_s": -1e9})[0].started_s == 100.0


def test_the_first_to_fail_is_the_first_by_time_and_by_itself():
    one = Rank("a", "0.1", 0, 0.0, 10.0, 143)
    two = Rank("b", "1.1", 1, 0.0, 10.3, 3)
    three = Rank("b", "2.1", 2, 0.0, 12.0, 1)
    fine = Rank("b", "3.1", 3, 0.0, 9.0, 0)
    assert first_failed([one, two, three, fine]) is two
    assert first_failed([one, three]) is one
    assert first_failed([three, two]) is two
    assert first_failed([fine, Rank("b", "4.1", 4, 0.0)]) is None


def test_a_world_has_succeeded_when_its_last_rank_has():
    ranks = [Rank("a", "0.1", 0, 0.0, 10.0, 0), Rank("b", "1.1", 1, 0.0, 12.0, 0)]
    assert have_succeeded(ranks, range(2)) == 12.0
    assert have_succeeded(ranks, range(3)) is None
    assert have_succeeded([], {0}) is None


def test_a_host_is_without_ranks_only_while_others_have_some():
    gone, runs = Rank("a", "0.1", 0, 0.0, 10.0, 1), Rank("b", "1.1", 1, 0.0)
    assert hosts_without_ranks([gone, runs], 10.0 + IDLE_S) == ["a"]
    assert hosts_without_ranks([gone, runs], 11.0) == [], "its ranks may be started again"
    assert hosts_without_ranks([gone], 100.0) == []
    assert hosts_without_ranks([gone, Rank("a", "0.2", 0, 11.0), runs], 100.0) == []


@given(st.lists(st.sampled_from([START, END, {**END, "code": 0}, {**START, "id": "4.1", "rank": 4}]), max_size=12))
def test_an_end_is_never_taken_back(events):
    known = {}
    for now_s, event in enumerate(events):
        before = dict(known)
        if rank := rank_in_event(known, "h", event, float(now_s)):
            known["h", rank.id] = rank
        for key, rank in before.items():
            assert rank.code is None or known[key].code is not None
            assert rank.ended_s is None or known[key].ended_s == rank.ended_s
