"""A lease that somebody removed frees nothing: what hosts claim for forgotten jobs is taken over and fenced."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.head import children, spawn
from gpurun.head.claims import Claims, FoundClaim, in_refusals, is_forgotten
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import GpuHolder, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import FORGET_S, remember
from gpurun.leases.look import look
from gpurun.leases.store import LeaseStore
from gpurun.state.sharing import FILE, StateDirectory

ME = os.getuid()
INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    return path


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def submit(home, inventory):
    def make(gpus=4):
        return JobStore(home).create(JobSpec("n", "i", gpus, ("true",)), inventory=inventory, now_s=1.0)

    return make


def claim_on(home, inventory, job, *, host="h1", gpus=(0, 1), attempt=1, seen_s=1e12, uid=ME):
    return FoundClaim(
        str(inventory), host, GpuHolder(gpus, job, attempt, "me", uid, "head", StateDirectory(home).id()), seen_s
    )


def adopted(home, *claims):
    found = Claims(home).adopt(claims)
    for _, lock in found:
        lock.close()
    return [lease for lease, _ in found]


def test_a_job_whose_lease_and_record_are_gone_holds_its_gpus_until_the_host_is_fenced(home, inventory, submit):
    waiting = submit(gpus=8)
    (lease,) = adopted(home, claim_on(home, inventory, "j-0000dead"))
    assert (lease.name, lease.grants, lease.owner_uid) == ("j-0000dead.1.lost", (Grant("h1", (0, 1)),), ME)
    assert lease.found, "nobody brought its outputs home: the fence keeps them"
    assert Allocator(home).run_pass(now_s=2.0).granted == ()
    assert look(home, now_s=2.0).occupancy.taken(load_inventory(inventory)) == {"h1": (0, 1)}
    assert waiting.record().state is State.QUEUED


def test_adopting_twice_changes_nothing(home, inventory):
    claim = claim_on(home, inventory, "j-0000dead")
    assert len(adopted(home, claim, claim)) == 1
    assert adopted(home, claim) == []


def test_claims_of_one_attempt_on_several_hosts_are_one_lease(home, inventory):
    claims = [claim_on(home, inventory, "j-0000dead", host=host) for host in ("h1", "h2", "no-such-host")]
    (lease,) = adopted(home, *claims)
    assert lease.grants == (Grant("h1", (0, 1)), Grant("h2", (0, 1)))


def test_gpus_that_are_granted_now_are_left_to_the_next_look(home, inventory, submit):
    submit(gpus=8)
    ((_, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    claim = claim_on(home, inventory, "j-0000dead")
    assert adopted(home, claim) == []
    LeaseStore(home).release(lock)
    assert len(adopted(home, claim)) == 1


def test_a_job_that_is_carried_is_not_forgotten(home, inventory, submit):
    folder = submit()
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    claim = claim_on(home, inventory, folder.id, host="h2")
    assert not is_forgotten(claim, [lease], folder.record())
    assert adopted(home, claim) == []
    LeaseStore(home).path(folder.id).unlink()
    assert adopted(home, claim) == [], "its lease file was removed, but it has another name"
    lock.close()


def test_a_claim_counts_only_if_the_host_had_it_after_the_attempt_was_over(home, inventory, submit):
    """A holder that ended in the usual way a moment ago has released it by now."""
    folder = submit()
    record = folder.record().but(attempt=1)
    ended = record.but(state=State.SUCCEEDED, ended_s=100.0)
    again = record.but(state=State.QUEUED, queued_s=100.0)
    later = record.but(state=State.RUNNING, attempt=2, granted_s=100.0)
    for then in (ended, again, later):
        assert not is_forgotten(claim_on(home, inventory, folder.id, seen_s=99.0), [], then)
        assert is_forgotten(claim_on(home, inventory, folder.id, seen_s=101.0), [], then)
    running = later.but(attempt=1)
    assert not is_forgotten(claim_on(home, inventory, folder.id), [], running)


def test_a_damaged_record_is_left_to_a_person(home, inventory, submit):
    folder = submit()
    (folder.path / "state.json").plain.write_text("{")
    assert adopted(home, claim_on(home, inventory, folder.id)) == []
    shutil.rmtree(folder.path.plain)
    assert len(adopted(home, claim_on(home, inventory, folder.id))) == 1


def test_an_inventory_that_is_gone_stops_nobody(home, inventory):
    claim = replace(claim_on(home, inventory, "j-0000dead"), inventory="/no/such.yaml")
    assert adopted(home, claim) == []


def test_only_this_users_claims_of_this_state_directory_are_found_in_refusals(home, inventory, submit):
    state = StateDirectory(home).id()
    mine = GpuHolder((0,), "j-0000dead", 1, "me", ME, "head", state)
    others = [replace(mine, uid=ME + 1), replace(mine, state="f" * 16), replace(mine, state=""), replace(mine, job="")]
    folder = submit()
    refusals = remember((), {"h1": [mine, *others]}, now_s=1000.0)
    record = folder.write(folder.record().but(refusals=refusals))
    (found,) = in_refusals([record], state, ME, 1001.0)
    assert (found.host, found.holder, found.seen_s) == ("h1", mine, 1000.0)
    assert found.inventory == str(inventory.resolve())
    assert in_refusals([record], None, ME, 1001.0) == ()
    assert in_refusals([record], state, ME, 1001.0 + 2 * FORGET_S) == ()


def test_any_command_adopts_what_a_host_named_in_a_refusal(home, inventory, submit, monkeypatch):
    """The keeper starts although the job's folder is gone."""
    started = []
    popen = SimpleNamespace(DEVNULL=None, Popen=lambda argv, **_: started.append(argv))
    monkeypatch.setattr(children, "subprocess", popen)
    folder = submit()
    holder = GpuHolder((0, 1), "j-0000dead", 1, "me", ME, "head", StateDirectory(home).id())
    folder.write(folder.record().but(refusals=remember((), {"h1": [holder]}, now_s=time.time())))
    assert len(Claims(home).to_adopt(JobStore(home).live_records())) == 1
    assert spawn.Head(home, {}).adopt_orphans() == ("j-0000dead",)
    assert [argv[3] for argv in started] == ["j-0000dead.1.lost"]


def test_a_damaged_identity_stops_no_command(home, submit):
    submit()
    (home / FILE).write_text("{")
    assert Claims(home).to_adopt(JobStore(home).live_records()) == ()
