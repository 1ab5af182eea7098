"""Whoever cancels a job does not wait for what its supervisor waits for."""

from __future__ import annotations

import threading

import pytest
from waiting import LIMIT_S

from gpurun.content.ship import ShipCancelled
from gpurun.errors import HostUnreachable, StateDiskError
from gpurun.jobs.record import CancelRequest, State
from gpurun.supervisor import life
from gpurun.supervisor.life import giving_way
from gpurun.supervisor.verdict.ends import GangEnd, failed

CANCEL = CancelRequest("cancel", "me", 3.0)


class SlowLinks:
    """To hosts of which one takes longer than anybody would wait."""

    def __init__(self):
        self.why = ""
        self._cut = threading.Event()

    def cut(self, hosts, why):
        self.why = why
        self._cut.set()

    def wait(self):
        assert self._cut.wait(LIMIT_S), "it waited until the host answered"
        raise HostUnreachable(self.why, host="h1")


@pytest.fixture
def job(carry, monkeypatch):
    monkeypatch.setattr(life, "POLL_S", 0.01)
    job = carry()
    job.links = SlowLinks()
    return job


def ask(job, request=CANCEL):
    threading.Timer(0.05, job.folder.ask_to_cancel, [request]).start()


@pytest.mark.parametrize("as_gang_end", [True, False])
def test_a_cancel_ends_every_wait_for_a_host_and_blames_none(job, as_gang_end):
    ask(job)
    with pytest.raises(GangEnd, match="cancelled by me") as found, giving_way(job):
        try:
            job.links.wait()
        except HostUnreachable as error:
            raise (failed(error) if as_gang_end else error) from None
    assert (found.value.end.outcome, found.value.end.suspects) == (State.CANCELLED, ())


@pytest.mark.parametrize("reached", ["nothing", "files", "containers"])
def test_ranks_that_may_have_started_get_their_notice(job, reached):
    job.amend(reached=reached)
    ask(job)
    with pytest.raises(GangEnd) as found, giving_way(job):
        job.links.wait()
    assert found.value.end.ladder is (reached == "containers")


def test_nothing_begins_for_a_job_that_is_cancelled_already(job):
    job.folder.ask_to_cancel(CANCEL)
    with pytest.raises(GangEnd, match="cancelled by me"), giving_way(job):
        pytest.fail("it began")


def test_a_failure_of_its_own_stays_what_it_is(job):
    with pytest.raises(HostUnreachable, match="no route"), giving_way(job):
        raise HostUnreachable("no route", host="h1")


def test_what_was_done_in_time_is_done(job):
    with giving_way(job):
        job.folder.ask_to_cancel(CANCEL)


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_who_hears_it_before_the_ear_does_ends_the_attempt_as_was_asked(job, monkeypatch, is_withdrawn):
    """To ship an image waits for more than hosts: it asks by itself, and failed with words of its own."""
    monkeypatch.setattr(life, "POLL_S", LIMIT_S)
    with pytest.raises(GangEnd, match="cancelled by me") as found, giving_way(job) as is_asked:
        assert not is_asked()
        job.folder.ask_to_cancel(CANCEL)
        assert is_asked()
        if is_withdrawn:
            monkeypatch.setattr(job, "request", lambda: None)
        assert is_asked()
        raise failed(ShipCancelled("shipping the image was cancelled"))
    assert found.value.end.outcome is State.CANCELLED
    assert job.links.why


def test_once_it_is_over_nothing_is_cut(job):
    with giving_way(job):
        pass
    job.folder.ask_to_cancel(CANCEL)
    assert not job.links._cut.wait(0.2)


@pytest.mark.parametrize("error", [StateDiskError("it is full"), FileNotFoundError("is away"), OSError(24, "too many")])
def test_a_disk_that_cannot_be_read_now_and_then_makes_nobody_deaf(job, monkeypatch, error):
    answers = iter([None, error, error, CANCEL])

    def request():
        answer = next(answers, CANCEL)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(job, "request", request)
    with pytest.raises(GangEnd, match="cancelled by me"), giving_way(job):
        job.links.wait()
