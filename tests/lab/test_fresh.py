"""``make fresh``: the machine runs commands like a real machine, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import fresh
import pytest
from waiting import LIMIT_S, until

from gpurun.node.agent.processes import list_processes

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("fresh")]

CI = Path(__file__).parents[2] / ".ci"
RUN = """
import sys
from contextlib import suppress
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import fresh
usr = fresh.Shared(Path("/usr"), "usr", writable=False)
sys.exit(fresh.run(Path(sys.argv[2]), [usr], sys.argv[3]))
"""


@pytest.fixture
def root(tmp_path):
    """The root folder of a machine that has this machine's programs: quicker to make than a Debian."""
    made = tmp_path / "root"
    for name in ("usr", "proc", "sys", "dev", "run", "tmp", "etc", "srv/gpurun", "root"):
        (made / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (made / name).symlink_to(f"usr/{name}")
    return made


@pytest.fixture
def start(root):
    """Start a machine that runs shell commands."""
    started = []

    def begin(commands):
        argv = [sys.executable, "-c", RUN, str(CI), str(root), commands]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.parametrize("after_s", [0.2, 0.5, 0.8, 1.1])
def test_nothing_is_left_when_it_is_interrupted_as_it_starts(start, group, after_s):
    marker = f"sleep 7{os.getpid()}"
    machine = start(marker)
    time.sleep(after_s)
    interrupt(machine)
    nothing_is_left(machine, marker)
    assert group.places() == []


def interrupt(machine):
    """Ctrl-C, and again if nothing happens: Python loses one that comes while a callback of its imports runs."""
    for _ in range(3):
        machine.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            machine.communicate(timeout=100)
            return
    pytest.fail("it does not end")


def nothing_is_left(machine, marker):
    until(lambda: not any(marker in process.command for process in list_processes()))
    until(lambda: not [process for process in list_processes() if process.command.startswith("slirp4netns")
                          and f" {machine.pid} " in process.command])  # fmt: skip
    mounts = Path("/proc/self/mountinfo").read_text()
    assert "/root/usr " not in mounts, "what it mounted, only it saw"


@pytest.fixture
def group(root):
    found = fresh.group_of(root)
    yield found
    assert found.remove() == []


def test_commands_run_in_turn_until_one_fails(start, group):
    machine = start("hostname && ps -e -o comm= | wc -l && cat /proc/self/cgroup && sh -c 'exit 7' && echo never")
    out, _ = machine.communicate(timeout=LIMIT_S)
    assert machine.returncode == 7, out
    assert "== fresh: hostname\nfresh\n" in out
    assert "exit code 7" in out
    assert "never\n" not in out
    assert "/gpurun-fresh" not in out, "it sees its own control group as the root of all"
    assert group.places() == []


def test_it_has_its_own_network_and_sees_no_file_of_this_machine(start, tmp_path):
    (tmp_path / "secret").touch()
    machine = start(
        f"ls /sys/class/net && test ! -e {tmp_path}/secret && test ! -e /home && touch /run/mine /dev/shm/mine"
    )
    out, _ = machine.communicate(timeout=LIMIT_S)
    assert machine.returncode == 0, out
    assert {"lo", "tap0"} == set(out.splitlines()[1:3])
    assert not Path("/run/mine").exists()
    assert not Path("/dev/shm/mine").exists()


def test_what_a_command_left_running_ends_with_the_machine(start, group):
    marker = f"sleep 8{os.getpid()}"
    machine = start(f"setsid {marker} & true")
    machine.communicate(timeout=LIMIT_S)
    assert machine.returncode == 0
    nothing_is_left(machine, marker)
    assert group.places() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_runs_on_when_it_is_interrupted_or_killed(start, group, number):
    marker = f"sleep 9{os.getpid()}"
    machine = start(f"setsid setsid {marker} & {marker}")
    until(lambda: sum(process.command.strip() == marker for process in list_processes()) == 2)
    machine.send_signal(number)
    machine.communicate(timeout=LIMIT_S)
    assert machine.returncode != 0
    nothing_is_left(machine, marker)
    if number == signal.SIGKILL:  # its process was killed; the next machine removes it
        assert group.places() != []
        assert start("true").wait(LIMIT_S) == 0
    assert group.places() == []
