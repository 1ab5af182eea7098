"""The allocator lock with real processes: fair, crash-safe, and it says who holds it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import PopenOfCode
from waiting import LIMIT_S, until

from gpurun.errors import StateError
from gpurun.leases.look import WaiterLocks
from gpurun.leases.store import PATIENCE_S, AllocatorLock
from gpurun.state import locks

HOLD = """
import sys, time
from pathlib import Path
from gpurun.leases.store import AllocatorLock
sys.argv = ["gpurun", "--verbose", "submit", "--token=hunter2"]
with AllocatorLock(Path({home!r})).held():
    print("held", flush=True)
    sys.stdin.readline()
print("done", flush=True)
"""
CONTEND = """
import os, sys, time
from pathlib import Path
from gpurun.leases.store import AllocatorLock
home, name = Path(sys.argv[1]), sys.argv[2]
log = open(home / "order", "a", buffering=1)
print("ready", flush=True)
sys.stdin.readline()
while not (home / "enough").exists():
    with AllocatorLock(home).held():
        log.write(f"+{name}\\n"); time.sleep(0.002); log.write(f"-{name}\\n")
"""


@pytest.fixture
def processes():
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(home: Path, processes) -> subprocess.Popen:
    """A process that takes the lock and keeps it until it is told to `let_go`."""
    process = PopenOfCode(
        [sys.executable, "-c", HOLD.format(home=str(home))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    processes.append(process)
    return process


def has_open(process: subprocess.Popen, path: Path) -> bool:
    with suppress(OSError):
        return any(each.resolve() == path for each in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


def state_of(process: subprocess.Popen) -> str:
    """As /proc has it. A fork that has died is gone at once: `forked` waits for it."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.fixture
def clock(monkeypatch):
    """The clock of who waits for a lock: time passes while it pauses."""
    made = SimpleNamespace(now_s=0.0, whenever=lambda: None, monotonic=lambda: made.now_s)

    def sleep(for_s):
        made.now_s += for_s
        made.whenever()

    made.sleep = sleep
    monkeypatch.setattr(locks, "time", made)
    return made


def let_go(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait(LIMIT_S)


def test_sixteen_contenders_none_starves(tmp_path, processes):
    """Each asks again at once, harder than any command does; two are never inside, and each gets it again."""
    names = [f"{number:x}" for number in range(16)]
    processes += [
        PopenOfCode(
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

    def taken():
        text = (tmp_path / "order").read_text()
        return {name: text.count(f"+{name}\n") for name in names}

    until(lambda: min(taken().values()) >= 5, taken, every_s=0.1)
    (tmp_path / "enough").touch()
    for process in processes:
        process.wait(LIMIT_S)
    lines = (tmp_path / "order").read_text().split()
    assert [line[0] for line in lines] == ["+", "-"] * (len(lines) // 2)
    assert [line[1:] for line in lines[::2]] == [line[1:] for line in lines[1::2]]


def test_a_killed_holder_lets_go_at_once(tmp_path, processes):
    first = hold(tmp_path, processes)
    first.stdout.readline()
    others = [hold(tmp_path, processes) for _ in range(2)]
    first.kill()
    (done,) = until(lambda: [each for each in others if select.select([each.stdout], [], [], 0.01)[0]])
    done.kill()
    (last,) = {*others} - {done}
    assert last.stdout.readline() == "held\n"


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_waiter_that_dies_or_sleeps_blocks_nobody(tmp_path, processes, fate):
    first = hold(tmp_path, processes)
    first.stdout.readline()
    victim = hold(tmp_path, processes)
    until(lambda: has_open(victim, tmp_path / "allocator.lock"))
    victim.send_signal(fate)
    until(lambda: state_of(victim) in "TZ")
    third = hold(tmp_path, processes)
    let_go(first)
    assert third.stdout.readline() == "held\n"


def test_a_stopped_holder_is_named_then_given_up_on(tmp_path, processes, capfd, clock):
    first = hold(tmp_path, processes)
    first.stdout.readline()
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(StateError) as caught, AllocatorLock(tmp_path).held():
        pass
    assert PATIENCE_S < clock.now_s < PATIENCE_S + 1
    said = capfd.readouterr().err
    assert said.count("waiting for the scheduler's lock; ") == 1
    assert f"`gpurun submit` (pid {first.pid}) has held the lock for " in said
    assert "hunter2" not in said
    assert caught.value.exit_code == 5
    assert str(first.pid) in caught.value.message
    assert str(first.pid) in caught.value.hint
    first.send_signal(signal.SIGCONT)


def test_a_supervisor_waits_for_ever(tmp_path, processes, clock):
    first = hold(tmp_path, processes)
    first.stdout.readline()
    clock.whenever = lambda: clock.now_s > 2 * PATIENCE_S and first.poll() is None and let_go(first)
    with AllocatorLock(tmp_path).held(patience_s=None):
        assert first.stdout.readline() == "done\n"


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 9000, b'{"pid": 1', b'{"pid":1,"user":"\x1b[2J","command":"","since_s":0}']
)
def test_what_is_in_the_lock_file_harms_nobody(tmp_path, content):
    (tmp_path / "allocator.lock").write_bytes(content)
    found = AllocatorLock(tmp_path).holder()
    assert found is None or found.told(1.0).isprintable()
    with AllocatorLock(tmp_path).held():
        assert AllocatorLock(tmp_path).holder().pid == os.getpid()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["locks.json", "waiters/0.log"])
def test_a_pipe_in_the_place_of_a_file_makes_nobody_wait(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / place)
    with AllocatorLock(tmp_path).held():
        assert AllocatorLock(tmp_path).holder().pid == os.getpid()
    assert not WaiterLocks(tmp_path).lives(os.getuid())
