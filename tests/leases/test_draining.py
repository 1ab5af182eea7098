"""Passes that ask gangs to leave hosts that are drained, and what becomes of such requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpurun.errors import StateError
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore, finish
from gpurun.leases.allocate import Allocator
from gpurun.leases.draining import DrainWatch, departures_of
from gpurun.leases.lease import Lease
from gpurun.leases.look import look
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.state import durable
from gpurun.state.hosts import Cordon, Cordons

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-3]": {}}}}
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def runs(home: Path, **wants):
    """A job that runs, and where."""
    spec = JobSpec(**{"name": "n'; rm", "image": "i", "gpus": 4, "command": ("true",), **wants})
    folder = JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=1.0)
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    lock.close()
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state, reached="containers", started_s=3.0)
    return folder, lease.grants[0].host


def drain(home: Path, *hosts, until_s=None, reason="fan"):
    with Cordons(home).changing() as cordons:
        cordons.update({host: Cordon("draining", "alice", 5.0, reason, until_s=until_s) for host in hosts})


def uncordon(home: Path):
    with Cordons(home).changing() as cordons:
        cordons.clear()


def test_a_pass_asks_a_gang_that_may_restart_to_leave_though_nothing_is_queued(home):
    folder, host = runs(home, max_restarts=1)
    drain(home, host)
    Allocator(home).run_pass(now_s=10.0)
    request = folder.cancel_request()
    assert (request.kind, request.drain) == ("preempt", (host,))
    assert request.outcome == f"moved: alice drains {host} (fan)"
    Allocator(home).run_pass(now_s=11.0)
    assert folder.cancel_request() == request, "it is asked once"


def test_a_gang_that_may_not_is_not_asked_until_the_deadline(home):
    folder, host = runs(home)
    drain(home, host, until_s=60.0)
    Allocator(home).run_pass(now_s=59.0)
    assert folder.cancel_request() is None
    Allocator(home).run_pass(now_s=60.0)
    request = folder.cancel_request()
    assert request.kind == "cancel"
    assert request.outcome.startswith(f"drained: alice drains {host} (fan); ")


def test_gangs_on_other_hosts_are_left_alone(home):
    folder, host = runs(home, max_restarts=1)
    drain(home, *{"h1", "h2", "h3"} - {host})
    Allocator(home).run_pass(now_s=10.0)
    assert folder.cancel_request() is None


def test_a_gang_that_fits_nowhere_else_is_not_asked_and_one_that_does_again_is(home):
    folder, host = runs(home, max_restarts=1)
    others = {"h1", "h2", "h3"} - {host}
    drain(home, host, *others)
    Allocator(home).run_pass(now_s=10.0)
    assert folder.cancel_request() is None
    with Cordons(home).changing() as cordons:
        cordons.pop(others.pop())
    Allocator(home).run_pass(now_s=11.0)
    assert folder.cancel_request().kind == "preempt"


@pytest.mark.parametrize("wants", [{"max_restarts": 1}, {}])
def test_a_drain_that_is_undone_withdraws_what_it_asked(home, wants):
    folder, host = runs(home, **wants)
    drain(home, host, until_s=1.0)
    Allocator(home).run_pass(now_s=10.0)
    assert folder.cancel_request() is not None
    uncordon(home)
    Allocator(home).run_pass(now_s=11.0)
    assert folder.cancel_request() is None


def test_a_deadline_that_is_set_later_withdraws_the_end(home):
    folder, host = runs(home)
    drain(home, host, until_s=1.0)
    Allocator(home).run_pass(now_s=10.0)
    drain(home, host, until_s=500.0)
    Allocator(home).run_pass(now_s=11.0)
    assert folder.cancel_request() is None


def test_what_somebody_else_asked_is_neither_replaced_nor_withdrawn(home):
    cancelled, host = runs(home, max_restarts=1)
    mine = CancelRequest("cancel", "me", 4.0)
    cancelled.ask_to_cancel(mine)
    drain(home, host)
    Allocator(home).run_pass(now_s=10.0)
    assert cancelled.cancel_request() == mine
    uncordon(home)
    Allocator(home).run_pass(now_s=11.0)
    assert cancelled.cancel_request() == mine


def test_a_gang_that_stops_already_is_not_asked(home):
    folder, host = runs(home, max_restarts=1)
    folder.move(State.STOPPING, outcome=State.FAILED)
    drain(home, host, until_s=1.0)
    Allocator(home).run_pass(now_s=10.0)
    assert folder.cancel_request() is None


def test_a_gang_that_was_asked_is_not_granted_the_same_host_when_it_is_back_in_the_queue(home):
    folder, host = runs(home, max_restarts=1)
    drain(home, host)
    Allocator(home).run_pass(now_s=10.0)
    folder.move(State.STOPPING, outcome=State.QUEUED, reason=folder.cancel_request().outcome)
    with AllocatorLock(home).held():
        LeaseStore(home).release(LeaseStore(home).try_lock(folder.id))
        finish(JobStore(home), folder.record(), now_s=11.0)
    ((lease, lock),) = Allocator(home).run_pass(now_s=12.0).granted
    lock.close()
    assert lease.job == folder.id and lease.grants[0].host != host
    assert (folder.record().restarts, folder.record().avoid) == (0, ())
    assert folder.cancel_request() is None


def test_cordons_of_an_older_gpurun_know_no_deadline(home):
    folder, host = runs(home)
    Cordons(home).file().plain.write_text(json.dumps(
        {"hosts": {host: {"state": "draining", "by": "a", "since_s": 1.0, "reason": ""}}, "version": 1}
    ))  # fmt: skip
    assert Cordons(home).read()[host].until_s is None
    Allocator(home).run_pass(now_s=1e12)
    assert folder.cancel_request() is None


def test_a_deadline_that_somebody_writes_into_the_cordons_ends_nobody(home):
    """In a shared state directory every member can write them, and only root the deadlines."""
    folder, host = runs(home)
    cordon = {"state": "draining", "by": "a", "since_s": 1.0, "reason": "", "until_s": 2.0}
    Cordons(home).file().plain.write_text(json.dumps({"hosts": {host: cordon}, "version": 1}))
    Allocator(home).run_pass(now_s=1e12)
    assert folder.cancel_request() is None


def test_a_deadline_counts_for_its_own_drain_only(home):
    folder, host = runs(home)
    drain(home, host, until_s=1.0)
    left = Cordons(home).deadlines_file().plain.read_bytes()
    uncordon(home)
    assert json.loads(Cordons(home).deadlines_file().plain.read_bytes())["hosts"] == {}
    Cordons(home).deadlines_file().plain.write_bytes(left)  # as a member leaves it who may not write it
    Cordons(home).file().plain.write_text(json.dumps(
        {"hosts": {host: {"state": "draining", "by": "a", "since_s": 99.0, "reason": ""}}, "version": 1}
    ))  # fmt: skip
    Allocator(home).run_pass(now_s=1e12)
    assert folder.cancel_request() is None


def test_who_may_not_write_deadlines_may_end_a_drain_but_sets_none(home, monkeypatch):
    _, host = runs(home)
    drain(home, host, until_s=500.0)
    real = durable.write_record

    def refused(path, value):
        if path.name == "deadlines.json":
            raise StateError("may not be written", where=str(path))
        real(path, value)

    monkeypatch.setattr(durable, "write_record", refused)
    with pytest.raises(StateError):
        drain(home, host, until_s=1.0)
    assert Cordons(home).read()[host].until_s == 500.0
    uncordon(home)
    assert Cordons(home).read() == {}


@pytest.mark.parametrize("until", ['"soon"', "[]", "true", "1e999", '{"a": 1}', "null"])
def test_a_damaged_deadline_is_damage_and_ends_nobody(home, until):
    folder, host = runs(home)
    drain(home, host, until_s=1.0)
    Cordons(home).deadlines_file().plain.write_text(
        f'{{"hosts": {{"{host}": {{"since_s": 5.0, "until_s": {until}}}}}}}'
    )
    with pytest.raises(StateError):
        Allocator(home).run_pass(now_s=1e12)
    assert folder.cancel_request() is None


def test_a_drain_of_a_host_that_no_inventory_has_any_more_harms_nobody(home):
    folder, host = runs(home, max_restarts=1)
    drain(home, "gone'; rm -rf /", "", host)
    (home / "inventory.yaml").write_text(INVENTORY.replace("h[1-3]", "h[2-3]" if host == "h1" else "h1"))
    Allocator(home).run_pass(now_s=10.0)
    assert folder.cancel_request().kind == "preempt"


def test_a_gang_whose_inventory_cannot_be_used_is_waited_for(home):
    folder, host = runs(home, max_restarts=1)
    drain(home, host)
    (home / "inventory.yaml").write_text("<<<<<<< HEAD")
    found = Allocator(home).run_pass(now_s=10.0)
    assert folder.cancel_request() is None and found.problems
    (said,) = departures_of(look(home, now_s=10.0), lambda _: None)
    assert (said.fate, said.why) == ("waits", "the job's inventory cannot be used")


GANG = Lease(
    "j-00000001",
    1,
    "me",
    1,
    "pascal",
    ("r1",),
    tuple(Grant(host, (0,)) for host in ("h1", "h2", "h3")),
    23022,
    1.0,
    "/i",
)


def test_a_supervisor_looks_when_its_host_is_drained_and_when_the_deadline_comes_not_all_the_time(home, monkeypatch):
    monkeypatch.setattr("gpurun.leases.draining.LOOK_S", 0.0)
    watch = DrainWatch(home, lambda: GANG)
    assert not watch.is_due(["h1"], 1.0)
    drain(home, "h2")
    assert not watch.is_due(["h1"], 1.0)
    drain(home, "h1", until_s=60.0)
    assert watch.is_due(["h1"], 2.0)
    assert not watch.is_due(["h1"], 59.9)
    assert watch.is_due(["h1"], 60.0)
    assert not watch.is_due(["h1"], 61.0)
    assert watch.hosts(["h3", "h2", "h1"]) == ["h2", "h1"]
    Cordons(home).file().plain.write_text("{")
    assert watch.hosts(["h1"]) == ["h1"], "damaged cordons: what was known stays"
    Cordons(home).file().plain.unlink()
    assert watch.hosts(["h1"]) == []


def test_a_supervisor_that_finds_a_drains_request_asks_once_whether_it_still_stands(home):
    watch = DrainWatch(home, lambda: GANG)
    assert watch.is_due(["h1"], 1.0, asked=True)
    assert not watch.is_due(["h1"], 1.0, asked=True)


@pytest.mark.parametrize("first", ["drain", "person"])
def test_the_end_of_a_drain_withdraws_no_person_s_cancel(home, first):
    folder, host = runs(home)
    mine = CancelRequest("cancel", "alice", 8.0)
    if first == "person":
        folder.ask_to_cancel(mine)
    drain(home, host, until_s=9.0)
    Allocator(home).run_pass(now_s=10.0)
    folder.ask_to_cancel(mine)
    assert folder.cancel_request() == mine, "what a person wants is said first"
    uncordon(home)
    Allocator(home).run_pass(now_s=11.0)
    assert folder.cancel_request() == mine


def test_a_damaged_cancel_of_a_drain_is_set_aside_and_asked_for_again(home):
    folder, host = runs(home)
    drain(home, host, until_s=9.0)
    Allocator(home).run_pass(now_s=10.0)
    (folder.path / "drain.json").plain.write_text('{"kind": "cancel", "by": "x", "asked_s": 1}')
    assert folder.cancel_request() is None
    assert "drain.json" in str(folder.damaged_request())
    assert "drain.json.damaged-" in folder.mend_request()
    Allocator(home).run_pass(now_s=11.0)
    assert folder.cancel_request().drain == (host,)
