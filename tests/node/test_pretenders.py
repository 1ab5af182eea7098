"""Programs in containers that call themselves what another job's processes are called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpurun.node.agent import processes
from gpurun.node.job import parts, rank_processes

JOB = f"j-2{os.getpid():07x}"
STAY = "import time; time.sleep(600)"
BOX, OTHER_BOX = "a" * 64, "b" * 64


@pytest.fixture
def pretender(tmp_path, monkeypatch):
    """A process that is called like a job's sshd, with the environment of its rank; a test says where it runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gpurun" / "jobs" / JOB).mkdir(parents=True)
    name = f"sshd: {tmp_path}/.gpurun/jobs/{JOB}/sshd/config gpurun-{JOB}-1"
    environ = {**os.environ, "GPURUN_JOB": JOB, "GPURUN_ATTEMPT": "1", "GPURUN_RANK": "0", "BIG": "x" * 100_000}
    process = subprocess.Popen([name, "-c", STAY], executable=sys.executable, env=environ)
    boxes = {}
    monkeypatch.setattr(processes, "container_of", lambda pid, proc="/proc": boxes.get(pid, ""))
    monkeypatch.setattr(rank_processes, "container_of", lambda pid: boxes.get(pid, ""))
    yield process.pid, boxes
    process.kill()
    process.wait()


def test_a_process_in_a_container_is_none_that_gpurun_started_beside_it(pretender):
    pid, boxes = pretender
    assert [process.pid for process in parts.processes_of(JOB)] == [pid]
    boxes[pid] = BOX
    assert parts.processes_of(JOB) == [], "a fence would wait for it, again and again"


def test_a_host_that_is_a_container_itself_sees_its_own_processes(pretender):
    pid, boxes = pretender
    boxes.update({pid: BOX, os.getpid(): BOX})
    assert [process.pid for process in parts.processes_of(JOB)] == [pid]


def test_a_process_in_another_jobs_container_is_no_rank(pretender):
    pid, boxes = pretender
    boxes[pid] = BOX
    assert [one.process.pid for one in rank_processes.of_job(JOB)] == [pid], "nobody knows the job's own container"
    boxes[os.getpid()] = OTHER_BOX  # the test itself stands for the main process of the job's container
    processes.note_process(f"{parts.job_folder(JOB)}/{parts.MAIN_FILE}", processes.read_process(os.getpid()))
    assert rank_processes.of_job(JOB) == []
    boxes[pid] = OTHER_BOX
    assert [one.process.pid for one in rank_processes.of_job(JOB)] == [pid]


def test_no_more_of_an_environment_and_a_command_is_kept_than_is_looked_at(pretender):
    (found,) = rank_processes.of_job(JOB)
    assert "BIG" not in found.environ
    big = subprocess.Popen(["big", "-c", STAY, "x" * 100_000], executable=sys.executable)
    try:
        assert len(processes.read_process(big.pid).command) <= 1 << 16
    finally:
        big.kill()
        big.wait()
