"""A job that runs, and its supervisor, without any host."""

from __future__ import annotations

import pytest
from local_agents import Hosts

from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.state.boot import ClockReading
from gpurun.state.clock import HeadClock
from gpurun.supervisor.job import SupervisedJob

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""


@pytest.fixture
def world(tmp_path):
    """Hosts with real agents, for tests of outputs."""
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def carry(tmp_path, monkeypatch):
    """Make a job that runs, and its supervisor."""
    monkeypatch.setattr("gpurun.leases.draining.LOOK_S", 0.0)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    jobs = []

    def start(**wants):
        spec = JobSpec(**{"name": "n", "image": "i", "gpus": 2, "command": ("true",), **wants})
        JobStore(tmp_path).create(spec, inventory=tmp_path / "inventory.yaml", now_s=0.0)
        ((lease, lock),) = Allocator(tmp_path).run_pass(now_s=1.0).granted
        job = SupervisedJob(tmp_path, lease, lock, clock=HeadClock(lambda: ClockReading("", 100.0, 100.0)))
        jobs.append(job)
        for state in (State.PREPARING, State.STARTING, State.RUNNING):
            job.move(state, reached="containers", started_s=2.0)
        return job

    yield start
    for job in jobs:
        job.lock.close()
