"""How often pre-flight may have a gang placed elsewhere: by what it found, not by how often the job was started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import Grant
from gpurun.jobs.states import State
from gpurun.supervisor import preflight
from gpurun.supervisor.ends import GangEnd

RECORD = JobRecord("j-00000001", "n", "o", 0, "/i", 4, State.PREPARING, 0.0, 0.0, attempt=6)


class Job:
    """As much of a job as pre-flight looks at."""

    def __init__(self, record):
        self.record, self.hardware, self.inventory = record, {}, None
        self.lease = SimpleNamespace(grants=(Grant("h1", (0,)),))
        self.links = SimpleNamespace(fleet=None)

    def amend(self, **changes):
        self.record = self.record.but(**changes)


@pytest.fixture
def found(monkeypatch):
    worst = SimpleNamespace(check="disk", evidence="is full", remedy="make room")
    found = SimpleNamespace(hardware={}, other=(), blocking=[worst], bad_hosts={"h1"})
    monkeypatch.setattr(preflight, "preflight", lambda *_: found)


def end_of(job):
    with pytest.raises(GangEnd) as raised:
        preflight.examine(job, ["h1"])
    return raised.value.end


def test_a_job_that_was_preempted_often_is_placed_elsewhere_at_its_first_finding(found):
    job = Job(RECORD)
    end = end_of(job)
    assert (end.outcome, end.suspects, job.record.placements) == (State.QUEUED, ("h1",), 1)


def test_the_fifth_finding_in_a_row_fails_the_job_and_says_why(found):
    job = Job(RECORD.but(placements=preflight.MOST_PLACEMENTS - 1))
    end = end_of(job)
    assert end.outcome is State.FAILED
    assert "disk: is full" in end.reason and "make room" in end.reason
