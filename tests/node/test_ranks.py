"""Ranks found by their environment, and their connections shut down from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from gpurun.node.agent.frames import Call, OpError
from gpurun.node.job import ranks
from gpurun.node.job import ranks as rank_sockets
from gpurun.node.job.ranks import named

JOB = f"j-2{os.getpid():07x}"
LISTEN = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
held = [server.accept()[0] for _ in range(2)]
for each in held:
    print("read", each.recv(1), flush=True)
"""
CONNECT = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print("connected", flush=True)
print("read", held[0].recv(1), flush=True)
input()
"""


@pytest.fixture
def start():
    started = []

    def run(code, *args, job=JOB, **environ):
        environ = {"HOROVOD_RANK": "0", **environ} if job else environ
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **environ, **({"GPURUN_JOB": job} if job else {})},
            )
        )  # fmt: skip
        return started[-1]

    yield run
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def call():
    return Call(1, lambda *_: None, False, b"")


def said(process):
    return process.stdout.readline().strip()


def cut(addresses=("127.0.0.1",)):
    return rank_sockets.cut(call(), JOB, list(addresses), hold_s=0.05)


def test_ranks_are_counted_by_job(start):
    before = ranks.count(call(), JOB)
    start("import time; print(1, flush=True); time.sleep(60)").stdout.readline()
    start("import time; print(1, flush=True); time.sleep(60)", job="j-ffffffff").stdout.readline()
    assert (before, ranks.count(call(), JOB), ranks.count(call(), "../..")) == (0, 1, 0)


def test_both_sides_learn_at_once(start):
    server = start(LISTEN, job=None)
    port = said(server)
    rank = start(CONNECT, port, port)
    assert said(rank) == "connected"
    assert cut() == {"cut": 2, "refused": 0}
    assert said(rank) == "read b''"
    assert said(server) == "read b''"


def test_a_descriptor_that_a_rank_closes_meanwhile_hides_no_other(start, monkeypatch):
    """A rank opens and closes files all the time; its connections may come after one of them."""
    server = start(LISTEN, job=None)
    port = said(server)
    assert said(start(CONNECT, port, port)) == "connected"
    real, asked = os.readlink, []

    def readlink(path):
        asked.append(path)
        if len(asked) == 1:
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)
    assert cut()["cut"] == 2


def test_the_rendezvous_strangers_and_other_addresses_are_spared(start):
    server = start(LISTEN, job=None)
    port = said(server)
    rendezvous = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    assert said(start(CONNECT, port, **rendezvous)) == "connected"
    assert said(start(CONNECT, port, job=None)) == "connected"
    assert cut() == {"cut": 0, "refused": 0}
    assert cut(["10.0.0.1", "", "no address"]) == {"cut": 0, "refused": 0}


def test_where_the_kernel_forbids_it_that_is_said(start, monkeypatch):
    server = start(LISTEN, job=None)
    port = said(server)
    assert said(start(CONNECT, port)) == "connected"

    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(rank_sockets, "_system_call", forbidden)
    assert cut() == {"cut": 0, "refused": 1}
    monkeypatch.setattr(rank_sockets, "_system_call", lambda *_: (_ for _ in ()).throw(ProcessLookupError(3, "gone")))
    assert cut() == {"cut": 0, "refused": 0}


def test_ranks_stand_still_while_they_are_cut_and_run_on_afterwards(start, monkeypatch):
    """Also if the supervisor goes away in the middle."""
    server = start(LISTEN, job=None)
    port = said(server)
    rank = start(CONNECT, port, port)
    assert said(rank) == "connected"
    states = []

    class Interrupted(Call):
        def wait(self, _seconds):
            until(lambda: state_of(rank.pid) == "T")  # a signal takes its time
            states.append(state_of(rank.pid))
            raise OpError("cancelled", "the connection is gone")

    with pytest.raises(OpError):
        rank_sockets.cut(Interrupted(1, lambda *_: None, False, b""), JOB, ["127.0.0.1"])
    assert states == ["T"]
    assert said(rank) == "read b''"
    assert state_of(rank.pid) != "T"


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


NAMES = [["torchrun"], ["accelerate", "launch"], ["-m", "torch.distributed.run"]]


@pytest.mark.parametrize(
    ("command", "which"),
    [("torchrun --nproc_per_node=4 train.py", 0), ("/usr/local/bin/torchrun x", 0), ("accelerate launch x", 1),
     ("/usr/bin/python3.11 -u -X dev /usr/local/bin/torchrun x", 0), ("python3 /opt/accelerate launch", 1),
     ("python -m torch.distributed.run x", 2), ("python3 -u -m torch.distributed.run", 2), ("accelerate config", None),
     ("python train.py torchrun", None), ("sh -c torchrun", None), ("", None), (" ", None), ("python", None),
     ("python -m", None), ("x" * 100_000, None), ("torchrun" * 9, None)],
)  # fmt: skip
def test_a_command_line_that_starts_processes_is_known_by_its_first_words(command, which):
    assert named(command, NAMES) == which


def test_ranks_that_start_a_launcher_are_found_with_their_numbers(start, tmp_path):
    script = tmp_path / "torchrun"
    script.write_text("print('up', flush=True)\ninput()\n")
    spawn = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1], 'train.py'])"
    mine = [start(spawn, str(script), HOROVOD_RANK=number, GPURUN_ATTEMPT="1") for number in ("0", "3")]
    other = start(spawn, str(script), job="j-99999999", GPURUN_ATTEMPT="1")
    plain = start("print('up', flush=True); input()", HOROVOD_RANK="2", GPURUN_ATTEMPT="1")
    try:
        assert all(said(each) == "up" for each in (*mine, other, plain))
        assert ranks.starters(call(), JOB, 1, NAMES) == [{"rank": 0, "which": 0}, {"rank": 3, "which": 0}]
        assert ranks.starters(call(), JOB, 2, NAMES) == ranks.starters(call(), JOB, 1, []) == []
    finally:
        for each in (*mine, other, plain):
            each.stdin.close()
            each.wait()
