"""Horovod's knobs as flags, and an autotune log as knobs."""

import pytest

from gpurun.jobs.spec import HorovodKnobs
from gpurun.launch.launchers.horovod import flags, knob_variables, reuse

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
    "cycle_time_ms,tensor_fusion_threshold,score\n"
)


def test_defaults_only_set_the_time_outs():
    assert flags(HorovodKnobs()) == ("--gloo-timeout-seconds", "300", "--start-timeout", "120")


def test_every_knob_has_its_flag():
    knobs = HorovodKnobs(
        fusion_threshold_mb=64, cycle_time_ms=1.0, cache_capacity=0, hierarchical_allreduce=True,
        hierarchical_allgather=False, torus_allreduce=True, autotune=True, timeline=True,
        stall_check_warning_s=30, stall_check_shutdown_s=60, num_nccl_streams=2,
    )  # fmt: skip
    assert flags(knobs, timeline="/t.json", autotune_log="/a.csv") == (
        "--fusion-threshold-mb", "64", "--cycle-time-ms", "1", "--cache-capacity", "0",
        "--hierarchical-allreduce", "--no-hierarchical-allgather", "--torus-allreduce",
        "--autotune", "--autotune-log-file", "/a.csv", "--timeline-filename", "/t.json",
        "--stall-check-warning-time-seconds", "30", "--stall-check-shutdown-time-seconds", "60",
        "--num-nccl-streams", "2", "--gloo-timeout-seconds", "300", "--start-timeout", "120",
    )  # fmt: skip


def test_files_only_with_their_knob():
    assert "--autotune-log-file" not in flags(HorovodKnobs(), autotune_log="/a.csv")
    assert "--no-autotune" in flags(HorovodKnobs(autotune=False), autotune_log="/a.csv")


def test_affinity_of_several_ranks_goes_by_environment():
    assert knob_variables(HorovodKnobs(thread_affinity=(0, 8))) == {"HOROVOD_THREAD_AFFINITY": "0,8"}
    assert knob_variables(HorovodKnobs()) == {}


def test_a_finished_autotune_is_used_again():
    log = HEADER + "0,0,0, 1,1.5,64,100\n1,0,1, 0,3.5,31.25,900\n"
    found = reuse(HorovodKnobs(autotune=True, cycle_time_ms=2.0), log)
    assert found.autotune is False
    assert found.cycle_time_ms == 2.0  # set by hand
    assert (found.fusion_threshold_mb, found.cache_capacity) == (31, 0)
    assert (found.hierarchical_allreduce, found.hierarchical_allgather, found.torus_allreduce) == (
        True,
        False,
        True,
    )


ROWS = ["0,0,0,1,x,64,1\n", "0,0\n", "0,0,0,1,1.5,1e400,9\n", "0,0,0,1,inf,64,9\n", "9" * 200_000]


@pytest.mark.parametrize("log", ["", HEADER, "nonsense\n1,2\n", "\0", *(HEADER + row for row in ROWS)])
def test_a_log_without_a_whole_row_changes_nothing(log):
    knobs = HorovodKnobs(autotune=True)
    assert reuse(knobs, log) == knobs
