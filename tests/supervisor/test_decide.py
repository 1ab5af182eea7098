"""What is done next, from what has been seen: each rule by an example, and what holds whatever was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.jobs.record import CancelRequest
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.states import State
from gpurun.launch.output import Line
from gpurun.remote.agent import DEAD_AFTER_S, PING_AFTER_S
from gpurun.supervisor import verdicts
from gpurun.supervisor.causes import Cause
from gpurun.supervisor.decide import (
    EXPLAIN_S,
    FOLLOW_S,
    HOST_LOST_S,
    LINGER_S,
    LOG_SILENT_S,
    MUTE_S,
    PROOF_S,
    RETURN_S,
    SETTLE_S,
    Ask,
    Finish,
    LetGo,
    Lose,
    decide,
    end_from_outside,
)
from gpurun.supervisor.gang_seen import ContainerEnd, GangSeen
from gpurun.supervisor.ranks import Rank
from gpurun.supervisor.verdicts import by_launcher, with_cause, with_last_words

T = 1000.0
TWO, THREE = (tuple(Grant(host, (0,)) for host in hosts) for hosts in ("ab", "abc"))
GANG = GangSeen(now_s=T, members=TWO, launcher_line_s=T)
SPEC = JobSpec("n", "plain:1", 2, ("true",))
ELASTIC = replace(GANG, members=THREE, least=2)


def rank(number, host, code=None, ended_s=None, *, is_cut_off=False):
    ended_s = T - 60 if code is not None and ended_s is None else ended_s
    return Rank(host, f"{number}.7", number, T - 100, ended_s, code, is_cut_off)


def container(code=0, seen_s=T - 30, **what):
    return ContainerEnd(seen_s, code, **what)


def end_of(step):
    assert isinstance(step, Finish)
    return step.end


def test_a_gang_that_trains_is_left_alone():
    assert decide(GANG) is None
    assert decide(replace(GANG, ranks=[rank(0, "a"), rank(1, "b")])) is None
    assert decide(replace(GANG, ranks=[rank(0, "a", 0), rank(1, "b")])) is None, "one rank may be done before another"


# -- ranks speak for themselves ---------------------------------------------------------------------------


def test_the_first_rank_to_fail_is_named_though_the_launcher_waits_for_ever():
    seen = replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 37, T - SETTLE_S)])
    end = end_of(decide(seen))
    assert (end.outcome, end.exit_code, end.ladder) == (State.FAILED, 37, True)
    assert (end.failure.rank, end.failure.host, end.failure.kind) == (1, "b", "rank")
    assert decide(replace(seen, now_s=T - 0.5)) is None, "another host's word may be on its way"


def test_a_rank_that_the_launcher_broke_off_is_not_blamed_for_another_ones_failure():
    ranks = [rank(0, "a", 143, T - 9.9), rank(1, "b", 37, T - 9.6)]
    assert end_of(decide(replace(GANG, ranks=ranks))).failure.rank == 1


def test_a_rank_that_a_signal_ended_is_named():
    ranks = [rank(0, "a", 139, T - SETTLE_S), rank(1, "b")]
    assert end_of(decide(replace(GANG, ranks=ranks))).exit_code == 139


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


# -- the launcher -----------------------------------------------------------------------------------------


def test_without_a_word_from_ranks_the_launcher_is_believed():
    seen = replace(GANG, exits={"a": container(0)}, has_launchers_log=True)
    step = decide(seen)
    assert step.by_launcher
    assert by_launcher(seen, [], SPEC, ["a", "b"]).outcome is State.SUCCEEDED
    failed = replace(seen, exits={"a": container(1)})
    lines = [Line(None, "stderr", "Process name: 1"), Line(None, "stderr", "Exit code: 3")]
    end = by_launcher(failed, lines, SPEC, ["a", "b"])
    assert (end.failure.rank, end.failure.host, end.exit_code) == (1, "b", 3)


def test_a_launcher_that_says_0_while_a_rank_is_not_done_is_not_believed():
    """An engine that is stopped ends its containers, and says whatever it says of their code."""
    seen = replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 0)], exits={"a": container(0)}, has_launchers_log=True)
    end = by_launcher(seen, [], SPEC, ["a", "b"])
    assert (end.outcome, end.failure.host, end.ladder) == (State.FAILED, "a", True)
    killed = replace(seen, ranks=[rank(0, "a", 137, T - 40, is_cut_off=True), rank(1, "b", 0)])
    assert by_launcher(killed, [], SPEC, ["a", "b"]).outcome is State.FAILED


def test_a_launchers_log_is_waited_for_unless_nothing_more_of_it_can_come():
    seen = replace(GANG, exits={"a": container(1, T - 1)}, launcher_line_s=T - 1)
    assert decide(seen) is None
    assert decide(replace(seen, has_launchers_log=True)).by_launcher
    assert decide(replace(seen, now_s=T + LOG_SILENT_S)).by_launcher
    assert decide(replace(seen, exits={"a": container(1, T - 1, engine_out="gone")})).by_launcher


def test_a_rank_that_trains_on_after_a_failed_launcher_is_not_waited_for():
    """It may print for hours: its engine took the launcher, and nobody has told it."""
    seen = replace(
        GANG, ranks=[rank(0, "a", 143, T), rank(1, "b")], exits={"a": container(1, T)}, has_launchers_log=True
    )
    assert decide(seen) is None
    assert decide(replace(seen, now_s=T + SETTLE_S)).by_launcher


def test_a_rank_that_has_not_told_its_end_is_waited_for_if_the_launcher_says_0():
    seen = replace(GANG, ranks=[rank(0, "a", 0), rank(1, "b")], exits={"a": container(0, T)}, has_launchers_log=True)
    assert decide(replace(seen, now_s=T + SETTLE_S)) is None
    late = replace(seen, ranks=[rank(0, "a", 0), rank(1, "b", 0, T + 2)], now_s=T + 2)
    assert end_of(decide(late)).outcome is State.SUCCEEDED
    silent = replace(seen, now_s=T + DEAD_AFTER_S)
    assert decide(silent) is None, "its host may be silent without being known to be down"
    assert decide(replace(seen, now_s=T + PROOF_S)).by_launcher
    back = replace(seen, now_s=T + PROOF_S, heard_since_s=T + PROOF_S - 1)
    assert decide(back) is None, "the head was cut off, and hosts tell again from the beginning"


@pytest.mark.parametrize(
    ("found", "word", "code"),
    [
        (container(None, is_removed=True), "removed by somebody else", 4),
        (container(137, is_oom=True), "ran out of memory", 4),
        (container(None, engine_out="no such file"), "Docker engine has stopped", 4),
        (container(137), "ended (exit code 137)", 4),
        (container(1), "horovodrun failed with exit code 1", 1),
    ],
)
def test_a_launcher_that_did_not_end_by_itself_says_so(found, word, code):
    end = by_launcher(replace(GANG, exits={"a": found}), [], SPEC, ["a", "b"])
    assert word in end.reason
    assert end.code == code
    assert end.suspects == (("a",) if code == 4 else ())


def test_an_image_without_the_launcher_is_named():
    lines = [Line(None, "stderr", "/gpurun/bin/launch: horovodrun: not found")]
    end = by_launcher(replace(GANG, exits={"a": container(127)}), lines, SPEC, ["a", "b"])
    assert end.code == 2
    assert "plain:1" in end.reason


def test_a_launcher_that_names_a_rank_outside_the_world_is_no_traceback():
    lines = [Line(None, "stderr", "Process name: 99"), Line(None, "stderr", "Exit code: 1")]
    assert by_launcher(replace(GANG, exits={"a": container(1)}), lines, SPEC, ["a", "b"]).failure.host == "a"


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
    assert end_of(decide(replace(seen, now_s=T + SETTLE_S))).exit_code == 37


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
    assert end_of(decide(replace(GANG, hung="no rank has printed"))).failure.kind == "hang"
    assert decide(replace(GANG, hung="no rank has printed", down_since={"b": T - 1})) is None


def test_a_gang_that_is_ending_and_one_that_was_not_heard_do_not_hang():
    hung = replace(GANG, hung="no rank has printed")
    assert decide(replace(hung, exits={"b": container(1, T)})) is None, "its end is judged when hosts had time to tell"
    assert decide(replace(hung, ranks=[rank(0, "a", 143, T - 1), rank(1, "b")])) is None
    assert decide(replace(hung, heard_since_s=T - 1)) is None, "what it printed meanwhile is still on its way"
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
    assert with_cause(verdicts.SUCCEEDED, lost, gone) == verdicts.SUCCEEDED, "a success needs no explanation"


def test_the_last_words_are_those_of_the_rank_that_failed():
    seen = replace(GANG, ranks=[rank(0, "a"), rank(1, "b", 1)])
    lines = [Line(1, "stderr", "ValueError: x"), Line(None, "stderr", "launcher"), Line(0, "stdout", "step 3")]
    assert with_last_words(end_of(decide(seen)), lines).failure.excerpt == ("ValueError: x",)


# -- without a launcher -----------------------------------------------------------------------------------

DIRECT = replace(GANG, has_launcher=False)


def test_where_gpurun_starts_the_ranks_a_success_waits_for_no_container():
    done = [rank(0, "a", 0, T), rank(1, "b", 0, T)]
    assert decide(replace(DIRECT, ranks=done)).end.outcome is State.SUCCEEDED
    assert decide(replace(GANG, ranks=done)) is None, "a launcher has its time"


@pytest.mark.parametrize("host", ["a", "b"])
def test_no_container_ends_by_itself_where_gpurun_starts_the_ranks(host):
    """Also with 0: it stays until somebody ends it."""
    fell = replace(DIRECT, exits={host: container(0, T - 5)}, ranks=[rank(0, "a"), rank(1, "b")])
    end = end_of(decide(fell))
    assert (end.outcome, end.suspects) == (State.FAILED, (host,))


def test_a_rank_that_failed_before_the_first_container_fell_is_to_blame():
    ranks = [rank(0, "a", 3, T - 9), rank(1, "b")]
    seen = replace(DIRECT, exits={"a": container(137, T - 5)}, ranks=ranks)
    assert end_of(decide(seen)).failure.rank == 0


# -- elastic ----------------------------------------------------------------------------------------------


def test_an_elastic_gang_goes_on_without_a_host_as_long_as_enough_are_left():
    seen = replace(ELASTIC, exits={"c": container(1)})
    assert decide(seen).failures.keys() == {"c"}
    assert decide(replace(ELASTIC, down_since={"b": T - 60})).failures.keys() == {"b"}
    idle = [rank(0, "a"), rank(1, "b", 1, T - 60), rank(2, "c")]
    assert decide(replace(ELASTIC, ranks=idle)).failures.keys() == {"b"}
    two = replace(ELASTIC, exits={"b": container(1), "c": container(1)})
    assert isinstance(decide(two), Finish)
    first = replace(ELASTIC, exits={"a": container(1)}, has_launchers_log=True)
    assert decide(first).by_launcher, "the launcher's host cannot be lost"


def test_an_elastic_gang_lets_go_of_hosts_that_are_drained_as_long_as_enough_are_left():
    assert decide(replace(ELASTIC, drained=["c"])) == LetGo(["c"])
    assert decide(replace(ELASTIC, drained=["b", "c"])) is None, "it is asked to move as a whole"
    assert decide(replace(ELASTIC, drained=["a"])) is None
    assert decide(replace(ELASTIC, drained=["z"])) is None


def test_who_follows_lets_nobody_go_and_believes_no_launcher_before_hosts_have_told_what_they_know():
    new = {"heard_since_s": T - FOLLOW_S + 0.5}
    assert decide(replace(ELASTIC, drained=["c"], **new)) is None, "its ranks may have returned 0"
    seen = replace(GANG, ranks=[rank(0, "a", 0), rank(1, "b")], exits={"a": container(1)}, has_launchers_log=True)
    assert isinstance(decide(seen), Finish)
    assert decide(replace(seen, **new)) is None


def test_a_drained_host_whose_ranks_have_returned_0_stays_as_the_proof_of_a_success():
    seen = replace(ELASTIC, drained=["c"], ranks=[rank(0, "a"), rank(1, "b"), rank(2, "c", 0)])
    assert decide(seen) is None
    assert decide(replace(seen, drained=["b", "c"], least=1)) == LetGo(["b"])
    assert decide(replace(seen, ranks=[rank(0, "a"), rank(2, "c", 1, T - 1)])) == LetGo(["c"])


@pytest.mark.parametrize("gang", [GANG, ELASTIC])
def test_hardware_that_fails_after_its_ranks_have_returned_0_undoes_nothing(gang):
    lost = Cause(T, "b", "gpu-lost", "the GPU is lost", "", "hardware", fatal=True)
    seen = replace(gang, fatal=lost, ranks=[rank(0, "a"), rank(1, "b")])
    assert decide(seen) is not None
    assert decide(replace(seen, heard_since_s=T - 1)) is None, "its host has not told of its ranks yet"
    assert decide(replace(seen, ranks=[rank(0, "a"), rank(1, "b", 0)])) is None


def test_a_host_whose_ranks_have_returned_0_does_not_leave_while_the_others_save():
    done = [rank(0, "a"), rank(1, "b", 0, T - 60), rank(2, "c")]
    assert decide(replace(ELASTIC, ranks=done)) is None


def test_an_elastic_gang_whose_launcher_did_not_end_by_itself_has_not_succeeded():
    """An engine that stops its containers may say 0 of them."""
    gone = replace(ELASTIC, exits={"a": container(0, engine_out="no such socket")})
    assert by_launcher(gone, [], SPEC, ["a", "b", "c"]).suspects == ("a",)
    cut = replace(ELASTIC, exits={"a": container(0)}, ranks=[rank(0, "a", 137, is_cut_off=True), rank(1, "b")])
    assert by_launcher(cut, [], SPEC, ["a", "b", "c"]).outcome is State.FAILED
    done = replace(cut, ranks=[rank(0, "a", 0), rank(1, "b", 0)])
    assert by_launcher(done, [], SPEC, ["a", "b", "c"]).outcome is State.SUCCEEDED


@pytest.mark.parametrize(
    ("broken_off", "outcome"),
    [
        (rank(0, "a", 143, T - 1), State.FAILED),  # an engine ended the launcher, and what ran beside it
        (rank(0, "a", 143, T - 60), State.SUCCEEDED),  # the others went on for a minute
        (rank(0, "a", 3, T - 1), State.SUCCEEDED),
        (rank(2, "c", 143, T - 1), State.SUCCEEDED),
    ],
)
def test_an_elastic_launchers_0_is_not_believed_when_something_broke_off_the_ranks_beside_it(broken_off, outcome):
    seen = replace(ELASTIC, exits={"a": container(0, T)}, ranks=[broken_off, rank(1, "b", 0, T - 1)])
    assert by_launcher(seen, [], SPEC, ["a", "b", "c"]).outcome is outcome


@pytest.mark.parametrize("what", [{"limit_s": 60.0}, {"request": CancelRequest(by="x", asked_s=1.0, kind="preempt")}])
def test_nothing_undoes_the_work_of_ranks_that_have_all_returned_0(what):
    seen = replace(GANG, ranks=[rank(0, "a", 0, T - 1), rank(1, "b", 0, T - 1)], **what)
    assert end_of(decide(seen)).outcome is State.SUCCEEDED


def test_a_supervisor_that_follows_another_one_hears_of_all_hosts_before_it_blames_a_rank():
    seen = replace(GANG, ranks=[rank(0, "a", 1, T - 60), rank(1, "b")], heard_since_s=T - 0.3)
    assert decide(seen) is None
    assert end_of(decide(replace(seen, now_s=T + SETTLE_S))).failure.rank == 0


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
    return GangSeen(
        now_s=T, members=THREE, least=draw(st.sampled_from([None, 1, 2])),
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
    """A rank failed, or all have ended, or a container has: some seconds later there is an end."""
    later = replace(seen, now_s=T + 1000)
    has_ended = any(rank.code for rank in seen.ranks) and seen.least is None
    if has_ended or seen.exits:
        step = decide(later)
        assert step is not None


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
