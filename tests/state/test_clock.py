"""Stamps of the head's clock: a step of the wall clock changes no time between two of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import GpuHolder, HostRefusal, JobRecord, Restart, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.look import look
from gpurun.state import clock
from gpurun.state.boot import ClockReading, HeadBoot
from gpurun.state.clock import HeadClock

STEPS_S = [sign * step_s for step_s in (0.1, 1.0, 3600.0, 90_000.0, 315_360_000.0) for sign in (-1, 1)]
NOW_S = 1.8e9


class Machine:
    """A head: its kernel's clocks, and its processes."""

    def __init__(self):
        self.boot, self.up_s, self.wall_s, self.is_synchronised = "a", 5000.0, NOW_S, True

    def process(self):
        return HeadClock(self.read, is_synchronised=lambda: self.is_synchronised)

    def read(self):
        return ClockReading(self.boot, self.up_s, self.wall_s)

    def passes(self, for_s, step_s=0.0):
        self.up_s, self.wall_s = self.up_s + for_s, self.wall_s + for_s + step_s

    def reboots(self, off_s=60.0, step_s=0.0):
        self.boot, self.up_s, self.wall_s = f"{self.boot}a", 10.0, self.wall_s + off_s + 10.0 + step_s


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()

    def new_process():
        monkeypatch.setattr(clock, "_of_process", machine.process())
        return clock.head_clock()

    machine.new_process = new_process
    new_process()
    return machine


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_process_that_lives_on_does_not_see_a_step(machine, step_s):
    mine = machine.process()
    began_s = mine()
    machine.passes(30.0, step_s)
    assert mine() - began_s == pytest.approx(30.0)
    assert mine.elapsed_s(began_s) == pytest.approx(30.0)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_another_process_moves_the_stamps_of_a_file_with_the_step(machine, step_s):
    first = machine.process()
    stamp_s = first()
    machine.passes(30.0, step_s)
    second = machine.process()
    assert second.elapsed_s(second.boot.moved(stamp_s, first.boot)) == pytest.approx(30.0)


def test_what_a_process_writes_after_a_step_is_by_the_new_wall_clock(machine):
    mine = machine.process()
    machine.passes(10.0, 3600.0)
    assert mine.boot_now().moved(mine(), mine.boot) == pytest.approx(machine.wall_s)
    machine.passes(10.0, -3600.0 + 0.2)
    assert mine.boot_now() is mine.boot  # no step worth the name


def test_between_boots_the_wall_clock_decides_and_no_stamp_is_after_the_boot(machine):
    first = machine.process()
    stamp_s = first()
    machine.reboots(off_s=100.0)
    second = machine.process()
    assert second.elapsed_s(second.boot.moved(stamp_s, first.boot)) == pytest.approx(110.0)
    machine.reboots(step_s=-1e8)  # the battery of its clock is empty
    third = machine.process()
    assert third.elapsed_s(third.boot.moved(stamp_s, first.boot)) == pytest.approx(10.0)
    machine.passes(20.0, 1e8 + 5.0)  # a time server sets it
    assert third.elapsed_s(third.boot.moved(stamp_s, first.boot)) == pytest.approx(30.0)
    fourth = machine.process()
    assert fourth.elapsed_s(fourth.boot.moved(stamp_s, first.boot)) == pytest.approx(205.0, abs=20.0)


def test_after_a_boot_a_clock_that_nobody_has_set_yet_ends_nothing(machine):
    first = machine.process()
    stamp_s = first()
    machine.is_synchronised = False
    machine.reboots(step_s=1e8)  # its clock runs ahead
    second = machine.process()
    moved_s = second.boot.moved(stamp_s, first.boot)
    assert second.elapsed_s(moved_s) == pytest.approx(10.0)
    machine.passes(20.0, -1e8)
    machine.is_synchronised = True
    assert second.elapsed_s(moved_s) == pytest.approx(90.0)
    machine.is_synchronised = False
    third = machine.process()
    assert third.elapsed_s(moved_s) == pytest.approx(30.0)
    machine.passes(600.0)  # no time server: it is believed all the same
    assert third.elapsed_s(moved_s) == pytest.approx(690.0)


@pytest.mark.parametrize("up_s", [60.0, 30 * 86_400.0])
def test_a_head_that_takes_over_from_another_machine_believes_its_wall_times(machine, up_s):
    """The state directory has moved to it, or lies on a disk that both can reach. It may be up for a month already."""
    machine.boot = "a@first"
    first = machine.process()
    started_s = first() - 3600.0
    machine.boot, machine.up_s = "b@second", up_s
    second = machine.process()
    moved_s = second.boot.moved(started_s, first.boot)
    assert second.elapsed_s(moved_s) == pytest.approx(3600.0)
    machine.passes(100.0, 90_000.0)
    assert second.elapsed_s(moved_s) == pytest.approx(3700.0)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_step_after_a_boot_does_not_end_a_gang_that_began_before_it(machine, step_s):
    first = machine.process()
    stamp_s = first()
    machine.reboots(off_s=50.0)
    second = machine.process()
    moved_s = second.boot.moved(stamp_s, first.boot)
    assert second.elapsed_s(moved_s) == pytest.approx(60.0)
    machine.passes(30.0, step_s)
    assert second.elapsed_s(moved_s) == pytest.approx(90.0)
    machine.is_synchronised = False  # a step says so, too
    assert second.elapsed_s(moved_s) == pytest.approx(90.0)


@given(st.floats(), st.floats(), st.floats(), st.text(max_size=2), st.text(max_size=2))
def test_any_numbers_give_numbers(stamp_s, began_s, then_s, boot, other):
    assert isinstance(HeadBoot(boot, began_s).moved(stamp_s, HeadBoot(other, then_s)), float)
    assert isinstance(HeadBoot(boot, began_s).moved_ahead(stamp_s, HeadBoot(other, then_s)), float)


def test_the_kernels_clocks_are_read():
    mine = HeadClock()
    assert mine.boot.id == clock.boot_id() != ""
    assert 0.0 <= mine.elapsed_s(mine()) < 60.0
    assert clock.is_synchronised() in (True, False)


# -- records -----------------------------------------------------------------------------------------------

STAMPS = ("submitted_s", "queued_s", "granted_s", "started_s", "checkpoint_s", "ended_s", "gpu_s_until_s", "stopping_s")


def full(boot):
    now_s = NOW_S - 10.0
    return JobRecord(
        "j-00000001", "n", "me", 0, "/i", 1, State.RUNNING, now_s, now_s, granted_s=now_s, started_s=now_s,
        checkpoint_s=now_s, ended_s=now_s, gpu_s_until_s=now_s, stopping_s=now_s, restart=Restart(NOW_S + 5.0, 2, 3),
        refusals=(HostRefusal("h", GpuHolder((0,)), NOW_S + 5.0, 5.0),), boot=boot.id, boot_s=boot.began_s,
    )  # fmt: skip


def test_every_time_of_a_record_is_moved(machine):
    record = full(machine.process().boot)
    times = {name for name in record.__struct_fields__ if name.endswith("_s")} - {"gpu_s", "boot_s"}
    assert times == set(STAMPS)
    machine.passes(0.0, 3600.0)
    moved = record.on(machine.process().boot)
    assert {getattr(moved, name) for name in STAMPS} == {NOW_S + 3590.0}
    assert (moved.restart.at_s, moved.refusals[0].until_s) == (NOW_S + 3605.0, NOW_S + 3605.0)
    assert moved.on(machine.process().boot) is moved


def test_a_record_without_a_boot_keeps_its_times(machine):
    record = full(HeadBoot())
    assert record.on(machine.process().boot).but(boot="", boot_s=0.0) == record


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_file_has_wall_times_and_its_readers_their_own(machine, tmp_path, step_s):
    (folder,) = [JobStore(tmp_path).create(JobSpec("n", "i", 1, ("t",)), inventory=tmp_path / "i", now_s=clock.now_s())]
    folder.move(State.GRANTED, granted_s=clock.now_s())
    machine.passes(30.0, step_s)
    written = folder.move(State.PREPARING)  # by the process that has not seen the step
    assert clock.now_s() - written.granted_s == pytest.approx(30.0)
    machine.new_process()
    read = JobFolder(folder.path).record()
    assert clock.now_s() - read.granted_s == pytest.approx(30.0, abs=0.2)
    live = look(tmp_path, now_s=clock.now_s()).jobs[folder.id].record
    assert (live.granted_s, live.submitted_s) == (read.granted_s, read.submitted_s)
