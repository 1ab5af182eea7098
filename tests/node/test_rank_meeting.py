"""Ranks that have met are seen in the kernel's table of connections; whoever may have met is not accused."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.node.agent.frames import Call
from gpurun.node.job import rank_processes, ranks
from gpurun.node.job.ranks import ESTABLISHED, LISTEN, SYN_SENT, TIME_WAIT, TcpRow, have_met

JOB = f"j-3{os.getpid():07x}"
HERE, THERE, LOCAL, WORLD = "10.0.0.1", "10.0.0.2", "127.0.0.1", "93.184.216.34"


def row(local, remote, state=ESTABLISHED, inode="7"):
    return TcpRow(local, remote, state, inode)


@pytest.mark.parametrize(
    ("table", "met"),
    [
        ([], False),
        ([row((HERE, 29400), ("0.0.0.0", 0), LISTEN)], False),
        ([row((HERE, 4000), (HERE, 29400), SYN_SENT)], False),
        ([row((HERE, 4000), (HERE, 29400), inode="99")], True),
        ([row((HERE, 29400), (THERE, 4000), TIME_WAIT, "0")], True),
        ([row((HERE, 4000), (THERE, 4001))], True),
        ([row((HERE, 4000), ("192.168.7.7", 4001))], True),
        ([row((HERE, 4000), (WORLD, 443))], False),
        ([row((HERE, 4000), (THERE, 4001), inode="99")], False),
        ([row((LOCAL, 4000), (LOCAL, 4001)), row((LOCAL, 4001), (LOCAL, 4000), inode="8")], False),
        ([row((LOCAL, 4000), (LOCAL, 4001)), row((LOCAL, 4001), (LOCAL, 4000), inode="9")], True),
        ([row(("::1", 4000), ("::1", 4001))], True),
        ([row((LOCAL, 4000), (LOCAL, 4001), TIME_WAIT, "0")], True),
        ([row((LOCAL, 4000), (LOCAL, 80), TIME_WAIT, "0"), row(("0.0.0.0", 80), ("0.0.0.0", 0), LISTEN)], False),
        ([row((HERE, 4000), (THERE, 2222), TIME_WAIT, "0")], False),
        ([row((HERE, 4000), (WORLD, 443), TIME_WAIT, "0")], False),
    ],
)
def test_what_may_be_the_connection_of_two_ranks_counts_as_one(table, met):
    owners = {"7": 0, "8": 0, "9": 1}
    assert have_met(table, owners, [HERE, THERE], {29400}, {2222}) is met


def test_the_kernels_table_is_read_with_both_families(monkeypatch):
    lines = {
        "tcp": "  0: 0100007F:72D8 0200000A:0050 01 x:x 00:00000000 x 0 0 41 1",
        "tcp6": "0: 0000000000000000FFFF00000100007F:1 00000000000000000000000001000000:2 06 x:x 03:000003E8 x 0 0 0 3",
    }
    monkeypatch.setattr(
        ranks,
        "open",
        lambda path: __import__("io").StringIO("head\n" + lines[path.rpartition("/")[2]]),
        raising=False,
    )
    assert list(ranks.rows("self")) == [
        TcpRow((LOCAL, 29400), ("10.0.0.2", 80), "01", "41"), TcpRow((LOCAL, 1), ("::1", 2), "06", "0", 50.0),
    ]  # fmt: skip


CLIENT = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(1, flush=True); input()"
)
IDLE = "print(1, flush=True); input()"


def look(port, *, attempt=1, ports=()):
    call = Call(1, lambda *_: None, False, b"")
    return ranks.look_at_meeting(call, JOB, attempt, addresses=[LOCAL], ports=[port, *ports], spared=[])


@pytest.fixture
def rank():
    started = []

    def start(number, code, *args, **environ):
        environ = {"GPURUN_JOB": JOB, "GPURUN_ATTEMPT": "1", "GPURUN_RANK": str(number), **environ}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environ},
        )  # fmt: skip
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.fixture
def alone(monkeypatch):
    """Connections that others on this machine have closed are none of these tests'."""
    real = ranks.rows
    monkeypatch.setattr(ranks, "rows", lambda who: [each for each in real(who) if each.inode != "0"])


def test_copies_have_not_met_and_ranks_with_a_connection_have(rank, alone):
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        for number in (0, 1):
            rank(number, IDLE, HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))
        assert look(1) == {"ranks": [0, 1], "ports": sorted({1, port}), "met": False}
        assert look(1, attempt=2)["ranks"] == []
        rank(1, CLIENT, str(port))
        assert look(1)["met"] and look(port)["met"]


def begun(monkeypatch, folder, started_s):
    """The folder of a rank whose script started at this second since boot."""
    monkeypatch.setattr(rank_processes, "run_folder", lambda _: str(folder))
    (folder / "ranks" / "1" / f"0.77.{int(started_s * os.sysconf('SC_CLK_TCK'))}").mkdir(parents=True)


def up_s():
    return float(Path("/proc/uptime").read_text().split()[0])


def test_the_port_of_a_group_is_remembered_after_its_ranks_have_ended(rank, monkeypatch, tmp_path):
    begun(monkeypatch, tmp_path, up_s())
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        member = rank(0, CLIENT, str(port))
        peer, _ = server.accept()
        member.communicate("\n")
        peer.close()
    assert look(port)["met"]


def test_what_was_closed_before_the_ranks_started_was_not_theirs(monkeypatch):
    closed = TcpRow((LOCAL, 4000), (LOCAL, 4001), TIME_WAIT, "0", 10.0)
    monkeypatch.setattr(ranks, "rows", lambda _: [closed])
    for running_s, met in ((9.0, False), (11.0, True)):
        monkeypatch.setattr(ranks, "_running_s", lambda *_, since_s=running_s, **__: since_s)
        assert look(1)["met"] is met


def test_the_time_since_the_first_rank_is_that_of_its_script(monkeypatch, tmp_path):
    """gpurun's own checks end less than a second before; horovodrun looks for networks until it starts ranks."""
    assert ranks._running_s(JOB, 1, is_seen=True) == math.inf
    assert ranks._running_s(JOB, 1, is_seen=False) == 0.0
    now_s = up_s()
    for started_s in (now_s - 30.0, now_s - 2.0):
        begun(monkeypatch, tmp_path, started_s)
    assert 29.9 < ranks._running_s(JOB, 1, is_seen=True) - (up_s() - now_s) < 30.5


@pytest.mark.parametrize("text", ["0", "100", "", "many"])
def test_a_kernel_that_forgets_accuses_nobody(text, tmp_path, monkeypatch):
    Path(tmp_path / "limit").write_text(text)
    monkeypatch.setattr(ranks, "_LIMIT", str(tmp_path / "limit"))
    assert look(1)["met"]


def test_a_rank_that_names_no_port_or_lives_in_another_network_is_not_judged(rank, alone, monkeypatch):
    rank(0, IDLE, HOROVOD_GLOO_RENDEZVOUS_PORT="x")
    rank(1, IDLE, HOROVOD_GLOO_RENDEZVOUS_PORT="99999999")
    assert look(0) == {"ranks": [0, 1], "ports": [], "met": False}
    monkeypatch.setattr(ranks, "_network", lambda who: who)
    assert look(0)["ranks"] == []
