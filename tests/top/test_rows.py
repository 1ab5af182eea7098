"""What the live view says, and its plain lines."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading

import pytest

from gpurun.errors import HostUnreachable
from gpurun.facts import GpuSample, HostSample
from gpurun.jobs.record import State
from gpurun.quantities import duration
from gpurun.remote.fleet import Fleet
from gpurun.views.feed import Sampling
from gpurun.views.lines import plain
from gpurun.views.picture import OutHost
from gpurun.views.rows import (
    SORTS,
    changed_lines,
    first_lines,
    host_rows,
    job_rows,
    leased_hosts,
    moment_lines,
    queue_rows,
    screen_summary,
    usage,
)


def test_every_sort_is_one_and_keeps_every_job(cluster):
    for sort in SORTS:
        assert len(job_rows(cluster.latest(), duration, sort=sort)) == 3


def test_what_hosts_say_beyond_their_gpus_counts_for_nobody(cluster):
    moment = cluster.latest()
    lies = tuple(GpuSample(at, utilization_percent=100) for at in (-1, 2, 99))
    used = usage(moment._replace(samples={"n1": HostSample(gpus=lies)}))
    assert used == {}


def test_trouble_of_a_gpu_is_named(cluster):
    moment = cluster.latest()
    hurt = HostSample(gpus=(GpuSample(0, problem="fell off\x1b[2J"), GpuSample(1, throttle=("heat",))))
    (row,) = [row for row in host_rows(moment._replace(samples={"n1": hurt})) if row.key == "n1"]
    assert row.cells[-1] == "GPU 0: fell off\\x1b[2J; GPU 1: heat"


def test_a_host_that_is_out_is_named_with_its_reason(cluster):
    moment = cluster.latest()
    hosts = [
        host._replace(state="out", shown="out", out=OutHost("no route\x1b[2J", "", 9.0)) if host.name == "n4" else host
        for host in moment.picture.hosts
    ]
    out = moment._replace(picture=moment.picture._replace(hosts=tuple(hosts)))
    (row,) = [row for row in host_rows(out) if row.key == "n4"]
    assert row.cells[2] == "out" and row.cells[-1] == "no route\\x1b[2J"
    assert "1 host out" in screen_summary(out) and "out" not in screen_summary(moment)
    assert any("n4: out" in line for line in changed_lines(moment, out, duration))


def drawn(moment, columns=200):
    return [plain(line) for line in moment_lines(moment, duration, columns)]


def test_status_watch_draws_the_rows_of_top_as_tables(cluster):
    moment = cluster.latest()
    lines = drawn(moment)
    assert lines[0] == screen_summary(moment)
    for rows in (job_rows(moment, duration), queue_rows(moment, duration), host_rows(moment)):
        for row in rows:
            found = [line.split() for line in lines if row.key in line.split()]
            if row.key == "n4":
                assert not found, "no job uses it, and nothing is wrong with it"
            else:
                assert " ".join(row.cells).split() in found
    silent = [line for line in moment_lines(moment, duration, 200) if line and line[0][0] == "n3"]
    assert {mark for text, mark in silent[0] if text.strip()} == {"bad"}


def test_status_watch_cuts_no_cell_of_a_narrow_terminal(cluster):
    lines = drawn(cluster.latest(), columns=60)
    assert any("because waits for 60 more GPUs" in line for line in lines)
    assert any("trouble the connection timed out" in line for line in lines)


def test_whatever_hosts_and_users_say_stays_text(cluster):
    cluster.names[1] = "res\x1b[2Jnet"
    cluster.silent = {"n3": "the driver\x1b[2J hangs"}
    text = "\n".join(drawn(cluster.latest()))
    assert "\x1b" not in text and "the driver\\x1b[2J hangs" in text and "res\\x1b[2Jnet" in text


def test_plain_lines_tell_all_once_and_then_only_news(cluster):
    before = cluster.latest()
    told = list(first_lines(before, duration))
    assert "no answer from n3" in told[0]
    assert any(line.startswith("job j-00000001 resnet of ada: RUNNING, 4 GPUs") for line in told)
    assert any(line.startswith("queue 1: j-00000003 llm, 64 GPUs") for line in told)
    assert any(line.startswith("host n3: ok, cells bb, no answer: the connection timed out") for line in told)
    cluster.now_s, cluster.percent = 103.0, 95
    assert list(changed_lines(before, cluster.latest(), duration)) == []
    cluster.states[3], cluster.silent = State.CANCELLED, {}
    now = list(changed_lines(before, cluster.latest(), duration))
    assert [line.split(":")[0] for line in now[1:]] == [
        "job j-00000002 bert of ada", "job j-00000003 llm of ada", "host n3"
    ]  # fmt: skip


def test_hosts_are_opened_once_and_one_that_fails_holds_up_nobody(cluster):
    opened = []

    def open_fleet(hosts):
        opened.append(sorted(hosts))
        return Fleet({}, {host: HostUnreachable("no route", host=host) for host in opened[-1]})

    wanted = leased_hosts(cluster.latest().picture)
    sampling = Sampling(open_fleet, lambda: wanted)
    for _ in range(5):
        sampling.look()
    assert opened == [["n1", "n2", "n3"]]
    assert {sample.problem for sample in sampling.latest().values()} == {"no route"}
    wanted = ["n1"]
    sampling.look()
    assert set(sampling.latest()) == {"n1"} and len(opened) == 1
    sampling.close()


def test_a_host_is_asked_again_after_a_while(cluster, monkeypatch):
    opened = []

    def open_fleet(hosts):
        opened.append(list(hosts))
        return Fleet({}, {host: HostUnreachable("no route", host=host) for host in opened[-1]})

    monkeypatch.setattr("gpurun.views.feed.AGAIN_S", -1.0)
    sampling = Sampling(open_fleet, lambda: ["n1"])
    sampling.look()
    sampling.look()
    sampling.close()
    assert opened == [["n1"], ["n1"]]


def test_an_opening_that_comes_after_the_end_is_closed():
    closed = threading.Event()

    class Late(Fleet):
        def close(self):
            closed.set()
            super().close()

    sampling = Sampling(lambda _hosts: sampling.close() or Late({}, {}), lambda: ["n1"])
    sampling.look()
    assert closed.is_set()


INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"n[1-8]": {}}}}
"""


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return {**os.environ, "GPURUN_HOME": str(tmp_path / "home"), "GPURUN_INVENTORY": str(tmp_path / "inventory.yaml")}


def test_without_a_terminal_it_says_what_to_do(environ):
    argv = [sys.executable, "-m", "gpurun", "top"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 2 and "needs a terminal" in done.stderr and "--plain" in done.stderr


def test_without_the_extra_it_says_what_to_install(environ):
    program = "import sys; sys.modules['textual'] = None; from gpurun.cli.main import main; main(sys.argv[1:])"
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", program, "top"], env=environ, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2 and "pip install 'gpurun[top]'" in done.stderr


@pytest.mark.parametrize("command", [("top", "--plain"), ("status", "--watch")])
def test_plain_mode_prints_into_a_pipe_until_its_reader_has_gone(environ, command):
    argv = [sys.executable, "-m", "gpurun", *command]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "32 of 32 GPUs free · 0 jobs running · 0 waiting\n"
        process.send_signal(2)
        _, said = process.communicate(timeout=30)
    assert process.returncode in (0, 130) and "Traceback" not in said


def test_status_watch_is_drawn_again_on_a_terminal_until_ctrl_c(environ):
    environ["TERM"] = "xterm"
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "gpurun", "status", "--watch"]
    with subprocess.Popen(
        argv, env={**environ, "TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while b"32 of 32 GPUs free" not in seen:
            seen += os.read(ours, 4096)
        cordon = [sys.executable, "-m", "gpurun", "inventory", "cordon", "n1"]
        subprocess.run(cordon, env=environ, check=True, capture_output=True, input="")
        while b"28 of 32 GPUs free" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(2)
        while process.poll() is None:  # it writes while it ends
            with contextlib.suppress(OSError):
                seen += os.read(ours, 4096)
    os.close(ours)
    assert process.returncode == 0 and b"Traceback" not in seen
