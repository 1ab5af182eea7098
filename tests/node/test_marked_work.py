"""Programs mark their own work: the runtime writes the median of a step, and the agent passes on what is plain."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.node.job import gang, parts, rank_processes
from gpurun.runtime import gpurun_runtime

JOB = "j-00000001"


@pytest.fixture
def clock():
    return SimpleNamespace(now_s=1000.0)


@pytest.fixture
def runtime(tmp_path, monkeypatch, clock):
    """A freshly imported runtime whose time a test moves."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("GPURUN_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("GPURUN_RANK", "3")
    monkeypatch.setattr(parts, "job_folder", lambda job: str(tmp_path))
    monkeypatch.setattr(rank_processes, "_reports", {})
    spec = importlib.util.spec_from_file_location("fresh_runtime", gpurun_runtime.__file__)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.time = SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: 1e9)
    return made


def told():
    return gang.progress(None, JOB)["ranks"].get("3", {}).get("progress", {})


def step(runtime, clock, number, own_s, *, others_s=5.0, **options):
    with runtime.compute(**options):
        clock.now_s += own_s
    clock.now_s += others_s
    runtime.progress(number)


def test_only_marked_work_counts_and_one_long_step_changes_nothing(runtime, clock):
    runtime.progress(0)
    for number in range(1, 12):
        step(runtime, clock, number, 60.0 if number == 7 else 0.25)
    assert (told()["compute_s"], told()["computed"], told()["step"]) == (0.25, 11, 11)


def test_several_blocks_and_several_steps_at_once_are_divided(runtime, clock):
    runtime.progress(0)
    for number in range(2, 20, 2):
        for _ in range(4):
            with runtime.compute():
                clock.now_s += 0.5
        clock.now_s += 2.0
        runtime.progress(number)
    assert told()["compute_s"] == 1.0


def test_the_median_is_that_of_the_last_minute(runtime, clock):
    runtime.progress(0)
    for number in range(1, 100):
        step(runtime, clock, number, 1.0 if number < 80 else 2.0)
    assert told()["compute_s"] == 2.0


def test_a_step_that_is_told_twice_or_begins_anew_is_no_step(runtime, clock):
    runtime.progress(5)
    with runtime.compute():
        clock.now_s += 1.0
    runtime.report(5, loss=1.0)
    with runtime.compute():
        clock.now_s += 1.0
    clock.now_s += 2.0
    runtime.progress(6)
    assert (told()["compute_s"], told()["computed"]) == (2.0, 1)
    with runtime.compute():
        clock.now_s += 500.0
    runtime.progress(1)
    clock.now_s += 2.0
    step(runtime, clock, 2, 2.0)
    assert told()["compute_s"] == 2.0


def test_a_block_waits_for_the_gpu_and_one_that_raises_is_left_out(runtime, clock):
    def wait():
        clock.now_s += 3.0

    runtime.progress(0)
    with pytest.raises(ValueError, match="mine"), runtime.compute():
        clock.now_s += 100.0
        raise ValueError("mine")
    step(runtime, clock, 1, 1.0, wait=wait)
    assert told()["compute_s"] == 4.0


def test_a_program_without_marks_says_nothing_of_it(runtime, clock):
    for number in range(5):
        clock.now_s += 2.0
        runtime.progress(number)
    assert "compute_s" not in told() and told()["step"] == 4


def test_outside_gpurun_it_does_nothing(monkeypatch):
    done = __import__("subprocess").run(
        [sys.executable, "-c", "import gpurun_runtime as g\nwith g.compute(): pass\ng.progress(1); g.progress(2)"],
        cwd=Path(gpurun_runtime.__file__).parent, env={"PATH": os.environ["PATH"]}, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "9" * 4000, "[1]", '{"a": 1}'])
def test_what_is_no_number_leaves_no_host(runtime, tmp_path, value):
    (tmp_path / "run" / "progress.3").write_text(f'{{"step": 1, "compute_s": {value}, "computed": 1}}')
    assert "compute_s" not in told()


def test_a_gibibyte_in_place_of_a_report_costs_nothing(runtime, tmp_path):
    with (tmp_path / "run" / "progress.3").open("wb") as stream:
        stream.write(json.dumps({"compute_s": 1.0}).encode())
        stream.truncate(1 << 30)
    assert told() == {}
