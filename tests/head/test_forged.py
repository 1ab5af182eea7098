"""A lease that names an inventory which its owner did not choose is never adopted: an inventory runs commands."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.errors import StateError
from gpurun.head import children, spawn
from gpurun.head.claims import Claims
from gpurun.jobs.record import GpuHolder
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import remember
from gpurun.leases.store import LeaseStore
from gpurun.state import durable
from gpurun.state.sharing import StateDirectory

ME = os.getuid()
INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose supervisor was never started, and what is started instead."""
    started = []
    popen = SimpleNamespace(DEVNULL=None, Popen=lambda argv, **_: started.append(argv[3]))
    monkeypatch.setattr(children, "subprocess", popen)
    for name in ("inventory.yaml", "hostile.yaml"):
        (tmp_path / name).write_text(INVENTORY)
    (tmp_path / "hostile.yaml").chmod(0o666)  # else root would take it for its own
    home = tmp_path / "home"
    folder = JobStore(home).create(JobSpec("n", "i", 4, ("true",)), inventory=tmp_path / "inventory.yaml", now_s=1.0)
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    lock.close()
    return SimpleNamespace(
        home=home, folder=folder, lease=lease, started=started, hostile=str(tmp_path / "hostile.yaml"), top=tmp_path
    )


def plant(job, lease):
    """Put a lease's file where it belongs, as a rename of a file of this user's does."""
    path = LeaseStore(job.home).path(lease.name)
    path.unlink(missing_ok=True)
    durable.write_record(path, lease)
    return path


def test_a_lease_of_the_job_s_own_inventory_is_adopted(job):
    assert spawn.Head(job.home, {}).adopt_orphans() == (job.folder.id,)
    assert job.started == [job.folder.id]
    assert list(Claims(job.home).forged_leases()) == []


def test_another_way_to_spell_the_inventory_is_the_same(job):
    (job.top / "link.yaml").symlink_to(job.top / "inventory.yaml")
    Claims(job.home).check_lease(replace(job.lease, inventory=str(job.top / "link.yaml")))


@pytest.mark.parametrize("lost", [False, True])
def test_a_link_to_the_inventory_that_leads_elsewhere_since_the_grant_keeps_nobody_from_adoption(job, lost):
    """People keep versions of an inventory, and a link to the present one."""
    path = job.top / "current.yaml"
    path.symlink_to(job.top / "inventory.yaml")
    linked = JobStore(job.home).create(JobSpec("n", "i", 4, ("true",)), inventory=path, now_s=1.0)
    ((lease, lock),) = Allocator(job.home).run_pass(now_s=3.0).granted
    lock.close()
    path.unlink()
    path.symlink_to(job.hostile)
    assert lease.job == linked.id
    Claims(job.home).check_lease(replace(lease, lost=lost))
    with pytest.raises(StateError, match="forged"):
        Claims(job.home).check_lease(replace(lease, lost=lost, inventory=f"{job.hostile}.old"))


@pytest.mark.parametrize("lost", [False, True])
def test_another_inventory_is_never_adopted(job, lost):
    path = plant(job, replace(job.lease, inventory=job.hostile, lost=lost))
    if lost:
        LeaseStore(job.home).path(job.folder.id).unlink()
        LeaseStore(job.home).second_name(job.folder.id).unlink(missing_ok=True)
    assert spawn.Head(job.home, {}).adopt_orphans() == ()
    assert job.started == []
    (error,) = Claims(job.home).forged_leases()
    assert error.where == str(path)
    assert "may be forged" in error.message


def test_a_second_name_with_another_inventory_is_given_back_its_name_but_not_adopted(job):
    LeaseStore(job.home).path(job.folder.id).unlink()
    second = LeaseStore(job.home).second_name(job.folder.id)
    second.unlink()
    durable.write_record(second, replace(job.lease, inventory=job.hostile))
    assert spawn.Head(job.home, {}).adopt_orphans() == ()
    assert job.started == []
    assert len(list(Claims(job.home).forged_leases())) == 1


@pytest.mark.parametrize("found", [False, True])
def test_a_lost_lease_of_a_job_that_is_gone_needs_an_inventory_that_its_owner_has_used(job, found):
    gone = replace(job.lease, job="j-0000dead", lost=True, found=found)
    plant(job, replace(gone, inventory=job.hostile))
    plant(job, replace(gone, attempt=2))
    assert set(spawn.Head(job.home, {}).adopt_orphans()) == {job.folder.id, "j-0000dead"}
    assert set(job.started) == {job.folder.id, "j-0000dead.2.lost"}


def test_a_lost_lease_may_name_the_inventory_of_another_job_that_was_refused_the_gpus(job):
    """Whoever made it may have died before its supervisor was started."""
    (job.top / "other.yaml").write_text(INVENTORY)
    (job.top / "other.yaml").chmod(0o666)  # else root would take it for its own
    found = replace(job.lease, lost=True, found=True, inventory=str(job.top / "other.yaml"))
    with pytest.raises(StateError, match="forged"):
        Claims(job.home).check_lease(found)
    JobStore(job.home).create(JobSpec("n", "i", 1, ("true",)), inventory=job.top / "other.yaml", now_s=3.0)
    Claims(job.home).check_lease(found)
    with pytest.raises(StateError, match="forged"):
        Claims(job.home).check_lease(replace(found, lost=False))


def test_a_lost_lease_that_its_owner_carries_is_no_alarm(job):
    """`recover --claims` makes one for an inventory that a person names, against which this user may have no job."""
    path = plant(job, replace(job.lease, job="j-0000dead", lost=True, found=True, inventory=job.hostile))
    lock = LeaseStore(job.home).try_lock("j-0000dead.1.lost")
    assert list(Claims(job.home).forged_leases()) == []
    lock.close()
    assert [error.where for error in Claims(job.home).forged_leases()] == [str(path)]


def test_a_lease_without_a_job_is_not_adopted(job):
    with pytest.raises(StateError):
        Claims(job.home).check_lease(replace(job.lease, job="j-0000dead"))


def test_a_lease_of_another_owner_than_the_job_s_is_refused(job):
    with pytest.raises(StateError, match="the lease's job belongs to"):
        Claims(job.home).check_lease(replace(job.lease, owner_uid=ME + 1))


def test_a_refusal_in_somebody_s_record_does_not_choose_the_inventory(job, monkeypatch):
    """Another user's record may name this user as the holder, and any inventory as the one that knows the host."""
    holder = GpuHolder((0,), "j-0000dead", 1, "me", ME, "head", StateDirectory(job.home).id())
    record = job.folder.record().but(owner_uid=ME + 1, refusals=remember((), {"h1": [holder]}, now_s=time.time()))

    def says(record):
        monkeypatch.setattr(JobStore, "live_jobs", lambda *_: {"j-0000000b": SimpleNamespace(record=record)})
        return [claim.inventory for claim in Claims(job.home).to_adopt(JobStore(job.home).live_records())]

    assert says(record) == [job.lease.inventory], "this user has used that inventory too"
    assert says(record.but(inventory=job.hostile)) == []
