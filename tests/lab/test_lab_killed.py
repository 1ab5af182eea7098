"""`gpurun lab` is killed at many steps: `down` removes all leftovers, and `up` works despite them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from census import census

from gpurun.lab import LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.slow]

# Runs `gpurun lab …` and dies by SIGKILL just before its n-th step: before it starts a program, or renames, removes
# or makes a file or folder (Python's audit events). With n = 0 it lives and says how many steps there were.
KILLED_AT = """
import os, signal, sys, threading
fatal, steps, lock = int(sys.argv.pop(1)), 0, threading.Lock()
STEPS = ("subprocess.Popen", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
def count(event, arguments):
    global steps
    if event in STEPS:
        with lock:
            steps += 1
            if steps == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
from gpurun.cli import lab
sys.addaudithook(count)
try:
    lab.app()
finally:
    print("STEPS", steps, flush=True)
"""


def run(fatal, *args):
    argv = [sys.executable, "-c", KILLED_AT, str(fatal), *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def steps_of(*args):
    done = run(0, *args)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("STEPS")[2])


@pytest.mark.timeout(1800)
def test_down_removes_whatever_a_killed_up_left_and_up_works_despite_it(named_lab):
    """Killed at every second step. Every tenth time, `up` follows instead of `down`."""
    lab = named_lab("steps")
    folder, spec = lab.folder, LabSpec(lab.name, racks=1, hosts=1)
    up = ("up", "--name", lab.name, "--racks", "1", "--hosts", "1")
    total = steps_of(*up)
    assert total > 50
    lab.down()
    for fatal in range(1, total + 1, 2):
        done = run(fatal, *up)
        if done.returncode == 0:
            break  # this time there were fewer steps: polling takes more or fewer
        assert done.returncode == -signal.SIGKILL, done.stderr
        if fatal % 20 == 5:
            lab.up(spec)
            assert lab.status().hosts[0].state == "up"
        lab.down()
        assert census(lab.name, folder) == set(), f"killed at step {fatal}"


@pytest.mark.timeout(600)
def test_down_killed_at_every_second_step(named_lab):
    lab = named_lab("steps")
    folder, spec = lab.folder, LabSpec(lab.name, racks=1, hosts=1)
    for fatal in range(1, 100, 2):
        lab.up(spec)
        done = run(fatal, "down", "--name", lab.name)
        if done.returncode == 0:
            break
        lab.down()
        assert census(lab.name, folder) == set(), f"killed at step {fatal}"
    else:
        raise AssertionError("down never came to its end")
