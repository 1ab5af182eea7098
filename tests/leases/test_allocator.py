"""The allocator lock with real processes: fair, crash-safe, and it says who holds it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpurun.errors import StateError
from gpurun.leases import allocator
from gpurun.leases.allocator import allocator_lock, holder
from gpurun.leases.waiters import waiter_lives

HOLD = """
import sys, time
from pathlib import Path
from gpurun.leases.allocator import allocator_lock
sys.argv = ["gpurun", "--verbose", "submit", "--token=hunter2"]
with allocator_lock(Path({home!r})):
    print("held", flush=True)
    time.sleep({hold_s}) if {hold_s} else sys.stdin.readline()
print("done", flush=True)
"""
CONTEND = """
import os, sys, time
from pathlib import Path
from gpurun.leases.allocator import allocator_lock
home, name = Path(sys.argv[1]), sys.argv[2]
log = open(home / "order", "a", buffering=1)
print("ready", flush=True)
sys.stdin.readline()
while not (home / "enough").exists():
    with allocator_lock(home):
        log.write(f"+{name}\\n"); time.sleep(0.002); log.write(f"-{name}\\n")
"""


@pytest.fixture
def processes():
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(home: Path, hold_s: float, processes) -> subprocess.Popen:
    """A process that takes the lock and keeps it for `hold_s`, or until it is told to `let_go` if that is 0."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(home=str(home), hold_s=hold_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    processes.append(process)
    return process


def let_go(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait(20)


def test_sixteen_contenders_none_starves(tmp_path, processes):
    """Each asks again at once, harder than any command does; two are never inside, and each gets it again."""
    names = [f"{number:x}" for number in range(16)]
    processes += [
        subprocess.Popen(
            [sys.executable, "-c", CONTEND, str(tmp_path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    deadline, order = time.monotonic() + 60, tmp_path / "order"
    while min((taken := order.read_text()).count(f"+{name}\n") for name in names) < 5:
        assert time.monotonic() < deadline, {name: taken.count(f"+{name}\n") for name in names}
        time.sleep(0.1)
    (tmp_path / "enough").touch()
    for process in processes:
        process.wait(30)
    lines = order.read_text().split()
    assert [line[0] for line in lines] == ["+", "-"] * (len(lines) // 2)
    assert [line[1:] for line in lines[::2]] == [line[1:] for line in lines[1::2]]


def test_a_killed_holder_lets_go_at_once(tmp_path, processes):
    first = hold(tmp_path, 0, processes)
    first.stdout.readline()
    others = [hold(tmp_path, 0, processes) for _ in range(2)]
    first.kill()
    start = time.monotonic()
    while not (done := [p for p in others if select.select([p.stdout], [], [], 0.01)[0]]):
        assert time.monotonic() - start < 10
    done[0].kill()
    assert {*others}.difference(done).pop().stdout.readline() == "held\n"


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_waiter_that_dies_or_sleeps_blocks_nobody(tmp_path, processes, fate):
    first = hold(tmp_path, 0, processes)
    first.stdout.readline()
    victim = hold(tmp_path, 60, processes)
    time.sleep(0.5)
    victim.send_signal(fate)
    third = hold(tmp_path, 0, processes)
    let_go(first)
    start = time.monotonic()
    assert third.stdout.readline() == "held\n"
    assert time.monotonic() - start < 10


def test_a_stopped_holder_is_named_then_given_up_on(tmp_path, processes, capfd, monkeypatch):
    monkeypatch.setattr(allocator, "SLOW_S", 0.2)
    first = hold(tmp_path, 0, processes)
    first.stdout.readline()
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(StateError) as caught, allocator_lock(tmp_path, patience_s=0.5):
        pass
    said = capfd.readouterr().err
    assert said.count("waiting for the allocator lock, held by ") == 1
    assert f"`gpurun submit` (pid {first.pid}) for " in said
    assert "hunter2" not in said
    assert caught.value.exit_code == 5
    assert str(first.pid) in caught.value.message
    assert str(first.pid) in caught.value.hint
    first.send_signal(signal.SIGCONT)


def test_a_supervisor_waits_for_ever(tmp_path, processes, monkeypatch):
    monkeypatch.setattr(allocator, "PATIENCE_S", 0.1)
    first = hold(tmp_path, 1, processes)
    first.stdout.readline()
    with allocator_lock(tmp_path, patience_s=None):
        assert first.stdout.readline() == "done\n"


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 9000, b'{"pid": 1', b'{"pid":1,"user":"\x1b[2J","command":"","since_s":0}']
)
def test_what_is_in_the_lock_file_harms_nobody(tmp_path, content):
    (tmp_path / "allocator.lock").write_bytes(content)
    found = holder(tmp_path)
    assert found is None or found.told(1.0).isprintable()
    with allocator_lock(tmp_path):
        assert holder(tmp_path).pid == os.getpid()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("place", ["locks.json", "waiters/0.log"])
def test_a_pipe_in_the_place_of_a_file_makes_nobody_wait(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / place)
    with allocator_lock(tmp_path, patience_s=5.0):
        assert holder(tmp_path).pid == os.getpid()
    assert not waiter_lives(tmp_path, os.getuid())
