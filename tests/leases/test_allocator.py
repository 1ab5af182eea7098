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
import sys, time
from pathlib import Path
from gpurun.leases.allocator import allocator_lock
home = Path(sys.argv[1])
print("ready", flush=True)
end = float(sys.stdin.readline())
waits = []
log = open(home / "order", "a", buffering=1)
while time.time() < end:
    start = time.monotonic()
    with allocator_lock(home):
        waits.append(time.monotonic() - start)
        log.write("+\\n"); time.sleep(0.002); log.write("-\\n")
print(len(waits), max(waits))
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


def tickets(home: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(home / "line") if not name.startswith("."))
    except FileNotFoundError:
        return []


def wait_for_tickets(home: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(tickets(home)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_sixteen_contenders_none_starves(tmp_path, processes):
    """FIFO: whoever waits sees each of the 15 others at most about twice, and never are two inside."""
    processes += [
        subprocess.Popen(
            [sys.executable, "-c", CONTEND, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(16)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    end = time.time() + 5
    for process in processes:
        process.stdin.write(f"{end}\n")
        process.stdin.flush()
    results = [process.communicate(timeout=60)[0].split() for process in processes]
    counts = [int(count) for count, _ in results]
    assert min(counts) > 0
    assert max(counts) <= 1.5 * min(counts) + 5, counts
    order = (tmp_path / "order").read_text().split()
    assert order == ["+", "-"] * sum(counts)
    assert tickets(tmp_path) == []


def test_first_come_first_served(tmp_path, processes):
    first = hold(tmp_path, 0, processes)
    assert first.stdout.readline() == "held\n"
    followers = []
    for number in range(4):
        followers.append(hold(tmp_path, 0.2, processes))
        wait_for_tickets(tmp_path, number + 1)
    let_go(first)
    ended = []
    while len(ended) < 4:
        ended += [f for f in followers if f not in ended and f.poll() is not None]
        time.sleep(0.005)
    assert [followers.index(f) for f in ended] == [0, 1, 2, 3]


def test_a_killed_holder_lets_go_at_once(tmp_path, processes):
    first = hold(tmp_path, 0, processes)
    first.stdout.readline()
    second = hold(tmp_path, 0, processes)
    third = hold(tmp_path, 0.01, processes)
    wait_for_tickets(tmp_path, 2)
    first.kill()
    start = time.monotonic()
    while not (done := [p for p in (second, third) if select.select([p.stdout], [], [], 0.01)[0]]):
        assert time.monotonic() - start < 1
    done[0].kill()
    assert {second, third}.difference(done).pop().stdout.readline() == "held\n"
    processes[2].wait(10) if done == [second] else let_go(second)
    assert tickets(tmp_path) == [], "the holder after it removed the dead one's ticket"


@pytest.mark.parametrize(("fate", "limit_s"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 3)])
def test_a_waiter_that_dies_or_sleeps_blocks_nobody(tmp_path, processes, fate, limit_s):
    first = hold(tmp_path, 0, processes)
    first.stdout.readline()
    victim = hold(tmp_path, 60, processes)
    wait_for_tickets(tmp_path, 1)
    third = hold(tmp_path, 0, processes)
    wait_for_tickets(tmp_path, 2)
    victim.send_signal(fate)
    let_go(first)
    start = time.monotonic()
    assert third.stdout.readline() == "held\n"
    assert time.monotonic() - start < limit_s


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
    assert tickets(tmp_path) == [], "who gave up handed in its ticket"
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


@pytest.mark.parametrize("litter", ["0", "1", "7" * 300, ".1.abcd", "notes.txt", "-1", "²"])
def test_litter_in_the_line_blocks_nobody(tmp_path, litter):
    (tmp_path / "line").mkdir()
    try:
        (tmp_path / "line" / litter).write_text("")
    except OSError:
        pytest.skip("the file system has no such names")
    start = time.monotonic()
    with allocator_lock(tmp_path, patience_s=5):
        assert time.monotonic() - start < 0.5


def test_without_a_line_there_is_still_a_lock(tmp_path, processes):
    (tmp_path / "line").write_text("not a folder")
    first = hold(tmp_path, 0, processes)
    first.stdout.readline()
    with pytest.raises(StateError, match="did not come free"), allocator_lock(tmp_path, patience_s=0.1):
        pass


@pytest.mark.timeout(10)
@pytest.mark.parametrize("place", ["line/1", "line/x", "locks.json", "waiters/0.lock"])
def test_a_pipe_in_the_place_of_a_file_makes_nobody_wait(tmp_path, place):
    """In a shared state directory anybody of the group can put one into the line."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / place)
    with allocator_lock(tmp_path, patience_s=5.0):
        assert holder(tmp_path).pid == os.getpid()
    assert not waiter_lives(tmp_path, os.getuid())
