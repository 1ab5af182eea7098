"""Starting, naming and ending processes; cgroups, locks, records, engines: without making any namespace."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from waiting import LIMIT_S, until

from gpurun.errors import GpurunError
from gpurun.lab import engine, spec
from gpurun.lab import process as cgroups
from gpurun.lab import process as requirements
from gpurun.lab.host import listens, make_key
from gpurun.lab.process import LabFailed, NotInstalled, ProcessId, answers, lab_alone, run_command
from gpurun.lab.spec import LabSpec


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_itself_and_no_other(sleeper, tmp_path):
    here = ProcessId.of(sleeper.pid)
    here.save(tmp_path / "record")
    assert ProcessId.load(tmp_path / "record") == here and here.alive()
    impostor = ProcessId(here.pid, here.start_ticks + 1)
    impostor.send(signal.SIGKILL)
    assert not impostor.alive() and here.alive()
    here.end(2.0)
    assert not here.alive() and ProcessId.of(sleeper.pid) is None  # a zombie is not alive


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"pid": "x", "start_ticks": 1}', "\0", '{"pid": 1}'])
def test_a_broken_record_names_nobody(tmp_path, text):
    (tmp_path / "record").write_text(text)
    assert ProcessId.load(tmp_path / "record") is None


def test_a_process_that_ignores_sigterm_is_killed():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.read(1)
    ProcessId.of(process.pid).end(0.2)
    assert process.wait(LIMIT_S) == -signal.SIGKILL


INIT = """
import sys
from gpurun.lab.inside.init import Service, supervise
folder = sys.argv[1]
services = [
    Service("steady", ("/bin/sleep", "60"), folder + "/steady.log", {}),
    Service("dies", ("/bin/sh", "-c", 'echo "$A $$" ; test -e %s/stale && echo stale; exit 3' % folder),
            folder + "/dies.log", {"A": "a b"}, (folder + "/stale",)),
]
supervise(services, grace_s=2)
"""


def test_init_restarts_what_dies_and_ends_on_sigterm(tmp_path):
    (tmp_path / "stale").touch()
    init = subprocess.Popen([sys.executable, "-c", INIT, str(tmp_path)])
    starts = until(lambda: (found := read(tmp_path / "dies.log").splitlines())[1:] and found)
    init.terminate()
    assert init.wait(LIMIT_S) == 0
    assert len(set(starts)) == len(starts) and starts[0].startswith("a b ")
    assert "stale" not in starts


def read(path):
    return path.read_text() if path.exists() else ""


def test_what_a_program_says_is_in_the_error():
    with pytest.raises(LabFailed, match=r"Cannot find device|does not exist") as caught:
        run_command(["ip", "link", "show", "dev", "no-such-link"])
    assert caught.value.hint and caught.value.exit_code == 4
    with pytest.raises(LabFailed):
        run_command(["/no/such/program"])


def test_everything_that_is_missing_is_named_at_once(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "find_program", lambda program: None if program in ("tc", "ip", "sshd") else "/x")
    with pytest.raises(NotInstalled) as caught:
        requirements.require(*requirements.PACKAGE_OF)
    assert "ip, sshd, tc" in caught.value.message
    assert caught.value.hint == "run: sudo apt-get install --no-install-recommends iproute2 openssh-server"
    assert caught.value.exit_code == 2


def test_without_root_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotInstalled, match="root"):
        requirements.require("ip")


def test_a_key_is_made_once_and_whole(tmp_path):
    public = make_key(tmp_path / "key", "somebody")
    assert public.startswith("ssh-ed25519 ") and make_key(tmp_path / "key", "somebody") == public
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key.pub").unlink()
    assert make_key(tmp_path / "key", "somebody") != public


def _hold(path, started, seconds):
    with lab_alone(Path(path)):
        started.set()
        time.sleep(seconds)


def test_a_lock_is_waited_for_and_outlives_the_dead(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path / "lock"), started, 600))
    holder.start()
    assert started.wait(LIMIT_S)
    got = threading.Event()

    def take():
        with lab_alone(tmp_path / "lock"):
            got.set()

    taker = threading.Thread(target=take)
    taker.start()
    assert not got.wait(0.2)
    holder.kill()
    assert got.wait(LIMIT_S)
    taker.join()
    holder.join()


def test_a_lock_whose_file_was_removed_is_nobodys_any_more(tmp_path):
    path, inside = tmp_path / "lock", []

    def work(_):
        with lab_alone(path):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.001)
            inside.pop()
            path.unlink()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))


def test_a_program_started_under_the_lock_keeps_it_when_its_starter_is_killed(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpurun.lab.process import lab_alone, run_command\n"
        "with lab_alone(Path(sys.argv[1])):\n    run_command(['sh', '-c', sys.argv[2]])\n"
    )
    go, begun, ended = tmp_path / "go", tmp_path / "begun", tmp_path / "ended"
    program = f"touch {begun}; until [ -e {go} ]; do sleep 0.05; done; sleep 0.1; touch {ended}"
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock"), program])
    until(begun.exists)
    starter.kill()
    starter.wait()
    go.touch()
    with lab_alone(tmp_path / "lock"):
        assert ended.exists()


def test_records_of_another_boot_or_of_nonsense_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(spec, "RUNTIME", tmp_path)
    made = spec.Record(LabSpec("x"), IPv4Network("10.1.2.0/24"), Path("/folder"))
    made.save()
    assert spec.load_record("x") == made and [each.spec.name for each in spec.labs()] == ["x"]
    made.completed().save()
    assert spec.load_record("x").complete
    fields = json.loads((tmp_path / "x/record.json").read_text())
    for broken in ({**fields, "boot_id": "another"}, {**fields, "subnet": "x"}, {**fields, "spec": {"racks": 0}}, []):
        (tmp_path / "x/record.json").write_text(json.dumps(broken))
        assert spec.load_record("x") is None
    spec.forget("x")
    spec.forget("x")
    assert list(spec.labs()) == []


def test_an_engine_is_one_that_answers_a_ping(tmp_path):
    assert not answers(tmp_path / "none")
    path = tmp_path / "socket"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    assert not answers(path, timeout_s=0.2)  # it accepts, and says nothing

    def reply(text):
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(text)

    while_waiting = server.accept()[0]
    while_waiting.close()
    for text, expected in (
        (b"HTTP/1.1 200 OK\r\n\r\nOK", True),
        (b"HTTP/1.1 500 no\r\n\r\n", False),
        (b"\0\xff", False),
    ):
        thread = threading.Thread(target=reply, args=(text,))
        thread.start()
        assert answers(path) is expected
        thread.join()
    server.close()


def test_an_engine_whose_socket_path_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "engine_folder", lambda: tmp_path / ("x" * 100))
    monkeypatch.setattr(engine, "running", lambda: None)
    monkeypatch.setattr(engine, "require", lambda *programs: None)
    with pytest.raises(GpurunError, match="too long"):
        engine.ensure()
    assert engine.stop_engine() is False


def test_cgroups_are_removed_with_all_below(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "hierarchies", lambda: (tmp_path / "a", tmp_path / "b"))
    (tmp_path / "a/gpurun-lab/x/host/container").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    group = cgroups.Cgroup("gpurun-lab/x")
    assert group.path == "/gpurun-lab/x" and group.remove() == [] and group.places() == []
    assert (tmp_path / "a/gpurun-lab").is_dir()
    assert group.remove() == []


def test_a_listening_port_is_seen_from_outside():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        here = ProcessId.of(os.getpid())
        assert not listens(here, port)
        server.listen()
        assert listens(here, port)
    assert not listens(ProcessId(2**22 + 1, 0), 22)
