"""What an elastic gang goes on without, and when it has succeeded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import ELASTIC, GANG, SPEC, T, container, end_of, rank

from gpurun.jobs.record import CancelRequest, FirstFailure, State
from gpurun.supervisor.verdict.causes import Cause
from gpurun.supervisor.verdict.decide import (
    AFTERMATH_S,
    EXPLAIN_S,
    FOLLOW_S,
    FORSAKEN_S,
    Finish,
    LetGo,
    after_loss,
    by_launcher,
    decide,
    hosts_at_fault,
    rank_failed,
)
from gpurun.supervisor.verdict.ends import End


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


def test_an_elastic_gang_loses_a_host_whose_docker_does_not_say_that_its_container_is_gone():
    cut_off = rank(2, "c", 137, T - 1, is_cut_off=True)._replace(with_container=True)
    seen = replace(ELASTIC, ranks=[rank(0, "a"), rank(1, "b"), cut_off])
    assert decide(seen) is None, "Docker may know why"
    assert decide(replace(seen, now_s=T - 1 + EXPLAIN_S)).failures["c"].kind == "container"
    assert decide(replace(seen, exits={"c": container(137, is_oom=True)})).failures["c"].kind == "oom"


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


def test_the_launchers_host_stays_without_ranks_and_keeps_no_other_from_being_lost():
    failed = [rank(0, "a", 1, T - 60), rank(1, "b"), rank(2, "c")]
    assert decide(replace(ELASTIC, ranks=failed)) is None
    assert decide(replace(ELASTIC, ranks=failed, down_since={"c": T - 60})).failures.keys() == {"c"}


def test_who_follows_ends_no_gang_for_a_container_that_it_may_go_on_without():
    """The container was killed while nobody watched: its host is lost once the others have told of themselves."""
    for ended in ({"exits": {"c": container(137)}}, {"exits": {}, "ranks": [
        rank(0, "a"), rank(1, "b"), rank(2, "c", 137, T - 9, is_cut_off=True)._replace(with_container=True)
    ]}):  # fmt: skip
        seen = replace(ELASTIC, **ended)
        assert decide(replace(seen, heard_since_s=T - 2)) is None
        assert decide(replace(seen, heard_since_s=T - FOLLOW_S)).failures.keys() == {"c"}


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


def test_a_lost_host_is_the_cause_if_every_other_rank_fails_soon_after():
    """Horovod aborted all survivors of a lost host once, on a busy machine: the job FAILED, and is to start again."""
    lost = {"c": FirstFailure("the job's container ended", host="c", exit_code=137, kind="container")}
    end = rank_failed(None, "a", 134, who="a rank")
    found = after_loss(end, lost, 2.6, 60)
    assert (found.suspects, found.failure, found.code, found.failure.exit_code) == (("c",), lost["c"], 4, 137)
    assert found.reason == (
        "c: the job's container ended; then a rank on a failed first, with exit code 134 "
        "(SIGABRT: the program aborted, for example after a failed assertion)"
    )
    assert after_loss(end, lost, 61.3, 60) == found, "the last survivor waited until Gloo gave up"
    assert after_loss(end, lost, 60 + AFTERMATH_S + 1, 60) == end, "it has trained on without the host"
    assert after_loss(end, {}, 0.0, 60) == end
    idle = {
        "c": FirstFailure(
            "the ranks on this host have ended, but ranks on other hosts still run", host="c", kind="rank"
        )
    }
    assert hosts_at_fault({**lost, **idle}) == {} and hosts_at_fault(lost) == lost, "the program may have failed there"
    blamed = replace(end, suspects=("b",))
    assert after_loss(blamed, lost, 1.0, 60) == blamed, "another host's engine has stopped"
    for other in (End(State.SUCCEEDED, "", 0), End(State.CANCELLED, "", 1), End(State.QUEUED, "", 1)):
        assert after_loss(other, lost, 1.0, 60) == other


def test_an_elastic_gang_whose_ranks_have_all_ended_does_not_wait_for_its_driver_for_ever():
    over = replace(ELASTIC, ranks=[rank(0, "a", 0, T), rank(1, "b", 0, T - 5), rank(2, "c", 0, T - 9)])
    assert decide(replace(over, now_s=T + FORSAKEN_S - 1)) is None, "the driver may start others"
    assert end_of(decide(replace(over, now_s=T + FORSAKEN_S))).outcome is State.SUCCEEDED
    assert decide(replace(over, now_s=T + FORSAKEN_S, heard_since_s=T + 1)) is None
    failed = replace(over, ranks=[*over.ranks[1:2], rank(0, "a", 3, T), rank(2, "c", 143, T - 2)])
    end = end_of(decide(replace(failed, now_s=T + FORSAKEN_S)))
    assert (end.outcome, end.failure.host, end.failure.exit_code) == (State.FAILED, "a", 3)
    enough = replace(failed, ranks=[*failed.ranks[1:], rank(1, "b", 0, T - 5), rank(2, "c", 0, T)])
    started_again = [each._replace(started_s=T - 90) if each.code == 0 else each for each in enough.ranks]
    assert end_of(decide(replace(enough, ranks=started_again, now_s=T + FORSAKEN_S))).outcome is State.SUCCEEDED
    assert decide(replace(over, ranks=[*over.ranks, rank(3, "c")], now_s=T + FORSAKEN_S)) is None
    assert decide(replace(over, ranks=[], now_s=T + FORSAKEN_S)) is None


def test_an_elastic_gang_of_which_nothing_is_left_ends_although_a_rank_never_reports():
    """Docker never reports the end of the driver's container, and the rank on `b` fell with its own container."""
    gone = rank(0, "a", 1, T - 100, is_cut_off=True)._replace(with_container=True)
    seen = replace(ELASTIC, ranks=[gone, rank(1, "b"), rank(2, "c", 1, T - 100)], exits={"b": container(None, T - 99)})
    assert decide(replace(seen, now_s=T - 99 + FORSAKEN_S - 1)) is None, "the driver may start others"
    end = end_of(decide(replace(seen, now_s=T - 99 + FORSAKEN_S)))
    assert (end.outcome, end.failure.host, end.failure.exit_code) == (State.FAILED, "c", 1)
