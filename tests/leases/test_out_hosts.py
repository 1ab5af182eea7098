"""Passes and hosts that are out: what starts where, and what `why` says."""

import os

import pytest

from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import State
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator, snapshot
from gpurun.leases.look import look
from gpurun.scheduler.explain import explain
from gpurun.state.hosts import Cordon, Cordons, Machine, Machines, Out

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-3]": {}}}}
"""
OUT = Out("ssh", "no route to host", 1.0, "check that the host is up")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def submit(home, gpus, hosts=(), now_s=1.0):
    spec = JobSpec(name="n", image="i", gpus=gpus, command=("true",), constraints=Constraints(hosts=hosts))
    return JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=now_s)


def note(home, out, *hosts):
    inventory = load_inventory(home / "inventory.yaml")
    Machines(home).note({inventory.by_name[host].machine: Machine(host, 2.0, out=out) for host in hosts})


def granted(home, now_s=3.0):
    """Job → the hosts that a pass gives to it."""
    leases = Allocator(home).run_pass(now_s=now_s).granted
    for _, lock in leases:
        lock.close()
    return {lease.job: [grant.host for grant in lease.grants] for lease, _ in leases}


def why(home, job, now_s=3.0):
    looked = Allocator(home).run_pass(now_s=now_s, commit=False)
    (answer,), (seen,) = looked.decisions.values(), looked.snapshots.values()
    return explain(answer, seen, job)


def test_a_host_that_is_out_gets_no_gang_and_gets_gangs_again_when_it_is_back(home):
    note(home, OUT, "h1", "h3")
    first, second = submit(home, 4).id, submit(home, 4, now_s=2.0).id
    assert granted(home) == {first: ["h2"]}
    note(home, None, "h3")
    assert granted(home) == {second: ["h3"]}


def test_while_all_hosts_are_out_jobs_wait_and_none_is_impossible(home):
    note(home, OUT, "h1", "h2", "h3")
    jobs = [submit(home, 4).id, submit(home, 12).id, submit(home, 4, ("h1",)).id]
    assert granted(home) == {}
    for job in jobs:
        said = why(home, job)
        assert said.state == "waits"
        assert said.message and "out of use" in f"{said.message} {said.unknown_because}"
        assert "out: no route to host" in [group.why for group in said.groups]
    note(home, None, "h1", "h2", "h3")
    assert granted(home)


def test_a_gang_on_a_host_that_goes_out_keeps_it(home):
    job = submit(home, 4)
    (host,) = granted(home)[job.id]
    note(home, OUT, host)
    inventory = load_inventory(home / "inventory.yaml")
    seen = snapshot(look(home, now_s=4.0), inventory)
    assert [run.placement.hosts for run in seen.running] == [(host,)]
    assert seen.unusable == {host: "out: no route to host"}
    assert job.record().state is State.GRANTED


def test_a_cordon_is_named_before_what_a_check_found(home):
    note(home, OUT, "h1", "h2")
    with Cordons(home).changing() as cordons:
        cordons["h1"] = Cordon("cordoned", "alice", 1.0, "fan")
    view = look(home, now_s=3.0)
    assert view.unusable(load_inventory(home / "inventory.yaml")) == {
        "h1": "cordoned: fan",
        "h2": "out: no route to host",
    }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
def test_what_another_user_knows_takes_no_host_from_this_one(home):
    note(home, OUT, "h1", "h2", "h3")
    (home / "machines" / f"{os.getuid()}.json").rename(home / "machines" / "12345.json")
    os.chown(home / "machines" / "12345.json", 12345, -1)
    job = submit(home, 12).id
    assert list(granted(home)) == [job]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
def test_a_look_ahead_for_a_job_counts_what_its_owner_knows(home):
    note(home, OUT, "h1", "h2", "h3")
    (home / "machines" / f"{os.getuid()}.json").rename(home / "machines" / "12345.json")
    os.chown(home / "machines" / "12345.json", 12345, -1)
    job = submit(home, 4).id
    (mine,) = Allocator(home).look_ahead(now_s=3.0).decisions.values()
    (theirs,) = Allocator(home).look_ahead(now_s=3.0, knower=12345).decisions.values()
    assert [gang.id for gang, _ in mine.starts] == [job]
    assert not theirs.starts and job in theirs.waits
