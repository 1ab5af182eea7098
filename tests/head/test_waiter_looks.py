"""A waiter and the looks at hosts: in one process, and as real processes against a port that nobody listens on."""

import os
import time

import pytest
from waiting import until

from gpurun.head import waiter
from gpurun.head.spawn import Head
from gpurun.jobs.record import CancelRequest
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore, end_queued_job
from gpurun.leases.allocate import Pass
from gpurun.leases.look import WaiterLocks
from gpurun.state.hosts import Machine, Machines, Out

UID = os.getuid()
INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {address: 127.0.0.1, port: 1}, h2: {address: 127.0.0.1, port: 2}}}}
"""
OUT = Out("ssh", "power off", 1.0)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    spec = JobSpec(name="n", image="i", gpus=4, command=("true",))
    return JobStore(tmp_path).create(spec, inventory=tmp_path / "inventory.yaml", now_s=1.0)


def end(home, job):
    end_queued_job(JobStore(home), job.record(), CancelRequest("cancel", "test", 2.0), now_s=2.0)


@pytest.fixture
def passes(tmp_path, job, monkeypatch, own_copy):
    """Let a waiter tick, and return after how many ticks it ran a pass; `at_tick` does something between two ticks."""

    def run(at_tick, ticks):
        found, count = [], [0]

        def tick(_seconds):
            count[0] += 1
            at_tick(count[0])
            if count[0] == ticks:
                end(tmp_path, job)

        monkeypatch.setattr(waiter, "PASS_EVERY_S", 10_000.0)
        monkeypatch.setattr(waiter.Head, "run_pass", lambda *_, **__: found.append(count[0]) or Pass())
        own_copy(waiter, "time", sleep=tick)
        waiter.Waiter(tmp_path, {}).wait_for_queue()
        return found

    return run


@pytest.mark.parametrize("machine", [Machine("h1", 5.0, out=OUT), Machine("h2", 5.0)], ids=["out", "back"])
def test_a_host_that_goes_out_or_returns_makes_a_waiter_run_a_pass_at_once(tmp_path, passes, machine):
    Machines(tmp_path).note({"127.0.0.1:2": Machine("h2", 1.0, out=OUT)})
    change = {f"127.0.0.1:{machine.name[1:]}": machine}
    assert passes(lambda tick: tick == 3 and Machines(tmp_path).note(change), 6) == [0, 3]


def test_looks_that_change_nothing_make_no_pass(tmp_path, passes):
    assert passes(lambda tick: Machines(tmp_path).note({"127.0.0.1:1": Machine("h1", float(tick))}), 9) == [0]


def test_real_processes_look_again_at_hosts_that_are_out(tmp_path, job):
    """A waiter, the process that it starts, and ssh."""
    begun_s = time.time()
    Machines(tmp_path).note({f"127.0.0.1:{n}": Machine(f"h{n}", begun_s - 60, out=OUT) for n in (1, 2)})
    Head(tmp_path).ensure_waiter()
    until(lambda: all(known.seen_s > begun_s for known in Machines(tmp_path).read(UID).values()))
    for known in Machines(tmp_path).read(UID).values():
        assert known.out is not None and "refused" in known.out.reason, "the words of the look, no longer the old ones"
        assert known.out.since_s == OUT.since_s
    assert job.record().state.value == "QUEUED"
    end(tmp_path, job)
    until(lambda: not WaiterLocks(tmp_path).lives(UID))
