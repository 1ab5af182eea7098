"""What is decided by a supervisor that follows another one, and by a head that was cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import ELASTIC, GANG, SPEC, T, container, end_of, rank

from gpurun.jobs.record import CancelRequest, State
from gpurun.launch.output import Line
from gpurun.remote.agent import PING_AFTER_S
from gpurun.supervisor.verdict.decide import (
    EXPLAIN_S,
    FOLLOW_S,
    HOST_LOST_S,
    MUTE_S,
    RETURN_S,
    SETTLE_S,
    Finish,
    Lose,
    by_launcher,
    decide,
    end_from_outside,
)


def test_a_supervisor_that_follows_another_one_hears_of_all_hosts_before_it_blames_a_rank():
    seen = replace(GANG, ranks=[rank(0, "a", 1, T - 60), rank(1, "b")], heard_since_s=T - SETTLE_S)
    assert decide(seen) is None, "rank 1 has begun, and its end may be under way"
    assert end_of(decide(replace(seen, now_s=T + FOLLOW_S))).failure.rank == 0
    both = replace(seen, ranks=[rank(0, "a", 1, T - 60), rank(1, "b", 1, T - 61)])
    assert end_of(decide(both)).failure.rank == 1


@pytest.mark.parametrize("what", [{"ranks": [rank(0, "a", 1, T - 70)]}, {"exits": {"a": container(None, T - 70)}}])
def test_a_head_that_was_cut_off_names_no_cause_before_its_hosts_had_time_to_be_reached_again(what):
    seen = replace(GANG, **what, down_since={"b": T - 60}, heard_since_s=T - 1)
    assert decide(seen) is None
    assert isinstance(decide(replace(seen, now_s=T + RETURN_S)), Finish)


def test_an_elastic_gang_whose_launcher_has_ended_loses_no_host():
    ended = {"a": container(0), "c": container(1, T - 1)}
    seen = replace(ELASTIC, exits=ended, ranks=[rank(number, host, 0) for number, host in enumerate("abc")])
    assert decide(replace(seen, has_launchers_log=True)).by_launcher


def test_a_host_whose_ranks_have_returned_0_stays_as_the_proof_though_its_container_ends():
    seen = replace(ELASTIC, exits={"c": container(1)}, ranks=[rank(0, "a"), rank(1, "b"), rank(2, "c", 0)])
    assert not isinstance(decide(seen), Lose)
    assert not isinstance(decide(replace(seen, exits={}, down_since={"c": T - 60})), Lose)


def test_a_launcher_that_returned_0_is_not_blamed_for_a_host_that_nobody_can_ask():
    seen = replace(ELASTIC, exits={"a": container(0)}, ranks=[rank(0, "a", 1)], down_since={"c": T - 60})
    assert by_launcher(seen, [], SPEC, ["a", "b", "c"]).suspects == ("c",)


def test_a_rank_is_not_named_while_a_host_that_may_have_more_to_tell_is_down():
    seen = replace(GANG, ranks=[rank(0, "a", 1, T - 60), rank(1, "b")], down_since={"b": T - 5})
    assert decide(seen) is None
    assert end_of(decide(replace(seen, now_s=T + HOST_LOST_S))).failure.rank == 0, "a lost host tells nothing more"


def test_a_head_that_was_cut_off_gives_its_hosts_time_to_be_reached_again():
    one = replace(GANG, down_since={"b": T - 60}, heard_since_s=T - 1)
    assert decide(one) is None
    assert end_of(decide(replace(one, now_s=T + RETURN_S))).suspects == ("b",)
    both = replace(one, down_since=dict.fromkeys("ab", T - 60), others_answer=True)
    assert decide(both) is None
    elastic = replace(ELASTIC, down_since={"c": T - 60}, heard_since_s=T - 1)
    assert decide(elastic) is None
    assert isinstance(decide(replace(elastic, now_s=T + RETURN_S)), Lose)


def test_a_new_supervisor_gives_a_mute_host_as_long_to_answer_as_one_that_heard_it():
    assert MUTE_S == HOST_LOST_S - PING_AFTER_S, "a host that is heard is asked after some silence, and lost later"
    begun = {"heard_since_s": T - 6, "down_since": {"c": T - 11}}
    mute = replace(ELASTIC, **begun, mute_since={"c": T - MUTE_S})
    assert decide(mute) is None
    assert list(decide(replace(mute, now_s=T + 0.1)).failures) == ["c"]
    ended = end_of(decide(replace(GANG, now_s=T + 0.1, down_since={"b": T - 11}, mute_since={"b": T - MUTE_S})))
    assert ended.suspects == ("b",)


def test_a_host_that_is_slow_while_a_new_supervisor_begins_is_not_lost():
    """It accepts connections, so it is not mute, or its agent runs, so it is not down."""
    slow = replace(ELASTIC, heard_since_s=T - 6, down_since={"c": T - 13})
    assert decide(slow) is None
    assert decide(replace(slow, mute_since={"b": T - 60}, down_since={})) is None


def test_a_host_is_not_mute_for_as_long_as_the_head_is_cut_off():
    mute = replace(ELASTIC, heard_since_s=T - 9, cut_off_s=T - 9, down_since={"c": T - 11}, mute_since={"c": T - 30})
    assert decide(mute) is None
    assert isinstance(decide(replace(mute, now_s=T + 2)), Lose)
    alone = replace(mute, now_s=T + 2, down_since=dict.fromkeys("abc", T - 11), others_answer=False)
    assert decide(alone) is None


def test_a_mute_host_that_has_left_is_not_lost_again():
    assert decide(replace(ELASTIC, mute_since={"z": T - 60}, down_since={"z": T - 60})) is None


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        ({"request": CancelRequest(by="x", asked_s=1.0, kind="cancel")}, State.CANCELLED),
        ({"limit_s": 60.0}, State.TIMED_OUT),
    ],
)
def test_a_head_that_is_cut_off_puts_off_what_it_cannot_explain_and_carries_out_what_was_asked(what, outcome):
    seen = replace(GANG, ranks=[rank(0, "a", 1, T - 60), rank(1, "b")], down_since=dict.fromkeys("ab", T - 9))
    assert end_from_outside(seen) is None
    assert end_from_outside(replace(seen, **what)).outcome is outcome


def test_a_rank_that_failed_after_a_container_had_ended_is_not_to_blame():
    ranks = [rank(0, "a", 1, T - 60), rank(1, "b", 137, T - 1, is_cut_off=True)]
    seen = replace(GANG, ranks=ranks, exits={"b": container(137, T - 1, is_oom=True, ended_ago_s=62.0)})
    assert end_of(decide(replace(seen, now_s=T + EXPLAIN_S))).suspects == ("b",)


def test_a_rank_that_was_killed_is_not_named_while_another_tells_nothing_and_the_launcher_may_know():
    """It may have removed its own report, and failed first."""
    seen = replace(GANG, ranks=[rank(0, "a", 137, T - 6)])
    assert decide(seen) is None
    lines = [Line(None, "stderr", "Process name: 1"), Line(None, "stderr", "Exit code: 5")]
    ended = replace(seen, exits={"a": container(1, T)}, has_launchers_log=True)
    assert by_launcher(ended, lines, SPEC, ["a", "b"]).failure.rank == 1
    assert end_of(decide(replace(seen, now_s=T + 60))).failure.rank == 0, "nobody waits for ever"
