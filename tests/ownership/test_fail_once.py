"""A process that fails and lives on: each call of it fails once, in turn, and no job and no GPU is lost.

`fail_once.run(ROLE, N)` replays one run.
"""

from __future__ import annotations

import os

import fail_once
import pytest
from how_many import count

from gpurun.failing import Calls
from gpurun.head import waiter
from gpurun.leases.allocate import _Passing
from gpurun.supervisor import __main__ as process

MOST = count("calls that fail once")
PARTS = min(-(-MOST // 50), 12)
"""Tests of each role: in the long profile one would take many minutes."""
ROLES = ("waiter", "supervisor", *fail_once.COMMANDS)


def numbers(role, most):
    """Which calls fail: all that a process of the role makes, or as many, evenly spread."""
    total = fail_once.calls_of(role)
    assert total > 200
    step = max(1, -(-total // most))
    return range(1 + total % step, total + 1, step)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("role", ROLES)
def test_whatever_call_fails_every_job_ends_well_and_nothing_is_held(role, part):
    for number in numbers(role, MOST)[part::PARTS]:
        outcome = fail_once.run(role, number)
        assert outcome.failed, f"{role} made fewer calls than before"
        if outcome.violations:
            history = "\n".join(outcome.history[-30:])
            pytest.fail(f"{role}, call {number}: {outcome.failed}\n{history}", pytrace=False)


def test_a_pass_that_loses_its_locks_is_caught(monkeypatch):
    monkeypatch.setattr(_Passing, "run_and_keep", _Passing.run)
    assert fail_once.caught("waiter", "allocate.mark_granted")


def test_a_waiter_that_ends_is_caught(monkeypatch):
    def ends(error):
        raise error

    monkeypatch.setattr(waiter, "_say", ends)
    assert fail_once.caught("waiter", "waiter._stamps")


def test_a_supervisor_that_ends_is_caught(monkeypatch):
    monkeypatch.setattr(process, "may_pass", lambda _: False)  # nothing is tried again
    assert fail_once.caught("supervisor", "job.move")


def test_only_gpuruns_own_calls_below_its_directory_count(tmp_path):
    calls = Calls(tmp_path / "home", 1)
    with calls.installed():
        for path in (tmp_path / "other", tmp_path / "home"):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR))
    assert (calls.failed, calls.left) == ("", 1)
    assert os.open.__module__ == "posix"
