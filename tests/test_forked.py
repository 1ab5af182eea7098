"""A fork of `forked` looks like the process that it stands for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from waiting import LIMIT_S, until

SHOW = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "env": dict(os.environ), "cwd": os.getcwd(), "uid": os.getuid(),
    "groups": os.getgroups(), "umask": os.umask(0), "session": os.getsid(0) == os.getpid(), "path": sys.path[0],
    "open": sorted(os.listdir("/proc/self/fd"))[:-1],
    "told": open("/proc/self/environ").read().split(chr(0))[:-1],
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
}))
sys.exit(7)
"""


def both(argv, **options):
    """What the real process and the fork print, and how they end."""
    real = subprocess.Popen.__mro__[1] if forked.are_used() else subprocess.Popen
    for start in (real, forked.PopenOfCode):
        process = start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        yield process, *process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize(
    "options", [{}, {"umask": 0o27, "start_new_session": True}, {"stdin": subprocess.DEVNULL, "cwd": "/"}]
)
def test_it_is_the_same_to_itself_and_to_proc(options):
    environ = {**os.environ, "A": "b=ü\n"}
    (real, out, _), (fork, other, _) = both([sys.executable, "-c", SHOW, "x y", ""], env=environ, **options)
    assert (real.returncode, fork.returncode) == (7, 7)
    found, wanted = json.loads(other), json.loads(out)
    room = [pair for pair in found["told"] if pair.startswith(forked.ROOM)]
    found["told"] = sorted(set(found["told"]) - {*room})
    wanted["told"] = sorted(wanted["told"])
    assert found == wanted


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_it_is_another_user(tmp_path):
    process = forked.PopenOfCode(
        [sys.executable, "-c", "import os; print(os.getresuid(), os.getgroups(), os.stat('/proc/self').st_uid)"],
        user=61_001, group=61_001, extra_groups=[62_000], cwd="/", stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.communicate(timeout=LIMIT_S)[0] == "(61001, 61001, 61001) [62000] 61001\n"


def test_it_ends_as_processes_end():
    for code, wanted in (("", 0), ("import sys; sys.exit('a reason')", 1), ("1 / 0", 1)):
        for process, _, err in both([sys.executable, "-c", code]):
            assert process.returncode == wanted
            assert err.strip().rpartition("\n")[2] in ("", "a reason", "ZeroDivisionError: division by zero")


def test_it_is_waited_for_and_killed():
    process = forked.PopenOfCode([sys.executable, "-c", "print('on', flush=True); input()"], stdin=-1, stdout=-1)
    assert process.stdout.readline() == b"on\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    process.communicate()


def test_a_descriptor_is_passed_on_and_no_other(tmp_path):
    with (tmp_path / "file").open("w") as file, (tmp_path / "other").open("w"):
        code = f"import os; os.write({file.fileno()}, b'hi'); print(len(os.listdir('/proc/self/fd')))"
        process = forked.PopenOfCode([sys.executable, "-c", code], pass_fds=[file.fileno()], stdout=subprocess.PIPE)
        assert process.communicate(timeout=LIMIT_S)[0] == b"5\n"  # of which one is that of the list itself
    assert (tmp_path / "file").read_text() == "hi"


@pytest.mark.parametrize(
    ("words", "options"),
    [(["sh", "-c", "gpurun"], {}), ([sys.executable, "-c", "pass"], {}), ([sys.executable, "-m", "json"], {}),
     ([sys.executable, "-m", "gpurun"], {"PYTHONPATH": "/x"}), ([sys.executable, "-m", "gpurun"], {"LC_ALL": "xx"}),
     ([sys.executable, "-m", "gpurun", "x" * 100_000], {})],
)  # fmt: skip
def test_what_a_fork_cannot_imitate_is_started(words, options):
    assert not forked._can_fork(words, {**os.environ, **options}, takes_code=False)


def test_a_quick_test_forks_gpurun_and_what_that_starts():
    assert forked.are_used()
    process = subprocess.Popen([sys.executable, "-m", "gpurun", "version"], stdout=subprocess.PIPE, text=True)
    parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    assert process.communicate(timeout=LIMIT_S)[0].startswith("gpurun")


def test_one_who_is_killed_while_he_asks_ends_nobody_else():
    server = forked._server(sys.executable, os.environ.get("PYTHONPATH"))
    for data in (b"", b"."):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(server.path)
            if data:
                asking.send(data)
    process = subprocess.Popen([sys.executable, "-m", "gpurun", "version"], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=LIMIT_S)[0].startswith("gpurun")
    assert server._process.poll() is None


def test_a_test_about_starting_has_real_processes(real_starts):
    assert not forked.are_used()


def test_it_ends_with_its_tests():
    """The process that forks ends when the one that asks it has ended, however that was."""
    code = "import forked, os, sys; print(forked._server(sys.executable, None)._process.pid, flush=True); os._exit(0)"
    path = {"PYTHONPATH": str(Path(forked.__file__).parent)}
    process = subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, capture_output=True, text=True)
    place = Path("/proc", str(int(process.stdout)), "stat")

    def has_ended():
        try:
            return place.read_text().rpartition(")")[2].split()[0] in "ZX"  # where process 1 waits for no orphan
        except OSError:
            return True

    until(has_ended)
