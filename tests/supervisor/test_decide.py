"""What is done next, from what has been seen: each rule by an example, and what holds whatever was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import ELASTIC, GANG, SPEC, THREE, T, container, end_of, rank
from hypothesis import given
from hypothesis import strategies as st

from gpurun.jobs.record import CancelRequest, State
from gpurun.launch.output import Line
from gpurun.supervisor.verdict.causes import Cause
from gpurun.supervisor.verdict.decide import (
    EXPLAIN_S,
    FOLLOW_S,
    HOST_LOST_S,
    LINGER_S,
    RETURN_S,
    SETTLE_S,
    SUCCEEDED,
    Ask,
    ContainerEnd,
    Finish,
    GangSeen,
    Lose,
    by_launcher,
    decide,
    with_cause,
    with_last_words,
)
from gpurun.supervisor.verdict.ends import Rank
from gpurun.supervisor.verdict.hang import Hang


def test_a_gang_that_trains_is_left_alone():
    assert decide(GANG) is None
    assert decide(replace(GANG, ranks=[rank(0, "a"), rank(1, "b")])) is None
    assert decide(replace(GANG, ranks=[rank(0, "a", 0), rank(1, "b")])) is None, "one rank may be done before another"


# -- ranks speak for themselves ---------------------------------------------------------------------------


def test_the_first_rank_to_fail_is_named_though_the_launcher_waits_for_ever():
    seen = replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 37, T - SETTLE_S)])
    end = end_of(decide(seen))
    assert (end.outcome, end.failure.exit_code, end.ladder) == (State.FAILED, 37, True)
    assert (end.failure.rank, end.failure.host, end.failure.kind) == (1, "b", "rank")
    assert decide(replace(seen, now_s=T - 0.5)) is None, "another host's word may be on its way"


def test_a_rank_that_the_launcher_broke_off_is_not_blamed_for_another_ones_failure():
    ranks = [rank(0, "a", 143, T - 9.9), rank(1, "b", 37, T - 9.6)]
    assert end_of(decide(replace(GANG, ranks=ranks))).failure.rank == 1


def test_a_rank_that_a_signal_ended_is_named():
    ranks = [rank(0, "a", 139, T - SETTLE_S), rank(1, "b")]
    assert end_of(decide(replace(GANG, ranks=ranks))).failure.exit_code == 139


@pytest.mark.parametrize("broken", [rank(1, "b", 143, T - 2), rank(1, "b", 137, T - 2, is_cut_off=True)])
def test_what_broke_a_rank_off_may_take_a_moment_to_show_itself(broken):
    seen = replace(GANG, ranks=[rank(0, "a"), broken])
    assert decide(seen) is None
    assert end_of(decide(replace(seen, now_s=T + EXPLAIN_S))).failure.rank == 1


def test_all_ranks_that_return_0_are_a_success_whatever_the_launcher_does():
    ranks = [rank(0, "a", 0, T - LINGER_S), rank(1, "b", 0, T - 8)]
    assert end_of(decide(replace(GANG, ranks=ranks))).outcome is State.SUCCEEDED
    assert decide(replace(GANG, ranks=ranks, now_s=T - 1)) is None, "the launcher may still say something"
    for code in (1, 137, None):
        seen = replace(GANG, ranks=ranks, exits={"a": container(code)}, has_launchers_log=True, now_s=T - 1)
        assert end_of(decide(seen)).outcome is State.SUCCEEDED


def test_a_success_needs_every_rank():
    ranks = [rank(0, "a", 0), Rank("a", "0.9", 0, T - 50, T - 40, 0)]
    assert decide(replace(GANG, ranks=ranks)) is None


def test_ranks_of_an_elastic_gang_come_and_go():
    assert decide(replace(ELASTIC, ranks=[rank(0, "a"), rank(1, "b", 1, T - 5), rank(2, "c")])) is None


def test_a_new_supervisor_names_no_rank_before_every_host_had_time_to_tell_of_its_own():
    seen = replace(GANG, ranks=[rank(0, "a", 1, T - 9)], heard_since_s=T)
    assert decide(replace(seen, now_s=T + 2)) is None
    assert end_of(decide(replace(seen, now_s=T + 4.1))).failure.rank == 0
    all_told = replace(seen, now_s=T + 2, ranks=[*seen.ranks, rank(1, "b", 3, T - 15)])
    assert end_of(decide(all_told)).failure.rank == 1, "nobody else can have failed before"


# -- containers -------------------------------------------------------------------------------------------


def test_a_workers_container_that_ends_is_the_cause_and_its_host_the_suspect():
    seen = replace(GANG, exits={"b": container(1, T)})
    assert decide(seen) is None, "other hosts may tell of the same thing"
    for later in (
        replace(seen, now_s=T + EXPLAIN_S),
        replace(seen, exits={"b": container(1, T - 1), "a": container(1, T)}, has_launchers_log=True),
    ):
        end = end_of(decide(later))
        assert (end.outcome, end.suspects, end.failure.kind) == (State.FAILED, ("b",), "container")
        assert not decide(later).is_explained


def test_a_launcher_that_fell_with_a_workers_container_does_not_hide_it():
    ranks = [rank(0, "a", 143, T - 0.4), rank(1, "b", 137, T - 0.9, is_cut_off=True)]
    exits = {"b": container(137, T - 0.9), "a": container(137, T - 0.3)}
    seen = replace(GANG, ranks=ranks, exits=exits, has_launchers_log=True)
    assert decide(seen) is None, "other hosts may tell of the same thing"
    assert end_of(decide(replace(seen, now_s=T + SETTLE_S))).suspects == ("b",)


def test_containers_count_by_when_they_ended_and_not_by_when_that_was_heard():
    """A supervisor that follows another one hears of all ends at once, in any order."""
    exits = {"a": container(137, T - 1.2, ended_ago_s=30.0), "b": container(1, T - 1.1, ended_ago_s=40.0)}
    ranks = [rank(0, "a", 137, T - 31, is_cut_off=True), rank(1, "b", 137, T - 1.1, is_cut_off=True)]
    seen = replace(GANG, ranks=ranks, exits=exits, has_launchers_log=True)
    assert end_of(decide(seen)).suspects == ("b",)
    follower = replace(seen, exits={"a": exits["a"]}, heard_since_s=T - 0.5)
    assert decide(follower) is None, "b's container may have ended before"
    assert decide(replace(follower, now_s=T + FOLLOW_S)).by_launcher


@pytest.mark.parametrize("later_s", [-0.4, 0.4])
def test_a_launcher_that_ended_in_the_same_moment_does_not_hide_a_workers_container(later_s):
    """Times come from two hosts, and answers travel."""
    ranks = [rank(0, "a", 1, T - 2), rank(1, "b", 137, T - 2, is_cut_off=True)]
    exits = {"b": container(137, T - 1.5, ended_ago_s=0.5), "a": container(1, T - 1.5 + later_s, ended_ago_s=0.5)}
    seen = replace(GANG, ranks=ranks, exits=exits, has_launchers_log=True)
    assert end_of(decide(seen)).suspects == ("b",)


@pytest.mark.parametrize("host", ["a", "b"])
@pytest.mark.parametrize("other", [rank(9, "x", 143, T), rank(9, "x", 1, T + 0.3)], ids=["broken off", "in its wake"])
def test_a_rank_that_fell_with_its_container_tells_of_it_while_docker_is_silent(host, other):
    """The launcher may have ended, and all it said is here."""
    if host == "a" and other.code == 1:
        other = other._replace(ended_s=T + 1.0)  # a launcher that fails ends the ranks beside it
    fell = rank(0, host, 137, T, is_cut_off=True)._replace(with_container=True)
    other = other._replace(host="b" if host == "a" else "a")
    seen = replace(GANG, ranks=[fell, other], has_launchers_log=True, now_s=T + EXPLAIN_S - 0.1)
    if host == "b":
        seen = replace(seen, exits={"a": container(1, T + 0.4)})
    assert decide(seen) is None, "Docker may say that it was short of memory"
    end = end_of(decide(replace(seen, now_s=T + EXPLAIN_S)))
    assert (end.suspects, end.failure.kind, end.code) == ((host,), "container", 4)
    told = {**seen.exits, host: container(137, T + 4, is_oom=True, ended_ago_s=4.0)}
    step = decide(replace(seen, exits=told, now_s=T + EXPLAIN_S + 1))
    assert step.by_launcher if host == "a" else end_of(step).failure.kind == "oom"


def test_a_rank_that_failed_before_its_launcher_ended_is_named_though_others_fell_with_the_container():
    fell = rank(1, "a", 137, T, is_cut_off=True)._replace(with_container=True)
    seen = replace(GANG, ranks=[rank(0, "a", 37, T - 0.3), fell], has_launchers_log=True)
    assert end_of(decide(replace(seen, now_s=T + SETTLE_S))).failure.exit_code == 37


def test_ranks_that_ended_with_their_container_are_not_the_cause():
    ranks = [rank(0, "a", 143, T - 1), rank(1, "b", 137, T - 2, is_cut_off=True)]
    seen = replace(GANG, ranks=ranks, exits={"b": container(137, T - 1.5)}, now_s=T + 20)
    assert end_of(decide(seen)).suspects == ("b",)


# -- from outside -----------------------------------------------------------------------------------------


def test_a_host_that_is_silent_for_long_ends_the_gang_unless_the_head_is_cut_off():
    one = replace(GANG, down_since={"b": T - HOST_LOST_S - 1})
    end = end_of(decide(one))
    assert (end.suspects, end.failure.kind, end.ladder) == (("b",), "host-lost", True)
    assert decide(replace(one, down_since={"b": T - 1})) is None
    both = replace(GANG, down_since=dict.fromkeys("ab", T - 100))
    assert isinstance(decide(both), Ask)
    assert decide(replace(both, others_answer=False)) is None
    assert end_of(decide(replace(both, others_answer=True))).suspects == ("a", "b")


def test_requests_limits_and_hangs_end_a_gang():
    cancel = CancelRequest(by="alice", asked_s=1.0, kind="cancel")
    assert end_of(decide(replace(GANG, request=cancel))).outcome is State.CANCELLED
    preempt = CancelRequest(by="x", asked_s=1.0, kind="preempt", reason="j-2 goes first")
    assert end_of(decide(replace(GANG, request=preempt))).outcome is State.QUEUED
    assert end_of(decide(replace(GANG, limit_s=60.0))).outcome is State.TIMED_OUT
    assert end_of(decide(replace(GANG, hung=Hang("no rank has printed")))).failure.kind == "hang"
    assert decide(replace(GANG, hung=Hang("no rank has printed"), down_since={"b": T - 1})) is None


def test_a_gang_that_is_ending_and_one_that_was_not_heard_do_not_hang():
    hung = replace(GANG, hung=Hang("no rank has printed"))
    assert decide(replace(hung, exits={"b": container(1, T)})) is None, "its end is judged when hosts had time to tell"
    assert decide(replace(hung, ranks=[rank(0, "a", 143, T - 1), rank(1, "b")])) is None
    assert decide(replace(hung, heard_since_s=T - 1)) is None, "what it printed meanwhile is still on its way"
    alone = end_of(decide(replace(hung, ranks=[rank(0, "a"), rank(1, "b", 0, T - 1)])))
    assert alone.reason.endswith("; 1 of 2 ranks have already returned 0, including rank 1"), "it never joined, say"
    elastic = replace(hung, members=THREE, least=2, ranks=[rank(0, "a"), rank(1, "b", 1, T - 1), rank(2, "c")])
    assert end_of(decide(elastic)).failure.kind == "hang", "no rank's failure ends an elastic gang"


def test_what_a_host_saw_ends_the_gang_and_explains_a_failure():
    lost = Cause(T, "b", "xid", "Xid 79: off the bus", "NVRM: Xid 79", "hardware", fatal=True, gpu=0, rank=1)
    end = end_of(decide(replace(GANG, fatal=lost)))
    assert (end.suspects, end.failure.rank) == (("b",), 1)
    failed = by_launcher(replace(GANG, exits={"a": container(1)}), [], SPEC, ["a", "b"])
    assert with_cause(failed, lost, []).suspects == ("b",)
    gone = [Cause(T, host, "engine", "stopped", "", "host") for host in "ab"]
    assert with_cause(failed, None, gone).suspects == ("a", "b")
    assert with_cause(SUCCEEDED, lost, gone) == SUCCEEDED, "a success needs no explanation"


def test_the_last_words_are_those_of_the_rank_that_failed():
    seen = replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 1)])
    lines = [Line(1, "stderr", "ValueError: x"), Line(None, "stderr", "launcher"), Line(0, "stdout", "step 3")]
    assert with_last_words(end_of(decide(seen)), lines, SPEC).failure.excerpt == ("ValueError: x",)


@pytest.mark.parametrize(
    "said",
    ["/gpurun/bin/rank: exec: line 144: {}: not found", "/gpurun/bin/rank: 144: exec: {}: not found",
     "/gpurun/bin/rank: line 144: exec: {}: not found", "sh: 1: exec: {}: not found"],
    ids=["busybox", "dash", "bash", "a shell between"],
)  # fmt: skip
def test_a_command_that_the_image_lacks_is_named(said):
    command = "./it's; true"
    spec = replace(SPEC, command=(command, "train.py"))
    end = end_of(decide(replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 127)])))
    named = with_last_words(end, [Line(1, "stderr", said.format(command))], spec)
    assert (named.code, named.failure.exit_code, named.failure.rank) == (2, 127, 1)
    assert named.reason == named.failure.reason == f"the image {spec.image} has no {command}: {end.reason}"
    for other in (said.format("true"), f"train.py: {command}: not found", "", said.format(command) + " yet"):
        assert with_last_words(end, [Line(1, "stderr", other)], spec).reason == end.reason
    named = with_last_words(end, [Line(1, "stderr", said.format("python"))], replace(spec, command=("python", "t.py")))
    assert f"has no python (most images have python3, so write python3): {end.reason}" in named.reason
    named = with_last_words(end, [Line(1, "stderr", said.format("time"))], replace(spec, command=("time", "a", "-b")))
    assert f"has no time (time is a keyword of bash, so write bash -c 'time a -b'): {end.reason}" in named.reason
    ran = end_of(decide(replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 1)])))
    assert with_last_words(ran, [Line(1, "stderr", said.format(command))], spec).reason == ran.reason


# -- whatever was seen ------------------------------------------------------------------------------------

times = st.integers(int(T) - 100, int(T))
codes = st.sampled_from([None, 0, 1, 37, 137, 143])
containers = st.builds(
    ContainerEnd, times, codes, is_oom=st.booleans(), is_removed=st.booleans(), engine_out=st.sampled_from(["", "out"])
)
hosts = st.sampled_from("abc")
fates = st.sampled_from([(False, False), (True, False), (True, True)])


@st.composite
def anything(draw):
    ranks = []
    for number, host in enumerate("abc"):
        code = draw(codes)
        fate = draw(fates) if code is not None else (False, False)
        ranks.append(Rank(host, f"{number}.1", number, T - 100, None if code is None else draw(times), code, *fate))
    least = draw(st.sampled_from([None, 1, 2]))
    return GangSeen(
        now_s=T, members=THREE, least=least, has_launcher=least is not None or draw(st.booleans()),
        ranks=draw(st.lists(st.sampled_from(ranks), unique=True)),
        exits=draw(st.dictionaries(hosts, containers)), down_since=draw(st.dictionaries(hosts, times)),
        mute_since=draw(st.dictionaries(hosts, times)),
        others_answer=draw(st.sampled_from([None, True, False])), has_launchers_log=draw(st.booleans()),
        launcher_line_s=draw(times),
    )  # fmt: skip


@given(anything())
def test_a_gang_never_succeeds_without_a_proof(seen):
    """No rank failed or is missing, or no rank ever told anything and the launcher said 0."""
    step = decide(seen)
    if not isinstance(step, Finish):
        return
    end = by_launcher(seen, [], SPEC, ["a", "b", "c"]) if step.by_launcher else step.end
    if end.outcome is State.SUCCEEDED and seen.least is None:
        assert not any(rank.code for rank in seen.ranks) or {r.rank for r in seen.ranks if r.code == 0} == {0, 1, 2}
        assert seen.exits.get("a", container()).code == 0 or len(seen.ranks) == 3


@given(anything())
def test_a_gang_that_has_ended_is_not_waited_for_for_ever(seen):
    """A rank failed, or all have ended, or a container has: some seconds later there is an end.

    While the head hears nobody there is none: it could end nothing, and hosts may have more to tell.
    """
    is_cut_off = len(seen.down_since) == len(seen.hosts) and seen.others_answer is False
    later = replace(seen, now_s=T + 1000, others_answer=True if is_cut_off else seen.others_answer)
    has_ended = any(rank.code for rank in seen.ranks) and seen.least is None
    has_ended |= seen.least is not None and bool(seen.ranks) and all(rank.code is not None for rank in seen.ranks)
    if has_ended or seen.exits.keys() - seen.finished:
        assert decide(later) is not None


@given(anything(), st.integers(0, 100))
def test_the_same_is_decided_for_the_same(seen, shift_s):
    def moved(at_s):
        return None if at_s is None else at_s + shift_s

    shifted = replace(
        seen, now_s=seen.now_s + shift_s, launcher_line_s=seen.launcher_line_s + shift_s,
        ranks=[r._replace(started_s=r.started_s + shift_s, ended_s=moved(r.ended_s)) for r in seen.ranks],
        exits={h: replace(e, seen_s=e.seen_s + shift_s) for h, e in seen.exits.items()},
        down_since={h: s + shift_s for h, s in seen.down_since.items()},
        mute_since={h: s + shift_s for h, s in seen.mute_since.items()},
    )  # fmt: skip
    kinds = [type(decide(each)) for each in (seen, shifted)]
    assert kinds[0] is kinds[1]


def test_hosts_that_have_left_are_not_lost_again():
    assert decide(replace(ELASTIC, exits={"z": container(1)}, down_since={"z": T - 100})) is None
    assert not isinstance(decide(replace(ELASTIC, ranks=[rank(0, "a"), rank(1, "z", 1)])), Lose)


def test_a_container_that_ends_after_its_ranks_have_returned_0_ends_no_gang():
    done = [rank(0, "a"), rank(1, "b", 0, T - 9), rank(2, "c")]
    seen = replace(ELASTIC, least=None, ranks=done, exits={"b": container(137)})
    assert decide(seen) is None
    assert decide(replace(seen, exits={"b": container(137), "c": container(137)})).end.suspects == ("c",)
    assert decide(replace(seen, ranks=[rank(0, "a"), rank(1, "b"), rank(2, "c")])).end.suspects == ("b",)


def test_a_container_that_ended_after_its_ranks_had_returned_0_hides_no_rank_that_fails_later():
    """The gang was never ended: its other ranks waited for the failed one."""
    ranks = [rank(0, "a"), rank(1, "b", 0, T - 20), rank(2, "c", 1, T - 9)]
    seen = replace(GANG, members=THREE, has_launcher=False, ranks=ranks, exits={"b": container(137, T - 9)})
    assert end_of(decide(seen)).failure.rank == 2
    ranks[1] = rank(1, "b", 0, T - 9, is_cut_off=True)._replace(with_container=True)  # as no true host says
    assert end_of(decide(replace(seen, exits={}))).failure.rank == 2
    ranks[2] = rank(2, "c", 137, T - 9)
    assert end_of(decide(replace(seen, ranks=ranks))).failure.rank == 2


def test_a_host_that_is_back_has_its_time_to_tell_before_anybody_is_named():
    """Its container ended while it was out of reach, and with it the ranks whose end another host tells."""
    seen = replace(
        GANG, ranks=[rank(0, "a", 1, T - 9), rank(1, "b")], exits={"a": container(1)}, has_launchers_log=True
    )
    assert isinstance(decide(seen), Finish)
    assert decide(replace(seen, returned_s=T - 1)) is None
    assert isinstance(decide(replace(seen, returned_s=T - FOLLOW_S)), Finish)
    assert isinstance(decide(replace(seen, returned_s=T - 1, request=CancelRequest("cancel", "me", 1.0))), Finish)


def test_a_host_is_lost_when_it_was_not_heard_for_long_since_the_head_is_back():
    """The head was cut off for a minute, and a cable is pulled for some seconds just when it is back."""
    back_s = T - 2 * RETURN_S
    seen = replace(ELASTIC, down_since={"c": T - 60}, cut_off_s=back_s, heard_since_s=back_s)
    assert decide(replace(seen, now_s=back_s + HOST_LOST_S)) is None
    assert decide(replace(seen, now_s=back_s + HOST_LOST_S + 0.1)).failures.keys() == {"c"}
