"""What hosts of an attempt that ends still owe, and until when it is waited for."""

from __future__ import annotations

import pytest

from gpurun.jobs.record import JobRecord, OutputsLeft, State
from gpurun.leases.lease import Grant, Lease
from gpurun.supervisor.verdict.ends import GIVE_UP_S, Ending, with_only_copies

HOSTS = ("h1", "h2")
RECORD = JobRecord("j-1", "n", "o", 0, "/i", 2, State.STOPPING, 0.0, 0.0, reached="containers", attempt=2)


def ending(**changes):
    return Ending.of(RECORD.but(**changes), HOSTS)


@pytest.mark.parametrize(
    ("reached", "owes", "has_lines"),
    [("nothing", (), ()), ("files", HOSTS, ()), ("containers", HOSTS, HOSTS)],
)
def test_a_host_owes_what_the_attempt_can_have_left_there(reached, owes, has_lines):
    begun = ending(reached=reached)
    assert (begun.proof, begun.outputs, begun.lines) == (set(owes), set(owes), set(has_lines))
    assert bool(begun.asked) == bool(owes), "where nothing was made nobody is asked"


def test_it_is_over_when_everybody_has_given_everything():
    begun = ending().after_lines(HOSTS).after_outputs(()).now_asked(0.0)
    assert not begun.after_fence(["h2"]).is_over
    assert begun.after_fence(()).is_over


def test_who_has_been_fenced_has_no_more_lines():
    assert ending().after_fence(["h2"]).lines == {"h2"}


def test_a_host_with_outputs_is_waited_for_though_it_has_given_its_proof_and_keeps_them():
    left = ending().after_outputs(["h1"]).now_asked(0.0).after_fence(())
    assert (left.is_over, left.asked, left.kept) == (False, {"h1"}, {"h1"})
    assert ending().after_outputs(["h1"]).after_fence(["h1"]).kept == set(), "what runs there may still write them"


def test_a_suspect_is_asked_once_and_not_waited_for():
    begun = ending(avoid=("h2", "elsewhere"))
    assert begun.asked == set(HOSTS)
    assert begun.suspects == {"h2"}
    assert begun.after_outputs(["h2"]).now_asked(0.0).after_fence(["h2"]).is_over
    assert not begun.after_outputs(()).now_asked(0.0).after_fence(["h1"]).is_over


def test_hosts_are_asked_twice_at_least_and_then_for_ten_seconds():
    once = ending().now_asked(1000.0)
    assert not once.after_fence(HOSTS).is_over
    assert not once.now_asked(1000.0 + GIVE_UP_S).after_fence(HOSTS).is_over
    late = once.now_asked(1001.0 + GIVE_UP_S)
    assert late.after_fence(HOSTS).is_over
    assert late.after_fence(HOSTS).proof == set(HOSTS), "their GPUs are lost"


def lease(**changes):
    grants = tuple(Grant(host, (0,)) for host in HOSTS)
    return Lease("j-1", 2, "o", 0, "pascal", ("r1",), grants, 23022, 0.0, "/i", lost=True, **changes)


@pytest.mark.parametrize(
    ("state", "attempt", "kept"),
    [
        (State.SUCCEEDED, 2, {"h2"}),
        (State.QUEUED, 2, {"h2"}),
        (State.RUNNING, 2, set()),  # an elastic gang goes on without the host
        (State.QUEUED, 3, set()),  # the next attempt went on from the head's copy
    ],
)
def test_a_lost_host_keeps_the_only_copy_until_the_job_has_gone_on_without_it(state, attempt, kept):
    left = OutputsLeft(1, ("it did not answer",), ("h2", "elsewhere"))
    assert with_only_copies(RECORD.but(state=state, attempt=attempt, outputs_left=left), lease(), HOSTS) == kept


def test_of_a_job_that_is_removed_or_complete_nothing_is_kept_and_of_one_that_was_found_everything():
    assert with_only_copies(None, lease(), HOSTS) == set()
    assert with_only_copies(RECORD.but(state=State.SUCCEEDED, attempt=2), lease(), HOSTS) == set()
    assert with_only_copies(None, lease(found=True), HOSTS) == set(HOSTS)
