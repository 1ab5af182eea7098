"""`gpurun status` says when the supervisor of a job with GPUs cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from gpurun.jobs.events import EventLog
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore
from gpurun.views.reading import supervisor_trouble

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics:
  tcp: {kind: tcp, interface: eth0}
racks:
  r1: {hosts: {"h[1-2]": {}}}
"""


@pytest.fixture
def granted(tmp_path):
    """A job's folder, its leases and the lock on its lease, as a pass leaves them."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    spec = JobSpec(name="n", image="i", gpus=2, command=("true",))
    folder = JobStore(tmp_path).create(spec, inventory=tmp_path / "inventory.yaml", now_s=1.0)
    ((_, lock),) = Allocator(tmp_path).run_pass(now_s=2.0).granted
    return folder, LeaseStore(tmp_path), lock


def test_a_supervisor_that_lives_and_says_nothing_is_fine(granted):
    folder, leases, _ = granted
    folder.supervisor_log.plain.write_text("")
    assert supervisor_trouble(folder, folder.record(), leases) is None


def test_none_at_all(granted):
    folder, leases, lock = granted
    lock.close()
    assert "the job has no supervisor" in supervisor_trouble(folder, folder.record(), leases)


@pytest.mark.parametrize(
    "text",
    [
        "Traceback:\n  x\nModuleNotFoundError: No module named 'gpurun'\n\n",
        "x" * 9000 + "\nModuleNotFoundError: No module named 'gpurun'",
    ],
)
def test_last_words_of_one_that_could_not_start(granted, text):
    folder, leases, _ = granted
    folder.supervisor_log.plain.write_text(text)
    said = supervisor_trouble(folder, folder.record(), leases)
    assert said == "the job's supervisor could not start: ModuleNotFoundError: No module named 'gpurun'"


def test_last_words_count_until_something_happens(granted):
    folder, leases, _ = granted
    folder.supervisor_log.plain.write_text("trouble\n")
    folder.move(State.PREPARING)
    assert supervisor_trouble(folder, folder.record(), leases) == "the job's supervisor has trouble: trouble"
    EventLog(folder.events, clock=time.time).emit("state")
    os.utime(folder.supervisor_log.plain, (1, 1))
    assert supervisor_trouble(folder, folder.record(), leases) is None


def test_a_queued_or_ended_job_has_no_supervisor_to_have_trouble(granted):
    folder, leases, lock = granted
    lock.close()
    folder.supervisor_log.plain.write_text("old\n")
    for state in (State.PREPARING, State.STOPPING, State.FAILED):
        folder.move(state)
    assert supervisor_trouble(folder, folder.record(), leases) is None


def test_status_shows_it(granted, tmp_path):
    """A real supervisor that a broken installation keeps from starting."""
    folder, _, lock = granted
    folder.supervisor_log.plain.write_bytes(b"ImportError: \x1b[2Jlibmsgspec\xff\n")
    environ = {**os.environ, "GPURUN_HOME": str(tmp_path)}
    for args in (["status", folder.id], ["status", "-i", str(tmp_path / "inventory.yaml")]):
        done = subprocess.run(
            [sys.executable, "-m", "gpurun", *args], env={**environ, "COLUMNS": "300"}, capture_output=True, text=True
        )
        assert "the job's supervisor could not start: ImportError" in done.stdout, done.stdout + done.stderr
        assert "\x1b" not in done.stdout
        done = subprocess.run([sys.executable, "-m", "gpurun", *args, "--json"], env=environ, capture_output=True)
        assert "could not start" in json.loads(done.stdout)["jobs"][0]["reason"]
    lock.close()
