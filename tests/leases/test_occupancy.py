"""One truth about GPUs: whatever paths, names and files people use, no GPU is granted twice."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace

import pytest
from actors import finish_interrupted
from waiting import LIMIT_S

from gpurun.errors import StateError
from gpurun.head.spawn import Head
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import GpuHolder, HostRefusal, State
from gpurun.jobs.spec import Constraints, Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases import allocate
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease, machines_of
from gpurun.leases.look import Cluster, look
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.state import durable

HEAD = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
"""
INVENTORY = HEAD + "racks: {r1: {hosts: {h1: {}}}}\n"
LEASE = Lease("j-00000001", 1, "me", os.getuid(), "pascal", ("r1",), (Grant("h1", (0, 1)),), 23022, 1.0, "/i.yaml")


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    return path


def submit(home, inventory, gpus=4, **more):
    spec = JobSpec(name="n", image="i", gpus=gpus, command=("true",), **more)
    return JobStore(home).create(spec, inventory=inventory, now_s=1.0)


def granted(done):
    """(machine, GPU) of every grant; the test fails if one is there twice."""
    gpus = [
        (lease.machines[grant.host], gpu) for lease, _ in done.granted for grant in lease.grants for gpu in grant.gpus
    ]
    assert len(gpus) == len(set(gpus))
    return gpus


def spellings(tmp_path, inventory):
    """Other ways to name the same inventory, or the same machine."""
    link = tmp_path / "link.yaml"
    link.symlink_to(inventory)
    folder = tmp_path / "a folder"
    folder.symlink_to(tmp_path)
    (tmp_path / "sub").mkdir()
    clone = tmp_path / "clone.yaml"
    shutil.copy(inventory, clone)
    renamed = tmp_path / "renamed.yaml"
    renamed.write_text(HEAD + "racks: {r1: {hosts: {x1: {address: H1}}}}\n")
    return {
        "dots": tmp_path / "sub" / ".." / inventory.name, "link": link, "folder": folder / inventory.name,
        "clone": clone, "renamed": renamed,
    }  # fmt: skip


@pytest.mark.parametrize("way", ["dots", "link", "folder", "clone", "renamed"])
def test_one_machine_is_granted_once_in_a_pass_however_its_inventory_is_spelled(home, tmp_path, inventory, way):
    submit(home, inventory)
    submit(home, spellings(tmp_path, inventory)[way])
    done = Allocator(home).run_pass(now_s=2.0)
    assert done.problems == ()
    assert len(granted(done)) == 4
    assert [record.state for record in JobStore(home).records(lambda _: None)].count(State.QUEUED) == 1


@pytest.mark.parametrize("way", ["dots", "link", "folder", "clone", "renamed"])
def test_one_machine_is_granted_once_by_two_passes(home, tmp_path, inventory, way):
    submit(home, inventory)
    ((_, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    second = submit(home, spellings(tmp_path, inventory)[way])
    assert Allocator(home).run_pass(now_s=3.0).granted == ()
    LeaseStore(home).release(lock)
    ((lease, _),) = Allocator(home).run_pass(now_s=4.0).granted
    assert lease.job == second.id


def test_paths_that_are_links_are_one_cluster_with_one_queue(home, tmp_path, inventory):
    others = spellings(tmp_path, inventory)
    paths = [inventory, *(others[way] for way in ("dots", "link", "folder"))]
    for path in paths:
        submit(home, path, gpus=1)
    assert list(Allocator(home).run_pass(now_s=2.0, commit=False).decisions) == [str(inventory)]
    assert {load_inventory(path).source for path in paths} == {str(inventory)}


def test_the_same_name_at_another_address_is_another_machine(home, tmp_path, inventory):
    other = tmp_path / "other.yaml"
    other.write_text(HEAD + "racks: {r1: {hosts: {h1: {address: 10.9.9.9}}}}\n")
    submit(home, inventory)
    submit(home, other)
    assert len(granted(Allocator(home).run_pass(now_s=2.0))) == 8


def test_gpus_that_are_kept_for_a_gang_are_not_given_to_another_inventory(home, tmp_path, inventory):
    """A gang that waits for a host to be empty keeps what comes free, also from queues of other inventories."""
    inventory.write_text(HEAD + "racks: {r1: {hosts: {h1: {}, h2: {}}}}\n")
    clone = spellings(tmp_path, inventory)["clone"]
    first = submit(home, inventory, gpus=4, constraints=Constraints(hosts=("h1",)))
    large = submit(home, inventory, gpus=8)
    view = look(home, now_s=2.0)
    placement = [Grant("h1", (0, 1, 2, 3)), Grant("h2", (0, 1, 2, 3))]
    view.occupancy.promise(large.id, placement, load_inventory(inventory))
    assert view.occupancy.taken(load_inventory(clone)) == {"h1": (0, 1, 2, 3), "h2": (0, 1, 2, 3)}
    assert view.occupancy.taken(load_inventory(clone), but=[large.id]) == {}
    assert first.record().state is State.QUEUED


def test_a_grant_is_refused_whole_if_one_gpu_is_held(home):
    occupancy = Occupancy([LEASE])
    wanted = replace(LEASE, job="j-00000002", grants=(Grant("h2", (0,)), Grant("h1", (1, 2))))
    with pytest.raises(StateError, match="GPU 1 is leased to j-00000001"):
        LeaseStore(home).grant(wanted, occupancy)
    assert not (home / "leases").exists() or not os.listdir(home / "leases")
    LeaseStore(home).grant(replace(wanted, grants=(Grant("h2", (0,)), Grant("h1", (2, 3)))), occupancy)
    with pytest.raises(StateError, match="GPU 3 is leased to j-00000002"):
        occupancy.grant(replace(LEASE, job="j-00000003", grants=(Grant("h1", (3,)),)))


def test_a_lost_gpu_is_not_its_own_job_s_either():
    lost = replace(LEASE, lost=True)
    occupancy = Occupancy([lost])
    with pytest.raises(StateError, match="is lost to j-00000001"):
        occupancy.grant(replace(LEASE, attempt=2))
    occupancy.free(lost.name)
    occupancy.grant(replace(LEASE, attempt=2))


def test_growth_is_checked_like_a_grant(home):
    leases = LeaseStore(home)
    occupancy = Occupancy([replace(LEASE, job="j-00000002", grants=(Grant("h1", (2, 3)),))])
    lock = leases.grant(LEASE, occupancy)
    with pytest.raises(StateError, match="GPU 2 is leased to j-00000002"):
        leases.grow(lock, replace(LEASE, grants=(Grant("h1", (0, 1, 2)),)), occupancy)
    lock = leases.grow(lock, replace(LEASE, grants=(Grant("h1", (0, 1)), Grant("h2", (0,)))), occupancy)
    assert leases.read(LEASE.job).grants[1] == Grant("h2", (0,))
    lock.close()


def test_leases_that_overlap_on_disk_are_reported_and_neither_is_dropped(home, inventory):
    leases = LeaseStore(home)
    named = machines_of(load_inventory(inventory), LEASE.grants)
    locks = [leases.grant(replace(LEASE, job=job, machines=named), Occupancy()) for job in ("j-00000001", "j-00000002")]
    submit(home, inventory, gpus=3)
    submit(home, inventory, gpus=2)
    done = Allocator(home).run_pass(now_s=2.0)
    assert ["j-00000001 and j-00000002" in str(problem) for problem in done.problems] == [True]
    assert granted(done) == [("h1:22", 2), ("h1:22", 3)]
    assert len(locks) == 2


def test_a_lease_of_an_older_version_holds_the_host_of_its_name(home, tmp_path, inventory):
    LeaseStore(home).grant(LEASE, Occupancy()).close()
    submit(home, inventory, gpus=3)
    submit(home, spellings(tmp_path, inventory)["renamed"], gpus=3)
    assert Allocator(home).run_pass(now_s=2.0).granted == ()


def test_one_inventory_with_pools_that_contradict_stops_no_other(home, tmp_path, inventory):
    broken = tmp_path / "broken.yaml"
    broken.write_text(HEAD + "racks: {r1: {hosts: {h9: {}}}}\npools: {a: {reservation: 3}}\n")
    first = submit(home, broken)
    second = submit(home, inventory)
    broken.write_text(HEAD + "racks: {r1: {hosts: {h9: {}}}}\npools: {a: {reservation: 300}}\n")
    done = Allocator(home).run_pass(now_s=2.0)
    assert [lease.job for lease, _ in done.granted] == [second.id]
    (problem,) = done.problems
    assert "300" in str(problem)
    assert str(broken) in f"{problem} {problem.where}"
    assert first.record().state is State.QUEUED


def test_a_pass_that_fails_inside_one_inventory_goes_on_with_the_next(home, tmp_path, inventory, monkeypatch):
    """Whatever of it is BadInput: the scheduler raises it for pools that validation did not refuse."""
    other = tmp_path / "other.yaml"
    other.write_text(INVENTORY.replace("h1", "h2"))
    submit(home, inventory)
    second = submit(home, other)
    real = allocate.schedule

    def schedule(snapshot):
        if snapshot.inventory.source == str(inventory):
            raise allocate.BadInput("the pools reserve 300 GPUs together")
        return real(snapshot)

    monkeypatch.setattr(allocate, "schedule", schedule)
    done = Allocator(home).run_pass(now_s=2.0)
    assert [lease.job for lease, _ in done.granted] == [second.id]
    assert [problem.where for problem in done.problems] == [str(inventory)]


def test_gangs_of_others_are_asked_once_for_all_inventories(home, tmp_path, inventory, monkeypatch):
    other = tmp_path / "other.yaml"
    other.write_text(INVENTORY.replace("h1", "h2"))
    submit(home, inventory)
    submit(home, other)
    asked = []
    monkeypatch.setattr(Allocator, "ask_to_give_way", lambda _, victims: asked.append(list(victims)))
    Allocator(home).run_pass(now_s=2.0)
    assert asked == [[]], "a second call would withdraw the requests of the first"


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"name": "n", "gpus": "many"}'])
def test_a_job_with_a_damaged_spec_waits_instead_of_starting_without_its_constraints(home, inventory, damage):
    folder = submit(home, inventory, constraints=Constraints(generations=("volta",)))
    (folder.path / "spec.json").plain.write_bytes(damage)
    fine = submit(home, inventory)
    done = Allocator(home).run_pass(now_s=2.0)
    assert [lease.job for lease, _ in done.granted] == [fine.id]
    assert any("spec.json" in str(problem) or folder.id in str(problem) for problem in done.problems)


def test_a_host_that_refused_is_left_alone_by_its_owner_s_gangs_until_the_pause_is_over(home, inventory):
    folder = submit(home, inventory, gpus=2)
    refusal = HostRefusal("h1", GpuHolder((0, 1), "j-0000000f", 1, "eve", head="head2"), until_s=7.0, pause_s=5.0)
    folder.write(folder.record().but(refusals=(refusal,)))
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    assert lease.grants == (Grant("h1", (2, 3)),)
    rows = Cluster(load_inventory(inventory), home).rows(look(home, now_s=3.0))
    assert [(row.free, [each.user for each in row.foreign]) for row in rows] == [(0, ["eve"])]
    LeaseStore(home).release(lock)


def test_refusals_in_another_user_s_record_keep_nobody_away(home, inventory):
    folder = submit(home, inventory)
    refusal = HostRefusal("h1", GpuHolder((0, 1, 2, 3), "j-0000000f", 1, "eve", head="head2"), until_s=7.0, pause_s=5.0)
    folder.write(folder.record().but(refusals=(refusal,)))
    view = replace(look(home, now_s=3.0), uid=os.getuid() + 1)
    view.keep(view.queued(), load_inventory(inventory))
    assert view.occupancy.taken(load_inventory(inventory)) == {}


def test_a_lease_that_a_crash_left_under_another_name_is_renamed_in_no_pass(home, inventory):
    """Who lists the folder while it is renamed could see it under neither name, and grant its GPUs again."""
    folder = submit(home, inventory)
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    leases = LeaseStore(home)
    leases.change(lock, replace(lease, lost=True)).close()  # `abandon`, killed before it has renamed the file
    found = []
    adopter = threading.Thread(target=lambda: found.extend(leases.take_orphans(os.getuid())))
    with AllocatorLock(home).held():
        adopter.start()
        adopter.join(0.3)
        assert leases.folder.names() == [f"{folder.id}.json"]
    adopter.join(LIMIT_S)
    assert leases.folder.names() == [f"{folder.id}.1.lost.json"] and len(found) == 1
    assert leases.is_alive(f"{folder.id}.1.lost")
    found[0][1].close()


class TestARemovedLeaseFile:
    @pytest.fixture
    def running(self, home, inventory):
        folder = submit(home, inventory)
        ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
        folder.move(State.PREPARING)
        return folder, lease, lock

    def test_frees_nothing(self, home, inventory, running):
        submit(home, inventory)
        LeaseStore(home).path(running[0].id).unlink()
        assert Allocator(home).run_pass(now_s=3.0).granted == ()

    def test_is_restored_with_the_lock_of_its_supervisor(self, home, running):
        folder, lease, lock = running
        leases = LeaseStore(home)
        leases.path(folder.id).unlink()
        assert not lock.is_current()
        assert Head(home, {}).adopt_orphans() == ()
        assert lock.is_current()
        assert leases.read(folder.id) == lease
        assert leases.is_alive(folder.id)
        assert "restore" in (home / "audit.jsonl").read_text()

    def test_that_is_restored_while_a_pass_looks_is_seen(self, home, inventory, running, monkeypatch):
        """The pass lists the leases, then somebody restores the one that it missed."""
        folder, _, lock = running
        leases = LeaseStore(home)
        leases.path(folder.id).unlink()
        read_all = LeaseStore.read_all

        def and_then(store):
            found = read_all(store)
            leases.restore(folder.id)
            return found

        monkeypatch.setattr(LeaseStore, "read_all", and_then)
        submit(home, inventory)
        assert Allocator(home).run_pass(now_s=3.0).granted == ()
        lock.close()

    def test_is_adopted_if_its_supervisor_died(self, home, running, monkeypatch):
        folder, lease, lock = running
        lock.close()
        LeaseStore(home).path(folder.id).unlink()
        finish_interrupted(home)
        assert folder.record().state is State.PREPARING, "it has not been fenced"
        started = []
        monkeypatch.setattr(
            "gpurun.head.spawn.Head.start_supervisor", lambda _self, lease, *_, **__: started.append(lease)
        )
        assert Head(home, {}).adopt_orphans() == (folder.id,)
        assert started == [lease]

    def test_stays_removed_after_a_release(self, home, inventory, running):
        folder, _, lock = running
        leases = LeaseStore(home)
        leases.release(lock)
        assert not leases.restore(folder.id)
        assert leases.folder.names() == []
        submit(home, inventory)
        assert len(Allocator(home).run_pass(now_s=3.0).granted) == 1

    def test_is_not_restored_while_its_rest_is_lost(self, home, running):
        folder, lease, lock = running
        leases = LeaseStore(home)
        lost, lost_lock = leases.abandon(lock, lease, {"h1"})
        assert not leases.restore(folder.id)
        assert [each.name for each in leases.read_all().leases] == [lost.name]
        lost_lock.close()

    def test_in_a_growing_gang_the_newest_lease_comes_back(self, home, running):
        folder, lease, lock = running
        leases = LeaseStore(home)
        larger = replace(lease, grants=(*lease.grants, Grant("h2", (0,))))
        lock = leases.grow(lock, larger, Occupancy([lease]))
        leases.path(folder.id).unlink()
        assert leases.restore(folder.id)
        assert leases.read(folder.id) == larger
        lock.close()

    @pytest.mark.parametrize("content", [b"", b"{", b'{"job": "j-00000009"}'])
    def test_a_damaged_second_name_restores_nothing_and_stops_nobody(self, home, inventory, running, content):
        folder, _, lock = running
        leases = LeaseStore(home)
        leases.path(folder.id).unlink()
        durable.write_bytes(leases.second_name(folder.id), content)
        assert not leases.restore(folder.id)
        submit(home, inventory)
        assert Allocator(home).run_pass(now_s=3.0).granted, (
            "a person who removes both names is believed; the host's claim stays"
        )
        lock.close()

    def test_what_lies_in_its_place_by_now_is_not_removed_by_a_release(self, home, running):
        folder, lease, lock = running
        leases = LeaseStore(home)
        leases.path(folder.id).unlink()
        durable.write_record(leases.path(folder.id), replace(lease, attempt=9))
        leases.release(lock)
        assert leases.read(folder.id).attempt == 9
