"""GPUs that no job can have: kept for a job that no pass may start, or decided for one whose grant is refused."""

import os

import pytest

from gpurun.jobs.record import Kept, Restart, State
from gpurun.jobs.spec import Grant, JobSpec, Placement
from gpurun.jobs.store import JobStore
from gpurun.leases import allocate
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import with_refused
from gpurun.scheduler.explain import explain
from gpurun.scheduler.model import Decisions, Gang, Reason, Wait
from gpurun.views.waiting import waiting_jobs, why_it_waits

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def submit(home, gpus, now_s=1.0):
    spec = JobSpec(name="n", image="i", gpus=gpus, command=("true",))
    return JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=now_s)


def granted(home, now_s):
    leases = Allocator(home).run_pass(now_s=now_s).granted
    for _, lock in leases:
        lock.close()
    return [lease.job for lease, _ in leases]


def of_another_user(folder):
    folder.write(folder.record().but(owner_uid=12345, owner="carol"))
    for path in (folder.path.plain, *folder.path.plain.rglob("*")):
        os.chown(path, 12345, -1)


def damaged(folder):
    (folder.path / "spec.json").plain.write_text("{")


def cancelled(folder):
    (folder.path / "cancel.json").plain.write_text('{"kind": "cancel", "by": "x", "asked_s": 1.0}')


@pytest.mark.parametrize("spoil", [
    pytest.param(of_another_user, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")),
    damaged, cancelled,
])  # fmt: skip
def test_nothing_is_kept_for_a_job_that_no_pass_may_start(home, spoil):
    large, everything = submit(home, 16), tuple(Grant(f"h{n}", (0, 1, 2, 3)) for n in (1, 2, 3, 4))
    large.write(large.record().but(kept=Kept(Placement("pascal", ("r1",), everything), "patience")))
    spoil(large)
    mine = submit(home, 4, 2.0).id
    assert granted(home, 3e6) == [mine]


def test_a_job_that_waits_for_its_restart_keeps_its_gpus(home):
    large, everything = submit(home, 16), tuple(Grant(f"h{n}", (0, 1, 2, 3)) for n in (1, 2, 3, 4))
    kept = Kept(Placement("pascal", ("r1",), everything), "patience")
    large.write(large.record().but(kept=kept, restart=Restart(3e6 + 10, 1, 3)))
    submit(home, 4, 2.0)
    assert granted(home, 3e6) == []


def test_a_job_without_free_ports_waits_and_why_says_so(home, monkeypatch):
    monkeypatch.setattr(allocate, "SSH_PORTS", range(23022, 23024))
    first, second = submit(home, 4).id, submit(home, 4, 2.0)
    assert granted(home, 3.0) == [first]
    for commit in (True, False):
        done = Allocator(home).run_pass(now_s=4.0, commit=commit)
        (answer,), (seen,) = done.decisions.values(), done.snapshots.values()
        said = explain(answer, seen, second.id)
        assert said.state == "waits" and "ports" in said.message, commit
    assert "ports" in why_it_waits(home, second.id)
    (row,) = waiting_jobs(Allocator(home).run_pass(now_s=4.0, commit=False), [second.record()])
    assert "ports" in row.message
    assert second.record().state is State.QUEUED


def test_the_first_of_two_waiting_jobs_has_the_last_port_in_a_look_ahead(home, monkeypatch):
    monkeypatch.setattr(allocate, "SSH_PORTS", range(23022, 23024))
    first, second = submit(home, 4).id, submit(home, 4, 2.0).id
    (answer,) = Allocator(home).run_pass(now_s=4.0, commit=False).decisions.values()
    assert [gang.id for gang, _ in answer.starts] == [first]
    assert "ports" in answer.waits[second].message


def test_what_others_met_is_counted_without_the_refused():
    def gang(name):
        return Gang(name, 1, 0.0)

    place = Placement("pascal", ("r1",), (Grant("h1", (0,)),))
    told = Wait(Reason.NO_ROOM, "no", starts_before=3)
    decided = Decisions(
        starts=tuple((gang(name), place) for name in "abc"), waits={"d": told}, order=("a", "b", "c", "d")
    )
    assert with_refused(decided, {}) is decided
    found = with_refused(decided, {"b": "no ports", "other": "x"})
    assert [each.id for each, _ in found.starts] == ["a", "c"]
    assert found.waits == {"d": Wait(Reason.NO_ROOM, "no", starts_before=2),
                           "b": Wait(Reason.NO_ROOM, "no ports", starts_before=1)}  # fmt: skip
