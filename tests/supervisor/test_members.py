"""An elastic gang that has lost hosts: the ranks of the others are told once, by whichever supervisor comes to it."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.errors import HostUnreachable, StateDiskError, words_of
from gpurun.jobs.record import FirstFailure
from gpurun.jobs.spec import Constraints
from gpurun.leases.allocate import Allocator
from gpurun.remote.fleet import Results
from gpurun.state.hosts import Cordons
from gpurun.supervisor import start as elsewhere
from gpurun.supervisor.elastic import FENCE_AGAIN_FIRST_S, Members
from gpurun.supervisor.hosts import raise_first
from gpurun.supervisor.outputs.listing import Unbrought
from gpurun.supervisor.verdict.ends import GangEnd


@pytest.fixture
def gang(carry):
    """An elastic gang of three hosts, whose links note who was cut, and fail for the hosts in `silent`."""
    job = carry(gpus=6, min_gpus=2, constraints=Constraints(gpus_per_host=2))
    told, silent = [], set()

    def each(_call, hosts):
        told.append(sorted(hosts))
        answers = {host: {"cut": 1, "refused": 0} for host in hosts if host not in silent}
        return Results(ok=answers, failed={host: HostUnreachable("no", host=host) for host in silent & set(hosts)})

    job.__dict__["links"] = SimpleNamespace(each=each)
    return SimpleNamespace(job=job, told=told, silent=silent)


def members_of(gang):
    return Members(gang.job, threading.Event(), on_join=lambda _: None)


def lose_last(gang):
    members = members_of(gang)
    lost = gang.job.hosts[-1]
    members.lose({lost: FirstFailure("it fell silent", host=lost)})
    return members, list(gang.job.members)


def test_those_who_are_left_are_cut_once(gang):
    members, left = lose_last(gang)
    members._cut_connections()
    members._cut_connections()
    assert gang.told == [left]
    assert gang.job.folder.record().uncut == ()


def test_who_does_not_answer_is_asked_again_and_nobody_else(gang):
    members, left = lose_last(gang)
    gang.silent.add(left[1])
    members._cut_connections()
    gang.silent.clear()
    members._cut_connections()
    assert gang.told == [left, [left[1]]]


def test_a_supervisor_that_follows_does_what_the_one_before_did_not_come_to(gang):
    _, left = lose_last(gang)
    follower = members_of(gang)
    follower._cut_connections()
    assert gang.told == [left]
    members_of(gang)._cut_connections()
    assert gang.told == [left], "ranks that have found their new gang are left alone"


def test_nobody_is_cut_in_a_gang_that_has_lost_nobody(gang):
    members_of(gang)._cut_connections()
    assert gang.told == []


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_host_that_cannot_join_is_checked_unless_the_gang_has_ended(gang, monkeypatch, has_ended):
    """The scheduler keeps the gang off a host that is out: it is not tried again and again."""
    members, checked = members_of(gang), []
    gang.job.spec = replace(gang.job.spec, gpus=8)
    monkeypatch.setattr(Allocator, "grow", lambda _, held, *_args, **__: (held, ("h4",)))
    monkeypatch.setattr(Allocator, "put_apart", lambda _, held, hosts: held)
    monkeypatch.setattr(elsewhere, "check_hosts", lambda job, hosts: checked.append(hosts))

    def bring_in(hosts):
        if has_ended:
            members._stop.set()
        raise_first({host: HostUnreachable("no route to host", host=host) for host in hosts}, kind="connection")

    monkeypatch.setattr(members, "_bring_in", bring_in)
    with pytest.raises(GangEnd):
        members._take_and_bring_in()
    assert checked == ([] if has_ended else [["h4"]])


def test_a_host_that_has_left_since_is_not_asked(gang):
    members, left = lose_last(gang)
    members.lose({left[1]: FirstFailure("it fell silent", host=left[1])})
    members._cut_connections()
    assert gang.told == [left[:1]]


def test_a_supervisor_that_follows_knows_the_address_of_a_host_that_is_gone(gang):
    """Its ranks' connections to that host are those that the others wait on."""
    run = ["docker", "run", "--add-host", "h1:10.0.0.1", "--add-host", "h3:10.0.0.3", "--env", "A=--add-host"]
    plan = {"ssh_port": 5, "hosts": [{"run": run}, {"run": [*run, "--add-host"]}], "launch": ["x"]}
    Path(str(gang.job.folder.path), "plan.json").write_text(json.dumps(plan))
    members = members_of(gang)
    assert members._addresses == {"10.0.0.1", "10.0.0.3"}


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"ssh_port": 5, "hosts": 7}', '{"ssh_port": 5, "hosts": [{"run": [1]}]}']
)
def test_a_damaged_plan_ends_nothing(gang, damage):
    Path(str(gang.job.folder.path), "plan.json").write_text(damage)
    assert members_of(gang)._addresses == frozenset()


class LastWords:
    """Stands for the links and the log of a gang; notes in which order a host that has left is dealt with."""

    def __init__(self, job, silent=()):
        self.did, self._silent = [], silent
        self.ranks = ()
        job.__dict__["links"] = self
        job.__dict__["log_copy"] = self

    def add(self, *_):
        pass

    def open(self, hosts, **_):
        return {host: HostUnreachable("no", host=host) for host in hosts if host in self._silent}

    def is_open(self, host):
        return host not in self._silent

    def each(self, call, hosts):
        for host in hosts:
            if host not in self._silent:
                call(SimpleNamespace(host=host, call=lambda op, host=host, **_: self.did.append((op, host))))
        return Results(ok={}, failed={})

    def start(self, _note):
        pass

    def follow(self, hosts):
        self.did += [("follow", host) for host in hosts]

    def take_rest(self, hosts, most_s):
        assert most_s > 0
        self.did += [("take_rest", host) for host in hosts]

    def forget(self, hosts):
        self.did += [("forget", host) for host in hosts]

    def drop(self, hosts):
        pass


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_last_words_and_outputs_of_a_host_that_leaves_come_home_before_it_is_fenced(gang, monkeypatch, is_silent):
    job, left = gang.job, gang.job.hosts[-1]
    members = members_of(gang)
    members.release([left])
    members._released.clear()
    job.folder.log.open_file(os.O_WRONLY | os.O_CREAT)
    seen = LastWords(job, silent=[left] if is_silent else [])

    def fence(_links, _lease, hosts, **_):
        seen.did += [("fence", host) for host in hosts]
        return {}

    monkeypatch.setattr("gpurun.supervisor.elastic.fence", fence)
    monkeypatch.setattr(
        "gpurun.supervisor.elastic.collect_leaving",
        lambda _job, hosts, **_: seen.did.extend(("outputs", host) for host in hosts) or [],
    )
    members._fence_apart()
    heard = ["follow", "docker.request", "take_rest", "outputs", "fence", "forget"]
    assert seen.did == [(what, left) for what in ([] if is_silent else heard)]
    assert (left in job.lease.apart) == is_silent


def test_a_host_whose_gang_ends_while_its_outputs_are_brought_is_left_to_the_end(gang, monkeypatch):
    stop = threading.Event()
    members, left = Members(gang.job, stop, on_join=lambda _: None), gang.job.hosts[-1]
    members.release([left])
    members._released.clear()
    gang.job.folder.log.open_file(os.O_WRONLY | os.O_CREAT)
    seen = LastWords(gang.job)
    monkeypatch.setattr("gpurun.supervisor.elastic.fence", lambda *_, **__: pytest.fail("its outputs would be gone"))
    monkeypatch.setattr("gpurun.supervisor.elastic.collect_leaving", lambda *_, **__: stop.set() or ())
    members._fence_apart()
    assert seen.did and left in gang.job.lease.apart


@pytest.fixture
def leaving(gang, monkeypatch):
    """A gang whose last host leaves: what its copy lacks, who was fenced, and what was said, in virtual time."""
    job, host = gang.job, gang.job.hosts[-1]
    members = members_of(gang)
    members.release([host])
    members._released.clear()
    job.folder.log.open_file(os.O_WRONLY | os.O_CREAT)
    LastWords(job)
    found = SimpleNamespace(job=job, host=host, lacks=[], fenced=[], notes=[], now_s=100.0, tries=0)

    def fence(_links, _lease, hosts, *, state, said, outputs=False):
        assert not outputs, "outputs are removed once they are on the head, not by the fence"
        found.fenced += hosts
        return {}

    def collect(*_, **__):
        found.tries += 1
        if isinstance(found.lacks, Exception):
            raise found.lacks
        return found.lacks

    def turn(after_s=0.0):
        found.now_s += after_s
        members._fence_apart()

    found.turn = turn
    for name, fake in {
        "fence": fence, "collect_leaving": collect, "time": SimpleNamespace(monotonic=lambda: found.now_s)
    }.items():  # fmt: skip
        monkeypatch.setattr(f"gpurun.supervisor.elastic.{name}", fake)
    monkeypatch.setattr(job, "note", found.notes.append)
    return found


def test_a_host_whose_outputs_could_not_be_copied_is_neither_fenced_nor_blamed_and_is_tried_again(leaving):
    leaving.lacks = [Unbrought(leaving.host, "", "it sent 1 of 2 files")]
    leaving.turn()
    assert leaving.fenced == [] and leaving.host in leaving.job.lease.apart
    assert not list(Cordons(leaving.job.home).read()), "the head may be at fault"
    (said,) = leaving.notes
    assert leaving.host in said and "it sent 1 of 2 files" in said
    leaving.lacks = []
    leaving.turn(FENCE_AGAIN_FIRST_S / 2)
    assert leaving.fenced == [], "not at once"
    leaving.turn(FENCE_AGAIN_FIRST_S)
    assert leaving.fenced == [leaving.host] and leaving.host not in leaving.job.lease.apart


@pytest.mark.parametrize("is_full", [False, True])
def test_copies_that_keep_failing_are_tried_less_and_less_often_and_told_once(leaving, is_full):
    leaving.lacks = [Unbrought(leaving.host, "", "it sent 1 of 2 files")]
    if is_full:
        leaving.lacks = StateDiskError("cannot be copied: the disk is full")
    for _ in range(400):
        with suppress(StateDiskError):
            leaving.turn(1.0)
    assert 8 <= leaving.tries <= 16 and leaving.fenced == []
    assert len(leaving.notes) == (0 if is_full else 1)


def test_a_file_that_nobody_can_copy_holds_no_gpus_and_stays_where_the_person_is_told(leaving):
    leaving.lacks = [Unbrought(leaving.host, "secret", "Permission denied")]
    leaving.turn()
    assert leaving.fenced == [leaving.host]
    (said,) = leaving.notes
    assert (
        leaving.host in said
        and "'secret' Permission denied" in said
        and f"`gpurun outputs {leaving.job.lease.job}` copies the missing outputs later" in said
    )


SHORT = [
    OSError(24, "Too many open files"), StateDiskError("full"), RuntimeError("can't start new thread"), MemoryError(),
]  # fmt: skip


@pytest.mark.parametrize("error", SHORT, ids=repr)
def test_what_is_repeated_for_a_gang_outlives_a_failure_and_tells_it_once(gang, monkeypatch, error):
    stop, answers, notes = threading.Event(), [error, error], []
    members = Members(gang.job, stop, on_join=lambda _: None)
    monkeypatch.setattr("gpurun.supervisor.elastic.TEND_S", 0.0)
    monkeypatch.setattr(gang.job, "note", notes.append)

    def tend():
        if answers:
            raise answers.pop()
        stop.set()

    members._repeat(tend)
    assert notes == [f"gpurun could not update the job's hosts and retries: {words_of(error)}"]


@pytest.mark.parametrize("error", SHORT, ids=repr)
def test_a_thread_of_growth_outlives_a_failure(gang, monkeypatch, error):
    stop, tries = threading.Event(), []
    members = Members(gang.job, stop, on_join=lambda _: None)
    monkeypatch.setattr("gpurun.supervisor.elastic.TEND_S", 0.0)
    monkeypatch.setattr("gpurun.supervisor.elastic.OF_NO_USE_MOST_S", 0.0)
    monkeypatch.setattr("gpurun.supervisor.elastic.NOTHING_FREE_MOST_S", 0.0)
    members._grow_next = 0.0

    def take():
        tries.append("a try")
        if len(tries) == 3:
            stop.set()
        raise error

    monkeypatch.setattr(members, "_take_and_bring_in", take)
    members._grow()
    assert len(tries) == 3


def test_hosts_that_cannot_be_brought_in_leave_again_whatever_failed(gang, monkeypatch):
    """A socket that cannot be opened is no reason to hold GPUs that nobody trains on."""
    job = gang.job
    members, left = lose_last(gang)
    lost = next(host for host in job.hosts if host not in left)
    members._change(Allocator.let_go, [lost])
    monkeypatch.setattr(members, "_bring_in", lambda _: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(OSError, match="Too many"):
        members._take_and_bring_in()
    assert job.lease.apart, "they are fenced, and their GPUs are free"
    assert not members._joining
