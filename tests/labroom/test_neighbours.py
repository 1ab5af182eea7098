"""A lab that the kernel's table of neighbours is too small for is refused, with the command that makes room."""

from __future__ import annotations

import pytest

from gpurun.lab import network
from gpurun.lab.process import LabFailed
from gpurun.lab.spec import LabSpec

SETTING = "net/ipv4/neigh/default/gc_thresh3"


@pytest.fixture
def proc(tmp_path):
    (tmp_path / SETTING).parent.mkdir(parents=True)
    (tmp_path / SETTING).write_text("1024\n")
    return tmp_path


def test_labs_that_fit_into_the_table_are_not_refused(proc):
    network.check_neighbours([LabSpec("large", hosts=15), LabSpec("small")], proc)
    network.check_neighbours([], proc)


def test_a_lab_that_could_fill_it_is_refused_with_the_command_that_makes_room(proc):
    with pytest.raises(LabFailed, match=r"at most 1024 entries.* may need 4160") as refused:
        network.check_neighbours([LabSpec("huge", hosts=32)], proc)
    command, room = refused.value.hint.split("=")
    assert command == "run: sudo sysctl -w net.ipv4.neigh.default.gc_thresh3"
    (proc / SETTING).write_text(room)
    network.check_neighbours([LabSpec("huge", hosts=32), LabSpec("other", hosts=16)], proc)


def test_all_labs_share_it(proc):
    with pytest.raises(LabFailed):
        network.check_neighbours([LabSpec(f"lab-{number}", hosts=8) for number in range(4)], proc)


@pytest.mark.parametrize("said", ["", "many", "-\n", "1e9", "\x00", None])
def test_a_kernel_that_does_not_say_is_not_asked(proc, said):
    (proc / SETTING).unlink()
    if said is not None:
        (proc / SETTING).write_text(said)
    network.check_neighbours([LabSpec("huge", hosts=64)], proc)
