"""Some ranks only serve the others: whose end ends a gang, and what the report calls a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import GANG, T, end_of, rank
from hypothesis import given
from hypothesis import strategies as st

from gpurun.jobs.record import State
from gpurun.jobs.spec import Roles
from gpurun.supervisor.verdict.decide import Finish, decide

SERVED = replace(GANG, has_launcher=False, roles=Roles(ps=1, chief=True))
"""Workers 0 and 1 on a and b; the chief, rank 2, on a; a server, rank 3, on b."""
ALIKE = replace(SERVED, roles=Roles(ps=1))
"""The same without a chief: the server is rank 2."""
RUNNING = (rank(0, "a"), rank(1, "b"), rank(2, "a"), rank(3, "b"))


def with_ends(seen, **codes):
    ranks = [each if (code := codes.get(f"r{each.rank}")) is None else rank(each.rank, each.host, code)
             for each in RUNNING[: seen.world]]  # fmt: skip
    return replace(seen, ranks=ranks)


def test_nothing_is_done_while_the_chief_runs():
    assert decide(with_ends(SERVED)) is None


def test_the_gang_has_succeeded_with_its_chief_and_the_others_get_their_grace():
    end = end_of(decide(with_ends(SERVED, r2=0)))
    assert (end.outcome, end.ladder) == (State.SUCCEEDED, True)


def test_there_is_nobody_to_end_where_all_have_ended():
    assert not end_of(decide(with_ends(SERVED, r0=0, r1=0, r2=0, r3=0))).ladder


@pytest.mark.parametrize("ended", [{"r0": 0}, {"r1": 0, "r3": 0}, {"r0": 0, "r1": 0, "r3": 0}])
def test_the_chief_alone_can_end_a_gang_well(ended):
    assert decide(with_ends(SERVED, **ended)) is None


def test_without_a_chief_every_worker_must_return_0():
    assert decide(with_ends(ALIKE, r0=0)) is None
    assert decide(with_ends(ALIKE, r0=0, r2=0)) is None
    assert end_of(decide(with_ends(ALIKE, r0=0, r1=0))).outcome is State.SUCCEEDED


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "worker 0 (rank 0) on a"),
        (1, "worker 1 (rank 1) on b"),
        (2, "chief 0 (rank 2) on a"),
        (3, "ps 0 (rank 3) on b"),
    ],
)
def test_whoever_fails_first_is_named_by_role(number, name):
    end = end_of(decide(with_ends(SERVED, **{f"r{number}": 7})))
    assert end.outcome is State.FAILED and end.ladder
    assert end.reason == f"{name} failed first, with exit code 7"
    assert (end.failure.rank, end.failure.exit_code) == (number, 7)


def test_what_fails_because_the_chief_is_gone_undoes_nothing():
    ranks = [*RUNNING[:1], rank(1, "b", 1, T - 61), rank(2, "a", 0, T - 60.5), RUNNING[3]]
    assert end_of(decide(replace(SERVED, ranks=ranks))).outcome is State.SUCCEEDED


codes = st.sampled_from([None, None, 0, 1, 137])


@given(st.lists(codes, min_size=4, max_size=4), st.booleans())
def test_a_gang_succeeds_exactly_if_all_whom_it_waits_for_returned_0(drawn, has_chief):
    seen = with_ends(SERVED if has_chief else ALIKE, **{f"r{number}": code for number, code in enumerate(drawn)})
    step = decide(seen)
    is_success = isinstance(step, Finish) and step.end.outcome is State.SUCCEEDED
    assert is_success == all(drawn[number] == 0 for number in ([2] if has_chief else [0, 1]))
