"""Leases that people removed, copied or put back, and inventories that they edited under a lease."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
from actors import finish_interrupted

from gpurun.errors import StateError, StateUnavailable
from gpurun.head.spawn import Head
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import State
from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.jobs.store import JobStore, finish
from gpurun.leases import allocate
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease, as_granted, machines_of
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
from gpurun.state import locks
from gpurun.state.paths import StatePath
from gpurun.supervisor import __main__ as process
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.stop import lose_rest

HEAD = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
"""
INVENTORY = HEAD + "racks: {r1: {hosts: {h1: {}, h2: {}}}}\n"


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    return path


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def submit(home, inventory, gpus=4, **more):
    spec = JobSpec(name="n", image="i", gpus=gpus, command=("true",), **more)
    return JobStore(home).create(spec, inventory=inventory, now_s=1.0)


@pytest.fixture
def running(home, inventory):
    """A job with a lease whose supervisor lives: the test holds the lock."""
    folder = submit(home, inventory)
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    folder.move(State.PREPARING)
    return folder, lease, lock


@pytest.fixture
def started(monkeypatch):
    names = []
    monkeypatch.setattr(
        "gpurun.head.spawn.Head.start_supervisor", lambda _self, lease, *_, **__: names.append(lease.name)
    )
    return names


def copy_over(path):
    """As an editor or a backup writes: another file of the same content takes the name."""
    shutil.copy(path, path.with_name(".draft"))
    path.with_name(".draft").replace(path)


def test_a_lease_file_that_an_editor_replaced_gets_no_second_supervisor(home, running, started):
    folder, _, lock = running
    copy_over(LeaseStore(home).path(folder.id).plain)
    assert not lock.is_current()
    assert Head(home, {}).adopt_orphans() == ()
    lock.close()
    assert Head(home, {}).adopt_orphans() == (folder.id,)
    assert started == [folder.id]


@pytest.mark.parametrize("lost", [False, True])
def test_a_read_lock_keeps_no_job_from_adoption(home, running, started, lost):
    """Everybody of the group can read a lease, so everybody can hold a read lock on it."""
    folder, lease, lock = running
    leases = LeaseStore(home)
    if lost:
        lease, lock = leases.abandon(lock, lease, {"h1"})
    reader = os.open(leases.path(lease.name).plain, os.O_RDONLY)
    assert Head(home, {}).adopt_orphans() == (), "its supervisor lives"
    lock.close()
    assert locks.try_take(reader, shared=True)
    assert Head(home, {}).adopt_orphans() == (folder.id,)
    assert (started, leases.is_alive(lease.name), leases.read_all().leases) == ([lease.name], True, (lease,))
    assert Head(home, {}).adopt_orphans() == ()
    if not lost:
        leases.path(folder.id).unlink()
        assert leases.restore(folder.id), "the new file has its second name, too"
    os.close(reader)


def test_a_job_whose_supervisor_lives_is_not_over_though_its_lease_is_unreadable_and_gone(home, running):
    folder, _, lock = running
    leases = LeaseStore(home)
    leases.second_name(folder.id).plain.write_bytes(b"{")  # both names are of one file
    leases.path(folder.id).unlink()
    finish_interrupted(home)
    assert folder.record().state is State.PREPARING
    lock.close()
    finish_interrupted(home)
    assert folder.record().state is State.FAILED


@pytest.mark.parametrize("damage", [b"", b"{", b"null"])
def test_a_removed_lease_frees_nothing_though_the_job_s_record_is_damaged_too(home, inventory, running, damage):
    folder, _, lock = running
    submit(home, inventory)
    LeaseStore(home).path(folder.id).unlink()
    (folder.path / "state.json").plain.write_bytes(damage)
    assert Allocator(home).run_pass(now_s=3.0).granted == ()
    lock.close()


def test_a_release_that_cannot_look_at_the_second_name_is_repeated(home, running, monkeypatch):
    """A second name that stayed would make another process restore the lease of an attempt that is over."""
    folder, _, lock = running
    leases, examine = LeaseStore(home), StatePath.stat

    def short(path):
        if path == leases.second_name(folder.id):
            raise StateUnavailable("this process has too many open files", where=str(path))
        return examine(path)

    with monkeypatch.context() as patch:
        patch.setattr(StatePath, "stat", short)
        with pytest.raises(StateUnavailable):
            leases.release(lock)
    leases.release(lock)
    assert not leases.path(folder.id).exists() and not leases.second_name(folder.id).exists()


def test_a_release_leaves_the_second_name_of_a_later_attempt(home, running):
    folder, lease, lock = running
    leases = LeaseStore(home)
    leases.path(folder.id).unlink()
    leases.second_name(folder.id).unlink()
    later = leases.grant(replace(lease, attempt=2), Occupancy())
    leases.release(lock)
    assert leases.read(folder.id).attempt == 2
    leases.path(folder.id).unlink()
    assert leases.restore(folder.id)
    assert leases.read(folder.id).attempt == 2
    later.close()


def put_back(home, folder, lock, outcome):
    """The attempt ends, and somebody puts its lease back: that lease, and its lock as an adopter takes it."""
    leases = LeaseStore(home)
    data = leases.path(folder.id).plain.read_bytes()
    leases.release(lock)
    lock.close()
    folder.move(State.STOPPING, outcome=outcome)
    finish(JobStore(home), folder.record(), now_s=3.0)
    leases.path(folder.id).plain.write_bytes(data)
    (taken,) = leases.take_orphans(os.getuid())
    return taken


def test_the_lease_of_an_ended_job_that_was_put_back_is_fenced_before_its_gpus_are_free(home, inventory, running):
    folder, lease, lock = running
    leases = LeaseStore(home)
    found, orphan = put_back(home, folder, lock, State.CANCELLED)
    lost, kept = lose_rest(home, found, orphan)
    assert (lost.lost, lost.grants) == (True, lease.grants)
    assert [one.name for one in leases.read_all().leases] == [f"{folder.id}.1.lost"]
    submit(home, inventory)
    assert Allocator(home).run_pass(now_s=3.0).granted == ()
    kept.close()


def test_the_lease_of_an_attempt_that_is_over_starts_nothing_when_it_is_put_back(home, running, monkeypatch):
    """The job waits for its next attempt. Carried on, the lease would begin the last one again."""
    folder, lease, lock = running
    found, orphan = put_back(home, folder, lock, State.QUEUED)
    asked = []
    monkeypatch.setattr(process, "keep_asking", lambda home, lease, lock: asked.append(lease) or lock.close())
    process._carry(home, found, orphan)
    assert [(one.lost, one.attempt) for one in asked] == [(True, lease.attempt)]
    assert folder.record().state is State.QUEUED


def test_who_finds_that_another_supervisor_has_decided_the_end_does_not_decide_again(running):
    folder, _, lock = running
    folder.move(State.STOPPING, outcome=State.CANCELLED)
    with pytest.raises(StateError, match="already decided the outcome"):
        folder.move(State.STOPPING, outcome=State.FAILED)
    assert folder.record().outcome is State.CANCELLED
    lock.close()


def test_a_supervisor_that_lives_on_without_its_lease_does_not_undo_the_end_that_another_command_wrote(home, running):
    folder, lease, lock = running
    LeaseStore(home).path(folder.id).unlink()
    LeaseStore(home).second_name(folder.id).unlink()
    job = SupervisedJob(home, lease, lock)
    job.amend(uncut=("h1",))
    finish_interrupted(home)
    assert folder.record().state is State.FAILED
    with pytest.raises(StateError, match="another process has changed the job: the job's state is now FAILED"):
        job.amend(uncut=())
    assert folder.record().state is State.FAILED
    lock.close()


def test_a_damaged_record_is_replaced_by_who_carries_the_job(home, running):
    folder, lease, lock = running
    job = SupervisedJob(home, lease, lock)
    (folder.path / "state.json").plain.write_text("{")
    job.amend(uncut=("h1",))
    assert (folder.record().state, folder.record().uncut) == (State.PREPARING, ("h1",))
    lock.close()


def test_a_gang_keeps_its_machines_when_somebody_changes_their_addresses(inventory, running):
    """Else a fence of another machine would free the GPUs of the one on which the gang runs."""
    _, lease, lock = running
    inventory.write_text(HEAD + "racks: {r1: {hosts: {h1: {address: h2}, h2: {address: 10.0.0.9, port: 2222}}}}\n")
    found = as_granted(load_inventory(inventory), lease)
    assert [(host.name, host.machine) for host in found.hosts] == [("h1", "h1:22"), ("h2", "h2:22")]
    assert machines_of(found, lease.grants) == dict(lease.machines)
    lock.close()


@pytest.mark.parametrize("hosts", ["{h1: {}}", "{h3: {}}"])
def test_a_host_that_was_removed_from_the_inventory_is_still_reached_for_its_gang(inventory, running, hosts):
    _, lease, lock = running
    inventory.write_text(HEAD + f"racks: {{r1: {{hosts: {hosts}}}}}\n")
    found = as_granted(load_inventory(inventory), lease)
    assert found.by_name["h2"].machine == "h2:22"
    assert found.by_name["h2"].user == "train"
    assert found.fabric_of(found.by_name["h2"]).interface == "eth0"
    lock.close()


@pytest.mark.parametrize("racks", ["{}", "{r1: {}}", "{r1: {hosts: {}}}"])
def test_a_gang_is_still_reached_when_somebody_removed_every_host_from_the_inventory(inventory, running, racks):
    _, lease, lock = running
    inventory.write_text(HEAD + f"racks: {racks}\n")
    found = as_granted(load_inventory(inventory), lease)
    assert [(host.name, host.machine) for host in found.hosts] == [("h1", "h1:22"), ("h2", "h2:22")]
    lock.close()


@pytest.mark.parametrize(
    "hosts", ["{h1: {address: h2}, h2: {address: h1}}", "{x1: {address: h1}, h2: {}}", "{h1: {address: h2}}"]
)
def test_a_gang_gets_the_free_machine_though_hosts_changed_names_under_a_running_gang(home, inventory, hosts):
    submit(home, inventory, gpus=2)
    ((first, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    assert first.machines == {"h1": "h1:22"}
    folder = submit(home, inventory, gpus=2)
    inventory.write_text(HEAD + f"racks: {{r1: {{hosts: {hosts}}}}}\n")
    done = Allocator(home).run_pass(now_s=3.0)
    assert done.problems == ()
    ((lease, other),) = done.granted
    assert (lease.job, *lease.machines.values()) == (folder.id, "h2:22")
    lock.close()
    other.close()


def test_a_gang_waits_while_the_only_machine_is_held_under_another_name(home, inventory):
    submit(home, inventory, gpus=4)
    ((_, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    submit(home, inventory, gpus=2)
    inventory.write_text(HEAD + "racks: {r1: {hosts: {x1: {address: h1}, h1: {address: h2}}}}\n")
    done = Allocator(home).run_pass(now_s=3.0)
    assert (done.granted, done.problems) == ((), ())
    lock.close()


@pytest.mark.parametrize("machine", ["", "h1", ":", "h1:", ":22", "h1:ssh", "h1:22 ", "h1:1000000"])
def test_a_lease_whose_machine_is_none_is_damaged_so_nothing_is_granted(home, inventory, running, machine):
    folder, _, lock = running
    path = LeaseStore(home).path(folder.id).plain
    path.write_text(path.read_text().replace('"h1:22"', json.dumps(machine)))
    with pytest.raises(StateError, match="not the address of a machine"):
        Allocator(home).run_pass(now_s=3.0)
    lock.close()


def test_a_job_waits_when_every_port_for_a_job_s_sshd_is_in_use(home, inventory, monkeypatch):
    monkeypatch.setattr(allocate, "SSH_PORTS", range(23022, 23024))
    submit(home, inventory, gpus=1)
    submit(home, inventory, gpus=1)
    done = Allocator(home).run_pass(now_s=2.0)
    assert [lease.ssh_port for lease, _ in done.granted] == [23022]
    assert ["ports" in str(problem) for problem in done.problems] == [True]
    done.granted[0][1].close()


def test_a_gang_whose_ranks_have_roles_has_its_ports_for_itself(home, inventory, monkeypatch):
    """A worker and two ranks without a GPU: three ports, and two of the gang's own."""
    monkeypatch.setattr(allocate, "SSH_PORTS", range(23022, 23033))
    for _ in range(3):
        submit(home, inventory, gpus=1, roles=Roles(ps=1, workers=1, chief=True))
    done = Allocator(home).run_pass(now_s=2.0)
    assert [lease.ports for lease, _ in done.granted] == [range(23022, 23027), range(23027, 23032)]
    assert [
        "the job needs 5 consecutive ports, but too few of gpurun's 11 ports are free" in str(problem)
        for problem in done.problems
    ] == [True]
    for _, lock in done.granted:
        lock.close()


def test_ports_in_a_row_are_taken_from_the_first_gap_that_is_wide_enough():
    assert allocate.free_ports({23023, 23026}, 2) == 23024
    assert allocate.free_ports({23023, 23026}, 3) == 23027
    last = allocate.SSH_PORTS[-1]
    assert allocate.free_ports(set(), 2, begin=last - 1) == last - 1
    assert allocate.free_ports(set(), 2, begin=last) is None


@pytest.mark.parametrize("count", [0, -1, 10**12])
def test_a_lease_of_as_many_ports_as_no_host_has_is_damaged_so_nothing_is_granted(home, inventory, running, count):
    folder, _, lock = running
    path = LeaseStore(home).path(folder.id).plain
    path.write_text(json.dumps({**json.loads(path.read_text()), "port_count": count}))
    with pytest.raises(StateError, match="not a number of ports"):
        Allocator(home).run_pass(now_s=3.0)
    lock.close()


def test_hosts_of_a_lease_of_an_older_version_are_as_the_inventory_says(inventory, running):
    _, lease, lock = running
    inventory.write_text(HEAD + "racks: {r1: {hosts: {h1: {address: 10.0.0.9}}}}\n")
    found = as_granted(load_inventory(inventory), replace(lease, machines={}))
    assert [(host.name, host.machine) for host in found.hosts] == [("h1", "10.0.0.9:22"), ("h2", "h2:22")]
    lock.close()


@pytest.mark.parametrize("damage", [b"", b"{", b"null"])
def test_a_gang_whose_record_is_damaged_does_not_grow(home, inventory, running, damage):
    folder, lease, lock = running
    (folder.path / "state.json").plain.write_bytes(damage)
    smaller = replace(lease, grants=lease.grants[:1])
    assert Allocator(home).grow((smaller, lock), load_inventory(inventory), now_s=3.0) == ((smaller, lock), ())
    lock.close()


def test_a_lease_that_names_a_gpu_twice_is_refused_whole():
    occupancy = Occupancy()
    lease_gpus = (Grant("h1", (0, 1)), Grant("x1", (1,)))
    lease = Lease(
        "j-00000001", 1, "me", 0, "pascal", ("r1",), lease_gpus, 23022, 1.0, "/i.yaml",
        machines={"h1": "h1:22", "x1": "h1:22"},
    )  # fmt: skip
    with pytest.raises(StateError, match="one machine"):
        occupancy.grant(lease)
    occupancy.grant(replace(lease, grants=lease_gpus[:1]))
