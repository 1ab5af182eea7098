"""The head's wall clock is set while jobs run and wait: passes of other processes decide as they would have."""

from __future__ import annotations

import pytest

from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases import allocate
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore
from gpurun.scheduler.model import DEFAULT
from gpurun.state import clock
from gpurun.state.boot import ClockReading
from gpurun.state.clock import HeadClock

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
pools: {owner: {reservation: 8}, guest: {reservation: 0}}
"""
STEPS_S = [sign * step_s for step_s in (1.0, 3600.0, 90_000.0, 315_360_000.0) for sign in (-1, 1)]


class Head:
    """A head whose processes are all new: each pass is made by a process that has just started."""

    def __init__(self, home, monkeypatch):
        self.home, self.up_s, self.wall_s, self._patch = home, 50_000.0, 1.8e9, monkeypatch
        (home / "inventory.yaml").write_text(INVENTORY)
        self.passes(0.0)

    def passes(self, for_s, step_s=0.0):
        self.up_s, self.wall_s = self.up_s + for_s, self.wall_s + for_s + step_s
        reading = ClockReading("boot", self.up_s, self.wall_s)
        self._patch.setattr(clock, "_of_process", HeadClock(lambda: reading, is_synchronised=lambda: True))

    def submit(self, gpus, pool):
        spec = JobSpec(name="n", image="i", gpus=gpus, command=("t",), pool=pool, preemptible=True)
        return JobStore(self.home).create(spec, inventory=self.home / "inventory.yaml", now_s=clock.now_s())

    def granted(self):
        found = Allocator(self.home).run_pass(now_s=clock.now_s()).granted
        for _, lock in found:
            lock.close()
        return [lease.job for lease, _ in found]


@pytest.fixture
def head(tmp_path, monkeypatch):
    return Head(tmp_path, monkeypatch)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_borrower_is_protected_for_as_long_as_it_has_run(head, step_s):
    guest = head.submit(8, "guest")
    assert head.granted() == [guest.id]
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        guest.move(state, started_s=clock.now_s())
    head.passes(DEFAULT.min_run_s - 20.0, step_s)
    head.submit(8, "owner")
    assert head.granted() == [] and guest.cancel_request() is None
    head.passes(30.0)
    assert head.granted() == [] and guest.cancel_request().kind == "preempt"


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_large_gang_is_patient_for_as_long_as_it_has_waited(head, step_s):
    small = [head.submit(4, None) for _ in range(2)]
    assert len(head.granted()) == 2
    large = head.submit(8, None)
    assert head.granted() == [] and large.record().kept is None
    head.passes(DEFAULT.patience_s - 20.0, step_s)
    assert head.granted() == [] and large.record().kept is None
    head.passes(40.0)
    assert head.granted() == [] and large.record().kept is not None
    assert [folder.record().state for folder in small] == [State.GRANTED] * 2


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_job_that_waits_for_its_restart_starts_when_it_is_due(head, step_s):
    from gpurun.jobs.record import Restart

    folder = head.submit(4, None)
    folder.write(folder.record().but(restart=Restart(clock.now_s() + 60.0, 2, 3)))
    head.passes(50.0, step_s)
    assert head.granted() == []
    head.passes(11.0)
    assert head.granted() == [folder.id]


@pytest.mark.parametrize("step_s", STEPS_S)
def test_jobs_start_in_the_order_in_which_they_were_submitted(head, step_s):
    first = head.submit(8, None)
    head.passes(10.0, step_s)
    second = head.submit(8, None)
    assert head.granted() == [first.id]
    assert second.record().submitted_s - first.record().submitted_s == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_grant_whose_record_is_written_after_the_step_is_as_old_as_it_is(head, step_s, monkeypatch):
    """The pass was killed between the lease and the record; a supervisor that follows writes the record."""
    folder = head.submit(4, None)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(allocate, "mark_granted", killed)
        with pytest.raises(KeyboardInterrupt):
            head.granted()
    head.passes(10.0, step_s)
    lease = LeaseStore(head.home).read(folder.id)
    allocate.mark_granted(JobStore(head.home), lease)
    assert 0.0 <= clock.now_s() - folder.record().granted_s <= 10.1
