"""Many supervisors are gone at once, as after a reboot of the head: not all start at one moment, but all start."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from gpurun.errors import StateError
from gpurun.head import children, spawn
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.supervisor import __main__ as process

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 1, fabric: e}
fabrics: {e: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[01-30]": {}}}}
"""
JOBS = 20


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Jobs whose leases nobody holds, and the supervisors that were `started`; with `lives` these hold their lease."""
    seen = SimpleNamespace(home=tmp_path / "home", started=[], lives=True, held=[])

    def popen(argv, *, pass_fds, **_):
        seen.started.append(argv[3])
        assert argv[5:] == ["adopts"]
        if seen.lives:
            seen.held.append(os.dup(pass_fds[0]))

    monkeypatch.setattr(children, "subprocess", SimpleNamespace(DEVNULL=None, Popen=popen))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    specs = [JobSpec("n", "i", 1, ("true",))] * JOBS
    JobStore(seen.home).create_many(specs, inventory=tmp_path / "inventory.yaml", now_s=1.0)
    granted = Allocator(seen.home).run_pass(now_s=2.0).granted
    assert len(granted) == JOBS
    for _, lock in granted:
        lock.close()
    seen.names = sorted(lease.name for lease, _ in granted)
    yield seen
    for descriptor in seen.held:
        os.close(descriptor)


def test_a_command_starts_some_and_each_of_these_the_next_one(world):
    assert len(spawn.Head(world.home, {}).adopt_orphans()) == spawn.ADOPTED_AT_ONCE
    assert world.started == world.names[: spawn.ADOPTED_AT_ONCE]
    for at, name in enumerate(world.started):  # it grows meanwhile
        spawn.Head(world.home, {}).adopt_next(name)
        assert len(world.started) <= spawn.ADOPTED_AT_ONCE + at + 1
    assert world.started == world.names
    assert spawn.Head(world.home, {}).adopt_orphans() == ()


def test_supervisors_that_end_at_once_are_not_started_for_ever(world):
    world.lives = False
    spawn.Head(world.home, {}).adopt_orphans()
    for name in world.started:
        spawn.Head(world.home, {}).adopt_next(name)
    assert set(world.started) == set(world.names)
    assert len(world.started) <= spawn.ADOPTED_AT_ONCE * JOBS


@pytest.mark.parametrize("error", [OSError(11, "no more processes"), StateError("the allocator lock is held")])
def test_a_supervisor_that_cannot_start_the_next_does_its_own_work(world, monkeypatch, capfd, error):
    def fails(*_):
        raise error

    carried = []
    monkeypatch.setenv("GPURUN_HOME", str(world.home))
    monkeypatch.setattr(process.Head, "adopt_next", fails)
    monkeypatch.setattr(process, "_carry", lambda _home, lease, _lock: carried.append(lease.name))
    monkeypatch.setattr(children, "live_on", lambda: None)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert process.main([world.names[0], str(descriptor), "adopts"]) == 0
    os.close(descriptor)
    assert carried == [world.names[0]] and "cannot adopt the next job" in capfd.readouterr().err
