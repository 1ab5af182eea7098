"""Hosts that join and leave an elastic gang's lease, one file for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.errors import StateError
from gpurun.inventory.read import load_inventory
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases import allocate
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-3]": {}}}}
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def submit(home: Path, gpus: int, least: int | None = None) -> str:
    spec = JobSpec(name="n", image="i", gpus=gpus, min_gpus=least, command=("true",))
    return JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=1.0).id


def grow(home, held):
    return allocate.Allocator(home).grow(held, load_inventory(home / "inventory.yaml"), now_s=3.0)


def granted(home):
    (held,) = Allocator(home).run_pass(now_s=2.0).granted
    return held


def test_a_host_leaves_is_fenced_and_comes_back_under_one_lock(home):
    job, store = submit(home, 6, least=2), LeaseStore(home)
    held = granted(home)
    assert [grant.host for grant in held[0].members] == ["h1", "h2", "h3"]
    held = allocate.Allocator(home).put_apart(held, ["h2"])
    assert [grant.host for grant in store.read(job).members] == ["h1", "h3"]
    assert store.is_alive(job)
    assert Allocator(home).run_pass(now_s=2.0).granted == ()
    other = submit(home, 2)
    assert Allocator(home).run_pass(now_s=2.0).granted == (), "GPUs of a host that is not fenced were given away"
    held, joined = grow(home, held)
    assert joined == ()
    held = allocate.Allocator(home).let_go(held, ["h2"])
    ((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
    assert (lease.job, lease.grants) == (other, (Grant("h2", (0, 1)),))
    assert grow(home, held)[1] == ()
    store.release(lock)
    JobStore(home).get(other).path.plain.rename(home / "gone")
    held, joined = grow(home, held)
    assert joined == ("h2",)
    assert store.read(job).apart == ("h2",)
    held = allocate.Allocator(home).take_in(held, joined)
    assert (held[0].apart, held[0].joins) == ((), ("h2",))
    assert held[1].is_current() and store.read(job) == held[0]


def test_ports_that_move_are_the_jobs_own_for_every_later_pass(home, monkeypatch):
    """Something listens on them: the next job must not be given those to which this one went."""
    job, store = submit(home, 2), LeaseStore(home)
    held = granted(home)
    before = held[0].ssh_port
    monkeypatch.setattr(allocate.random, "randrange", lambda low, high: low)  # the first free one
    moved = allocate.Allocator(home).move_ports(held)
    assert store.read(job).ssh_port == moved[0].ssh_port == before + 2 and moved[1].is_current()
    with monkeypatch.context() as full:
        full.setattr(allocate, "free_ports", lambda *_, **__: None)
        with pytest.raises(StateError, match="all ports that gpurun uses for jobs are in use"):
            allocate.Allocator(home).move_ports(moved)
    assert store.read(job) == moved[0]
    submit(home, 2)
    assert granted(home)[0].ssh_port == before


def test_it_does_not_grow_while_a_lease_is_damaged_or_anybody_waits(home):
    submit(home, 6, least=2)
    held = allocate.Allocator(home).let_go(allocate.Allocator(home).put_apart(granted(home), ["h3"]), ["h3"])
    waiting = submit(home, 6)
    assert grow(home, held)[1] == ()
    JobStore(home).get(waiting).path.plain.rename(home / "gone")
    (home / "leases" / "j-ffffffff.json").write_text("{")
    with pytest.raises(StateError):
        grow(home, held)
    (home / "leases" / "j-ffffffff.json").unlink()
    assert grow(home, held)[1] == ("h3",)
