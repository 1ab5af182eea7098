"""Cordons, drains and held GPUs belong to the machine that the host says it is, whatever inventories call it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.errors import HostUnreachable
from gpurun.facts import Hardware
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import FirstFailure, State
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.draining import DrainWatch, departures_of
from gpurun.leases.look import Cluster, look
from gpurun.leases.occupancy import known_machines
from gpurun.state.hosts import Cordon, Cordons, Machine, Machines, put_cordon
from gpurun.supervisor.stop import cordon_lost, cordon_suspect, found_again

HEAD = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
"""
ONE, OTHER = "1" * 32, "2" * 32


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def inventory(home, name, hosts):
    path = home.parent / name
    path.write_text(f"{HEAD}racks: {{r1: {{hosts: {{{hosts}}}}}}}\n")
    return path


def told(home, path, **ids):
    """What this user's looks at hosts of an inventory found."""
    hosts = load_inventory(path).by_name
    Machines(home).note(
        {hosts[name].machine: Machine(name, time.time(), id_, None, str(path)) for name, id_ in ids.items()}
    )


def cordon(home, path, host, state="cordoned", **more):
    with Cordons(home).changing() as cordons:
        put_cordon(
            cordons, Cluster(load_inventory(path), home).known[host], Cordon(state, "gpurun", 1.0, "Xid 79", **more)
        )


def submit(home, path, **wants):
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 4, "command": ("true",), **wants})
    return JobStore(home).create(spec, inventory=path, now_s=1.0)


def runs(home, path, **wants):
    folder = submit(home, path, **wants)
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    lock.close()
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state, reached="containers", started_s=3.0)
    return folder, lease


def test_a_cordon_holds_in_an_inventory_that_calls_the_machine_otherwise(home):
    ours = inventory(home, "a.yaml", "h1: {address: 10.0.0.1}")
    theirs = inventory(home, "b.yaml", "node1: {address: 10.0.0.1}")
    cordon(home, ours, "h1")
    folder = submit(home, theirs)
    done = Allocator(home).run_pass(now_s=2.0)
    assert done.granted == () and folder.record().state is State.QUEUED
    assert done.snapshots[str(theirs)].unusable == {"node1": "cordoned: Xid 79"}
    assert [row.state for row in Cluster(load_inventory(theirs), home).rows(look(home, now_s=2.0))] == ["cordoned"]


@pytest.mark.parametrize("machine_id", [ONE, ""])
def test_a_host_that_is_renamed_keeps_its_cordon_if_it_has_said_which_machine_it_is(home, machine_id):
    path = inventory(home, "i.yaml", "h1: {}, h2: {}")
    told(home, path, h1=machine_id)
    cordon(home, path, "h1")
    inventory(home, "i.yaml", "node1: {}, h2: {}")
    told(home, path, node1=machine_id)
    assert list(look(home, now_s=2.0).cordoned(load_inventory(path))) == (["node1"] if machine_id else [])


def test_a_name_that_is_another_machine_now_does_not_inherit_the_cordon(home):
    path = inventory(home, "i.yaml", "h1: {}")
    told(home, path, h1=ONE)
    cordon(home, path, "h1")
    assert list(look(home, now_s=2.0).cordoned(load_inventory(path))) == ["h1"]
    told(home, path, h1=OTHER)
    assert look(home, now_s=2.0).cordoned(load_inventory(path)) == {}
    assert len(submit(home, path).path.name) and len(Allocator(home).run_pass(now_s=2.0).granted) == 1


def test_an_id_that_two_hosts_of_an_inventory_give_says_nothing(home):
    path = inventory(home, "i.yaml", "h1: {}, h2: {}, h3: {}")
    told(home, path, h1=ONE, h2=ONE, h3=OTHER)
    assert [each.id for each in known_machines(load_inventory(path), look(home, now_s=1.0).machines).values()] == [
        "",
        "",
        OTHER,
    ]
    cordon(home, path, "h1")
    assert list(look(home, now_s=2.0).cordoned(load_inventory(path))) == ["h1"]
    submit(home, path, gpus=8)
    ((lease, _),) = Allocator(home).run_pass(now_s=2.0).granted
    assert lease.ids == {"h3": OTHER} and len(lease.grants) == 2


def test_a_drain_asks_gangs_that_know_the_machine_by_another_name(home):
    ours = inventory(home, "a.yaml", "h1: {}, h2: {}")
    theirs = inventory(home, "b.yaml", "node1: {}")
    told(home, ours, h1=ONE)
    told(home, theirs, node1=ONE)
    folder, lease = runs(home, ours, max_restarts=1, gpus=2)
    assert lease.grants[0].host == "h1" and lease.ids == {"h1": ONE}
    cordon(home, theirs, "node1", "draining")
    view = look(home, now_s=10.0)
    (left,) = departures_of(view, load_inventory)
    assert (left.gang, left.hosts, left.fate) == (folder.id, ("h1",), "moves")
    (shown,) = Cluster(load_inventory(theirs), home).departures(view, ["node1"])
    assert shown.hosts == ("node1",)
    (row,) = Cluster(load_inventory(theirs), home).rows(view)
    assert (row.state, row.shown) == ("draining", "draining: 1 gang leaves")
    assert DrainWatch(home, lambda: lease).hosts(["h1"]) == ["h1"]
    assert DrainWatch(home, lambda: replace(lease, ids={"h1": OTHER})).hosts(["h1"]) == []
    Allocator(home).run_pass(now_s=11.0)
    request = folder.cancel_request()
    assert request.kind == "preempt" and request.reason == "gpurun drains h1 (Xid 79)"


def test_a_host_that_is_renamed_while_a_gang_holds_it_is_not_free(home):
    """Its address comes from ssh_config, so that the new name is another address."""
    path = inventory(home, "i.yaml", "h1: {}")
    told(home, path, h1=ONE)
    folder, _ = runs(home, path)
    inventory(home, "i.yaml", "node1: {}")
    told(home, path, node1=ONE)
    view = look(home, now_s=5.0)
    (row,) = Cluster(load_inventory(path), home).rows(view)
    assert (row.free, row.held) == (0, 4)
    assert {
        holder.job
        for holder in view.occupancy.on(row.host, known_machines(load_inventory(path), view.machines)["node1"]).values()
    } == {folder.id}
    submit(home, path)
    assert Allocator(home).run_pass(now_s=6.0).granted == ()
    assert view.occupancy.jobs_by_machine() == {"h1:22": [folder.id]}


def test_one_user_s_ids_are_not_another_s(home, monkeypatch):
    path = inventory(home, "i.yaml", "h1: {}")
    told(home, path, h1=ONE)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert look(home, now_s=1.0).machines == {}


def test_a_lost_host_is_lost_whatever_it_is_called_and_its_fence_brings_it_back_everywhere(home):
    ours = inventory(home, "a.yaml", "h1: {}, h2: {}")
    theirs = inventory(home, "b.yaml", "node1: {}, h1: {}")
    told(home, ours, h1=ONE)
    told(home, theirs, node1=ONE)
    _, lease = runs(home, ours, constraints=Constraints(hosts=("h1",)))
    told(home, theirs, h1=OTHER)  # another machine by now
    job = SimpleNamespace(home=home, lease=lease, clock=lambda: 9.0, note=lambda _: None, hardware={})
    cordon_lost(job, {"h1": HostUnreachable("no answer", host="h1")})
    seen = look(home, now_s=10.0)
    assert {name: found.state for name, found in seen.cordoned(load_inventory(theirs)).items()} == {"node1": "lost"}
    found_again(home, lease, ["h2"])
    assert look(home, now_s=10.0).cordoned(load_inventory(theirs))
    found_again(home, lease, ["h1"])
    assert look(home, now_s=10.0).cordons == {}


@pytest.mark.parametrize(
    ("said", "machine_id"),
    [
        ({"h1": ONE}, ONE),
        ({}, ""),
        ({"h1": ""}, ""),
        ({"h1": "\x1b[2J"}, ""),
        ({"h1": ONE, "h2": ONE}, ""),
        ({"h2": ONE}, ""),
    ],
)
def test_a_failed_host_is_cordoned_by_the_id_that_it_gave_to_pre_flight(home, said, machine_id):
    """The first job of a user is granted before anybody has looked at the host."""
    path = inventory(home, "i.yaml", "h1: {}, h2: {}")
    _, lease = runs(home, path, gpus=8)
    assert lease.ids == {}
    hardware = {host: Hardware(host, machine_id=each) for host, each in said.items()}
    job = SimpleNamespace(
        home=home, lease=lease, clock=lambda: 9.0, note=lambda _: None, hardware=hardware, events=Events()
    )
    failure = FirstFailure("Xid 79", host="h1", kind="xid", cordon=True)
    assert cordon_suspect(job, failure) is None
    (found,) = Cordons(home).read().values()
    assert (found.machine, found.id) == ("h1:22", machine_id)


class Events:
    def emit(self, *_, **__):
        pass
