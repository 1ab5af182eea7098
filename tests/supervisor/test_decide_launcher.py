"""What a launcher's end says of its gang, and a gang without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import GANG, SPEC, THREE, T, container, end_of, rank

from gpurun.jobs.record import State
from gpurun.launch.launchers.direct import UNTOLD
from gpurun.launch.output import Line
from gpurun.remote.agent import DEAD_AFTER_S
from gpurun.supervisor.verdict.decide import EXPLAIN_S, LOG_SILENT_S, PROOF_S, SETTLE_S, by_launcher, decide

SAYS_2 = [Line(None, "stderr", "Process name: 2"), Line(None, "stderr", "Exit code: 137")]


def test_a_rank_that_only_heeded_sigterm_is_not_named_whatever_the_launcher_says():
    ranks = [rank(0, "a", 139, T - 31), rank(1, "b", 137, T - 32, is_cut_off=True), rank(2, "c", 143, T - 30)]
    seen = replace(GANG, members=THREE, ranks=ranks, exits={"a": container(1)})
    assert by_launcher(seen, SAYS_2, SPEC, ["a", "b", "c"]).failure.rank == 1
    untold = replace(seen, ranks=ranks[:2])
    assert by_launcher(untold, SAYS_2, SPEC, ["a", "b", "c"]).failure.rank == 2


def test_a_rank_that_the_launcher_names_on_a_host_that_is_lost_ended_with_the_host():
    seen = replace(GANG, members=THREE, exits={"a": container(1)}, down_since={"c": T - 60})
    assert by_launcher(seen, SAYS_2, SPEC, ["a", "b", "c"]).failure.kind == "host-lost"
    assert by_launcher(replace(seen, down_since={"b": T - 60}), SAYS_2, SPEC, ["a", "b", "c"]).failure.rank == 2


def test_who_failed_is_open_as_long_as_docker_may_know_that_its_container_was_ended():
    cut_off = [rank(0, "a", 143, T - 2), rank(1, "b", 137, T - 3, is_cut_off=True)]
    seen = replace(GANG, ranks=cut_off, exits={"a": container(1, T - 2)}, has_launchers_log=True)
    assert decide(seen) is None
    assert decide(replace(seen, now_s=T - 2 + EXPLAIN_S)).by_launcher
    killed = replace(seen, exits={**seen.exits, "b": container(137, T - 1, ended_ago_s=2.0)})
    assert end_of(decide(killed)).suspects == ("b",)


def test_without_a_word_from_ranks_the_launcher_is_believed():
    seen = replace(GANG, exits={"a": container(0)}, has_launchers_log=True)
    step = decide(seen)
    assert step.by_launcher
    assert by_launcher(seen, [], SPEC, ["a", "b"]).outcome is State.SUCCEEDED
    failed = replace(seen, exits={"a": container(1)})
    lines = [Line(None, "stderr", "Process name: 1"), Line(None, "stderr", "Exit code: 3")]
    end = by_launcher(failed, lines, SPEC, ["a", "b"])
    assert (end.failure.rank, end.failure.host, end.failure.exit_code) == (1, "b", 3)


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


def test_a_rank_that_has_told_nothing_is_waited_for_if_the_launcher_says_0():
    """A supervisor that follows another one has not reached its host yet: the rank may have failed."""
    seen = replace(GANG, ranks=[rank(0, "a", 0)], exits={"a": container(0, T)}, has_launchers_log=True)
    assert decide(replace(seen, now_s=T + PROOF_S - 0.1)) is None
    assert decide(replace(seen, now_s=T + PROOF_S)).by_launcher


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
        (container(None, is_removed=True), "somebody removed the job's container", 4),
        (container(137, is_oom=True), "ran out of memory", 4),
        (container(137, is_oom=True, memory_bytes=1 << 30), "the job had 1024 MiB on this host", 1),
        (container(None, engine_out="no such file"), "Docker engine has stopped", 4),
        (container(137), "container ended with exit code 137 (SIGKILL: ", 4),
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


def test_a_rank_that_cannot_say_how_it_ended_is_told_of_with_the_likely_reasons():
    """gpurun's start script ends then with a code of its own."""
    seen = replace(GANG, has_launcher=False, exits={"b": container(UNTOLD, T)}, now_s=T + SETTLE_S)
    assert "disk is full, or no folder in PATH has mkdir and mkfifo" in end_of(decide(seen)).reason


def test_a_rank_that_cannot_say_how_it_ended_is_told_of_with_what_its_host_says_of_the_disk():
    """The container of this rank ended because its host's disk had become read-only, not full."""
    why = "/home/train/.gpurun/jobs/j-1/run is on a read-only file system (ext4 on /home: ro,errors=remount-ro)"
    end = replace(container(UNTOLD, T), unwritable=why)
    reason = end_of(decide(replace(GANG, has_launcher=False, exits={"b": end}, now_s=T + SETTLE_S))).reason
    assert "could not report its exit code: /home/train" in reason and "full" not in reason and "mkfifo" not in reason
