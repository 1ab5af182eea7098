"""A pass that decides on a stale index grants nothing: a job's own files have the last word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurun.jobs import store as index
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore
from gpurun.state import caches

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks:
  r1: {hosts: {h1: {}}}
  r2: {hosts: {h2: {generation: volta}}}
"""
VOLTA = JobSpec("n", "i", 4, ("true",), constraints=Constraints(generations=("volta",)))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A state directory in which no job may start yet, and an index that knows all of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "FEW", 0)
    monkeypatch.setattr(caches, "is_settled", lambda *_: True)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path / "home"


def queued(home, spec=VOLTA):
    folder = JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=1.0)
    assert JobStore(home).live_jobs(pytest.fail)[folder.id].wants == spec.wants
    return folder


def in_place(path, change):
    """As an editor that does not replace the file: the folder is as it was."""
    path.plain.write_bytes(change(path.read_bytes()))


def granted(home):
    done = Allocator(home).run_pass(now_s=2.0)
    for _, lock in done.granted:
        lock.close()
    return [(lease.job, [grant.host for grant in lease.grants]) for lease, _ in done.granted], done.problems


def test_a_spec_that_was_damaged_in_place_is_not_granted_by_what_it_was(home):
    folder = queued(home)
    in_place(folder.path / "spec.json", lambda _: b"{")
    for _ in range(2):
        found, problems = granted(home)
        assert found == []
        assert {problem.where for problem in problems} == {str(folder.path / "spec.json")}
    assert LeaseStore(home).read_all().leases == ()


def test_a_spec_that_was_edited_in_place_is_granted_as_it_is(home):
    folder = queued(home)
    in_place(folder.path / "spec.json", lambda data: data.replace(b"volta", b"pascal"))
    assert granted(home) == ([], ())
    assert granted(home) == ([(folder.id, ["h1"])], ())


def test_a_job_that_was_ended_in_place_is_not_granted(home):
    folder = queued(home)
    in_place(folder.path / "state.json", lambda data: data.replace(b"QUEUED", b"FAILED"))
    for _ in range(2):
        assert granted(home) == ([], ())
    assert folder.record().state is State.FAILED


def test_a_cancel_that_comes_while_a_pass_decides_is_heard(home, monkeypatch):
    folder = queued(home)
    real = JobStore.live_jobs

    def then_cancelled(store, on_problem):
        found = real(store, on_problem)
        folder.ask_to_cancel(CancelRequest("cancel", "me", 1.0))
        return found

    monkeypatch.setattr(JobStore, "live_jobs", then_cancelled)
    assert granted(home) == ([], ())


def test_others_are_granted_beside_a_job_that_changed(home):
    stale, other = queued(home), queued(home, replace(VOLTA, constraints=Constraints(generations=("pascal",))))
    in_place(stale.path / "spec.json", lambda data: data.replace(b"volta", b"pascal"))
    assert granted(home) == ([(other.id, ["h1"])], ())


def test_a_folder_that_is_gone_is_not_granted(home, monkeypatch):
    folder = queued(home)
    real = JobStore.live_jobs

    def then_removed(store, on_problem):
        found = real(store, on_problem)
        if folder.path.exists():
            folder.path.rmtree()
        return found

    monkeypatch.setattr(JobStore, "live_jobs", then_removed)
    found, problems = granted(home)
    assert found == []
    assert [problem.where for problem in problems] == [str(folder.path / "state.json")]
