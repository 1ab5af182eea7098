"""What a supervisor does when hosts of its gang are drained."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Constraints
from gpurun.state.hosts import Cordon, Cordons
from gpurun.supervisor.elastic import Members
from gpurun.supervisor.verdict.decide import GangSeen, decide
from gpurun.supervisor.verdict.ends import GangEnd


def drain(job, *hosts, until_s=None):
    with Cordons(job.home).changing() as cordons:
        cordons.update({host: Cordon("draining", "alice", 5.0, "", until_s=until_s) for host in hosts})


def test_a_gang_that_may_restart_gives_way_without_any_other_command(carry):
    job = carry(max_restarts=1)
    job.check_requests(ladder=True)
    drain(job, *job.hosts)
    with pytest.raises(GangEnd, match=f"moved: alice drains {job.hosts[0]}") as ended:
        job.check_requests(ladder=True)
    end = ended.value.end
    assert (end.outcome, end.ladder, end.suspects) == (State.QUEUED, True, ())


def test_a_gang_that_may_not_runs_on_until_the_deadline_and_is_cancelled_then(carry):
    job = carry()
    drain(job, *job.hosts, until_s=100.5)
    job.check_requests(ladder=True)
    job.clock = lambda: 101.0
    with pytest.raises(GangEnd, match="drained: alice drains") as ended:
        job.check_requests(ladder=True)
    assert (ended.value.end.outcome, ended.value.end.code) == (State.CANCELLED, 1)


def test_what_a_drain_asked_that_is_over_ends_no_gang_that_is_adopted(carry):
    job = carry(max_restarts=1)
    job.folder.ask_to_cancel(CancelRequest("preempt", "drain", 3.0, "alice drains h1", ("h1",)))
    job.check_requests(ladder=True)
    assert job.folder.cancel_request() is None


def test_a_persons_cancel_counts_at_once(carry):
    job = carry()
    drain(job, *job.hosts)
    job.folder.ask_to_cancel(CancelRequest("cancel", "me", 3.0))
    with pytest.raises(GangEnd, match="cancelled by me"):
        job.check_requests(ladder=True)


def released(job):
    """The hosts that the watch of a running gang lets go of."""
    step = decide(GangSeen(100.0, job.lease.members, job.spec.min_gpus, drained=job.drains.hosts(job.members)))
    return [] if step is None else list(step.hosts)


def test_an_elastic_gang_releases_a_drained_host_and_blames_nobody(carry):
    job = carry(gpus=6, min_gpus=2, constraints=Constraints(gpus_per_host=2))
    members = Members(job, threading.Event(), on_join=lambda _: None)
    assert released(job) == []
    gone = job.hosts[1]
    drain(job, gone)
    job.check_requests(ladder=True)
    assert job.folder.cancel_request() is None, "it need not stop"
    assert released(job) == [gone]
    members.release([gone])
    assert released(job) == []
    assert gone in job.lease.apart and gone not in job.members
    assert job.folder.record().avoid == ()
    assert Cordons(job.home).read()[gone].state == "draining"
    said = [json.loads(line) for line in job.folder.events.read_text().splitlines()]
    assert any(one.get("state") == "left the gang" and "drained" in one["reason"] for one in said)


def test_an_elastic_gang_keeps_the_host_of_its_launcher_and_the_last_it_needs(carry):
    job = carry(gpus=6, min_gpus=4, constraints=Constraints(gpus_per_host=2))
    drain(job, job.hosts[0])
    assert released(job) == []
    drain(job, *job.hosts[1:])
    assert released(job) == []


def test_damaged_cordons_end_nothing(carry):
    job = carry(max_restarts=1)
    drain(job, "h4")
    (job.home / "cordons.json").write_text('{"hosts": {"h1": 7}}')
    job.check_requests(ladder=True)


def test_ranks_on_a_released_host_may_leave_by_themselves_until_their_grace_is_over(carry, monkeypatch):
    job = carry(gpus=6, min_gpus=2, grace_s=30.0, constraints=Constraints(gpus_per_host=2))
    members, ranks, now = Members(job, threading.Event(), on_join=lambda _: None), {}, [1000.0]
    monkeypatch.setattr("gpurun.supervisor.elastic.time", SimpleNamespace(monotonic=lambda: now[0]))
    job.links = SimpleNamespace(each=lambda _, hosts: SimpleNamespace(ok={host: ranks[host] for host in hosts}))
    early, late = job.hosts[1:]
    members.release([early, late])
    ranks.update({early: 2, late: 2})
    members._let_leave()
    assert (set(members._released), job.record.uncut) == ({early, late}, ())
    ranks[early] = 0
    members._let_leave()
    assert (set(members._released), job.record.uncut) == ({late}, ()), "it left by itself: nobody is cut off"
    now[0] += 31.0
    members._let_leave()
    assert (set(members._released), job.record.uncut) == (set(), job.members)
