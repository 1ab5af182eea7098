from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from actors import finish_interrupted
from forked import PopenOfCode
from how_many import count, examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import StateError
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Constraints, Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import AllocatorLock, LeaseStore

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics:
  tcp: {kind: tcp, interface: eth0}
racks:
  r1: {hosts: {"h[1-2]": {}}}
"""
LEASE = Lease(
    job="j-00000001", attempt=1, owner="me", owner_uid=os.getuid(), generation="pascal", racks=("r1",),
    grants=(Grant("h1", (0, 1)),), ssh_port=23022, granted_s=1.0, inventory="/i.yaml",
)  # fmt: skip


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def submit(home: Path, gpus: int, now_s: float = 1.0, **constraints):
    spec = JobSpec(name="n", image="i", gpus=gpus, command=("true",), constraints=Constraints(**constraints))
    return JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=now_s)


def held(home: Path) -> list[tuple[str, int]]:
    leases = LeaseStore(home).read_all()
    assert not leases.damaged
    return [(grant.host, gpu) for lease in leases.leases for grant in lease.grants for gpu in grant.gpus]


def test_a_lease_is_born_locked_and_dies_with_its_holder(home):
    store = LeaseStore(home)
    lock = store.grant(LEASE, Occupancy())
    assert store.is_alive(LEASE.job)
    assert store.try_lock(LEASE.job) is None
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.descriptor])
    lock.close()
    assert store.is_alive(LEASE.job)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not store.is_alive(LEASE.job)
    lock = store.try_lock(LEASE.job)
    store.release(lock)
    assert store.read(LEASE.job) is None
    assert store.try_lock(LEASE.job) is None


def test_what_a_grant_has_seen_is_durable_before_it_is_written(home, monkeypatch):
    """Else a power cut could keep the new lease under the name that a lost one had, and forget where that one went."""
    from gpurun.state import durable

    leases, steps = LeaseStore(home), []
    monkeypatch.setattr(
        durable, "sync_folder", lambda folder: steps.append(sorted(map(str, folder.plain.glob("*.json"))))
    )
    leases.grant(LEASE, Occupancy()).close()
    path = str(leases.path(LEASE.job))
    assert steps[-2:] == [[], [path]]


@pytest.mark.parametrize("gpus", ["[-1, 1]", "[0, 1000000000000]", "[0, 0]"])
def test_a_lease_on_gpus_that_cannot_be_is_damaged(home, gpus):
    LeaseStore(home).grant(LEASE, Occupancy()).close()
    path = LeaseStore(home).path(LEASE.job).plain
    document = {**json.loads(path.read_text()), "grants": [{"host": "h1", "gpus": json.loads(gpus)}]}
    path.write_text(json.dumps(document))
    (error,) = LeaseStore(home).read_all().damaged
    assert "is not a list of GPU indices of a host" in error.message
    submit(home, 1)
    with pytest.raises(StateError, match="gpurun grants no GPUs"):
        Allocator(home).run_pass(now_s=2.0)


def test_what_no_writer_left_is_not_swept_and_stops_nobody(home):
    submit(home, 1)
    (home / "leases" / ".x.tmp").mkdir(parents=True)
    (home / "leases" / ".y.tmp").touch()
    ((_, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    lock.close()
    assert (home / "leases" / ".x.tmp").is_dir()
    assert not (home / "leases" / ".y.tmp").exists()


def test_an_orphan_is_not_taken_for_the_lost_lease_of_its_job(home):
    """The lost rest of attempt 1 is held, attempt 2 is an orphan: each keeps its GPUs and its name."""
    store = LeaseStore(home)
    lost, lost_lock = store.abandon(store.grant(LEASE, Occupancy()), LEASE, {"h1"})
    second = replace(LEASE, attempt=2, grants=(Grant("h2", (0, 1)),))
    store.grant(second, Occupancy()).close()
    ((taken, lock),) = store.take_orphans(LEASE.owner_uid)
    assert (taken, lock.path) == (second, store.path(LEASE.job))
    assert set(store.read_all().leases) == {lost, second}
    lost_lock.close()
    assert [lease for lease, _ in store.take_orphans(LEASE.owner_uid)] == [lost]


def test_looking_for_orphans_is_quick_while_many_run(home):
    store = LeaseStore(home)
    locks = [store.grant(replace(LEASE, job=f"j-{number:08x}"), Occupancy()) for number in range(50)]
    assert list(store.take_orphans(LEASE.owner_uid)) == []  # for ever, if it waited for one of their locks
    assert len(locks) == 50


def test_a_job_whose_lease_was_discarded_ends(home):
    folder = submit(home, 2)
    ((_, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    finish_interrupted(home)
    assert folder.record().state is State.GRANTED
    LeaseStore(home).path(folder.id).plain.write_bytes(b"{")
    finish_interrupted(home)
    assert folder.record().state is State.GRANTED
    LeaseStore(home).release(lock)
    finish_interrupted(home)
    assert (folder.record().state, folder.record().code) == (State.FAILED, 5)
    assert "somebody removed the job's lease" in folder.record().reason


def test_a_second_lease_of_a_job_is_refused(home):
    LeaseStore(home).grant(LEASE, Occupancy())
    with pytest.raises(StateError, match="already has a lease"):
        LeaseStore(home).grant(replace(LEASE, attempt=2), Occupancy())


def test_first_come_first_served_until_nothing_fits(home):
    first, second, third = submit(home, 6, 1.0), submit(home, 4, 2.0), submit(home, 2, 3.0)
    granted = {lease.job for lease, _ in Allocator(home).run_pass(now_s=4.0).granted}
    assert first.id in granted
    assert second.record().state is State.QUEUED
    assert sorted(held(home)) == sorted(set(held(home)))
    assert third.record().state in (State.QUEUED, State.GRANTED)


def test_a_pass_that_only_looks_writes_nothing(home):
    folder = submit(home, 2)
    looked = Allocator(home).run_pass(now_s=2.0, commit=False)
    assert [gang.id for gang, _ in looked.decisions[str(home / "inventory.yaml")].starts] == [folder.id]
    assert folder.record().state is State.QUEUED
    assert held(home) == []


def test_a_crash_between_lease_and_record_is_understood(home):
    folder = submit(home, 2)
    ((_, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    folder.write(folder.record().but(state=State.QUEUED, granted=(), attempt=0))
    assert Allocator(home).run_pass(now_s=3.0).granted == ()
    assert len(held(home)) == 2
    lock.close()


def test_a_cancelled_job_is_not_granted(home):
    folder = submit(home, 2)
    folder.ask_to_cancel(CancelRequest("cancel", "me", 1.0))
    assert Allocator(home).run_pass(now_s=2.0).granted == ()


@pytest.mark.parametrize("damage", [b"", b"\0" * 99, b'{"kind": "cancel"'])
def test_a_damaged_request_fails_no_pass_and_ends_no_job(home, damage):
    folder, other = submit(home, 2), submit(home, 2, now_s=2.0)
    (folder.path / "cancel.json").plain.write_bytes(damage)
    ((_, first), (_, second)) = Allocator(home).run_pass(now_s=3.0).granted
    submit(home, 8, now_s=4.0)
    done = Allocator(home).run_pass(now_s=5.0)
    assert [Path(problem.where) for problem in done.problems] == [(folder.path / "cancel.json").plain]
    assert not any(running.stopping for running in next(iter(done.snapshots.values())).running)
    assert {folder.record().state, other.record().state} == {State.GRANTED}
    finish_interrupted(home)
    assert "damaged" in folder.events.read_text()
    assert Allocator(home).run_pass(now_s=6.0).problems == ()
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("j-00000009.json", b""),
        ("j-00000009.json", b'{"job": "j-00000009"'),
        ("j-00000009.json", b"\0" * 4096),
        ("j-00000009.json", b'{"job": "j-00000001"}'),
        ("notes.txt", b"hello"),
        ("j-1.json", b"{}"),
        ("a'; touch x #.json", b"{}"),
    ],
)
def test_what_is_not_a_lease_stops_every_grant(home, name, content):
    submit(home, 1)
    (home / "leases").mkdir()
    (home / "leases" / name).write_bytes(content)
    with pytest.raises(StateError) as caught:
        Allocator(home).run_pass(now_s=2.0)
    assert name in str(caught.value)
    assert caught.value.exit_code == 5
    assert (home / "leases" / name).read_bytes() == content


@given(st.binary(max_size=200))
@examples("files of any bytes")
def test_no_bytes_are_a_lease_or_a_traceback(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("home") / "leases"
    folder.mkdir()
    (folder / "j-00000001.json").write_bytes(data)
    holdings = LeaseStore(folder.parent).read_all()
    assert holdings.leases == ()
    assert len(holdings.damaged) == 1


def test_a_state_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be made"), AllocatorLock(tmp_path / "file").held():
        pass


RACER = """
import sys
from pathlib import Path
from gpurun.leases.allocate import Allocator
for line in sys.stdin:
    granted = Allocator(Path(line.strip())).run_pass(now_s=2.0).granted
    print(len(granted), flush=True)
"""


def test_two_passes_that_race_for_the_last_gpus(tmp_path):
    racers = [
        PopenOfCode([sys.executable, "-c", RACER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for round_number in range(count("races of two passes")):
            home = tmp_path / str(round_number)
            home.mkdir()
            (home / "inventory.yaml").write_text(INVENTORY)
            submit(home, 5), submit(home, 5)
            for racer in racers:
                racer.stdin.write(f"{home}\n")
                racer.stdin.flush()
            assert sum(int(racer.stdout.readline()) for racer in racers) == 1
            assert len(held(home)) == len(set(held(home))) == 5
    finally:
        for racer in racers:
            racer.stdin.close()
            racer.wait()


def test_locks_are_not_inherited_by_accident(home):
    lock = LeaseStore(home).grant(LEASE, Occupancy())
    assert os.get_inheritable(lock.descriptor) is False
