"""Notices and signals reach the ranks that they are for: real scripts, real signals."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from rank_scripts import JOB, WAIT, call, ends, follow, host_at, printed, text
from waiting import LIMIT_S, until

from gpurun.node.agent import processes
from gpurun.node.job import rank_processes, ranks


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with host_at(tmp_path) as host:
        yield host


def test_a_notice_reaches_the_rank_and_not_its_children_nor_anybody_else(host, tmp_path):
    (tmp_path / "child").write_text("trap 'echo child >told; exit' TERM; while :; do sleep 0.05; done")
    command = f"cd {tmp_path}; sh child & {WAIT}"
    host.write(grace_s=5)
    first, second = host.start(0, "sh", "-c", command), host.start(1, "sh", "-c", WAIT)
    stranger = host.start(0, "sh", "-c", WAIT, job="j-ffffffff")
    later = host.start(0, "sh", "-c", WAIT, attempt=2)
    until(lambda: printed(host) == 4)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 2
    assert (second.wait(LIMIT_S), stranger.poll(), later.poll()) == (7, None, None)
    until(lambda: (0, 7, False) in ends(follow()))
    assert first.wait(LIMIT_S) == 7  # the script has ended the child by now, the notice had not
    until(lambda: printed(host, b"told") == 2)


def test_a_notice_before_the_rank_starts_is_kept_for_it_and_only_in_that_attempt(host, tmp_path):
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    assert host.start(0, "touch", str(tmp_path / "ran")).wait(LIMIT_S) == 143
    assert not (tmp_path / "ran").exists()
    assert host.start(0, "touch", str(tmp_path / "ran"), attempt=2).wait(LIMIT_S) == 0


def test_no_rank_escapes_a_notice_that_comes_while_ranks_start(host):
    """A rank is told, or never starts: whichever step its script is at."""
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
        attempt = int(delay_s * 1000) + 10
        started = [host.start(rank, "sh", "-c", "sleep 20", attempt=attempt) for rank in range(3)]
        time.sleep(delay_s)
        rank_processes.signal(call(), JOB, "TERM", attempt=attempt)
        assert [abs(process.wait(LIMIT_S)) % 128 for process in started] == [15, 15, 15]


def test_a_rank_that_has_ended_is_counted_no_more_while_its_script_keeps_that_from_the_launcher(host):
    host.write(grace_s=600)
    started = [host.start(rank, "sh", "-c", WAIT) for rank in (0, 1)]
    until(lambda: printed(host) == 2)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 2
    started.append(host.start(2, "true"))
    until(lambda: sorted(ends(follow())) == [(0, 7, False), (1, 7, False), (2, 143, False)])
    until(lambda: ranks.count(call(), JOB) == 0)
    assert [process.poll() for process in started] == [None, None, None]
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    assert [process.poll() for process in started] == [None, None, None]


@pytest.mark.parametrize(
    ("environ", "cmdline", "found"),
    [(b"A=1\0B\0", b"x\0", {"A": "1"}), (b"", b"", None), (b"", b"x\0", {}), (None, b"", None)],
    ids=["usual", "gone, or in the middle of an exec", "started without any", "no such process"],
)
def test_who_has_no_environment_for_a_moment_is_not_taken_for_somebody_without(tmp_path, environ, cmdline, found):
    """A tool of the script that is just ending, or starting, would pass for the rank, and the rank not be told."""
    (tmp_path / "7").mkdir()
    for name, content in (("environ", environ), ("cmdline", cmdline)):
        if content is not None:
            (tmp_path / "7" / name).write_bytes(content)
    assert processes.environment_of(7, str(tmp_path)) == found


def test_a_rank_that_hides_its_environment_is_told(host):
    """Programs that show their own name in ps write over it."""
    code = (
        "import ctypes, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n"
        "stat = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
        "begin, end = int(stat[47]), int(stat[48])\n"
        "ctypes.memset(begin, 0, end - begin)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    process = host.start(0, sys.executable, "-c", code)
    until(lambda: printed(host) == 1)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    assert process.wait(LIMIT_S) == 7


def test_a_rank_that_could_not_report_is_told_too(host, tmp_path):
    out = tmp_path / "out"
    process = host.start(0, "sh", "-c", f"exec >{out}; {WAIT}", GPURUN_RUN="/proc/1/no such")
    until(lambda: out.exists() and "up" in out.read_text())
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    assert process.wait(LIMIT_S) == 7


def test_without_reports_a_program_under_a_shell_is_told_too(host, tmp_path):
    out = tmp_path / "out"
    command = f'exec >{out}; sh -c "{WAIT}"; true'
    host.start(0, "sh", "-c", command, GPURUN_RUN="/proc/1/no such")
    until(lambda: out.exists() and "up" in out.read_text())
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    until(lambda: "told" in out.read_text())


def test_what_a_rank_left_behind_is_no_rank(host):
    survivor = "setsid sh -c \"trap '' TERM; echo up; exec sleep 300\""
    process = host.start(0, "sh", "-c", f"{survivor} & sleep 0.5; kill -9 $PPID")
    process.wait(LIMIT_S)
    until(lambda: printed(host) == 1)
    until(lambda: len(rank_processes.of_job(JOB, 1)) == 1)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    for one in rank_processes.of_job(JOB, 1):
        os.kill(one.process.pid, signal.SIGKILL)


def test_a_full_disk_or_a_trap_in_the_markers_place_keeps_no_notice_from_a_rank(host, tmp_path):
    (host.run / "stop.1").symlink_to(tmp_path / "secret")
    process = host.start(0, "sh", "-c", WAIT)
    until(lambda: printed(host) == 1)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    assert process.wait(LIMIT_S) == 7
    assert not (tmp_path / "secret").exists()


@pytest.mark.parametrize("name", ["", "KILL -9", "9", "SIGTERM", "_DFL", "nosuch"])
def test_a_signal_that_is_none_is_refused(host, name):
    with pytest.raises(ValueError, match="no signal"):
        rank_processes.signal(call(), JOB, name, attempt=1)
    assert not list(host.run.iterdir())


def test_a_rank_that_has_printed_more_than_the_head_can_copy_is_named_all_the_same(host, monkeypatch):
    """The head reads slowly. The end comes first, as old as it is, and nothing of the output is lost."""
    monkeypatch.setattr(ranks, "MOST_WAIT_S", 0.0)
    folder = host.fake("0.17.99", o="x" * (4 << 20), end_3="")
    ended_s = time.time() - 50
    os.utime(folder / "end.3", (ended_s, ended_s))
    found = follow()
    (place,) = [number for number, reply in enumerate(found) if reply.value["kind"] == "end"]
    assert found[place].value["code"] == 3
    assert found[place].value["more"] is True
    assert 50 <= found[place].value["age_s"] < time.time() - ended_s
    assert 0 < place < len(found) - 1
    assert len(text(found, 0)) == 4 << 20


def test_the_age_of_an_end_is_that_of_the_moment_it_is_told(host):
    """Others may have failed while the output of this one was copied."""
    host.fake("0.17.99", o="x" * (1 << 18), end_3="")
    replies = ranks.follow(call(), JOB, 1, {}, True)
    found = [next(replies), next(replies)]
    time.sleep(0.3)
    found += replies
    assert found[-1].value["kind"] == "end"
    assert found[-1].value["age_s"] >= 0.3


def test_a_rank_that_its_launcher_has_told_to_end_is_counted_and_not_told_again(host):
    """horovodrun ends the ranks beside a failed one; a second later the supervisor gives them their notice."""
    go = host.run / "go"
    script = host.start(0, "sh", "-c", f"trap 'echo told' TERM; echo up; until [ -e {go} ]; do sleep 0.05; done")
    other = host.start(1, "sh", "-c", WAIT)
    until(lambda: printed(host) == 2)
    script.terminate()
    until(lambda: printed(host, b"told") == 1)
    assert rank_processes.signal(call(), JOB, "TERM", 1) == 2
    assert other.wait(LIMIT_S) == 7
    go.touch()
    assert script.wait(LIMIT_S) == 0
    assert text(follow(), 0) == b"up\ntold\n"


@pytest.mark.parametrize("name", ["USR1", "KILL"])
def test_another_signal_reaches_also_those_that_their_launcher_has_told_to_end(host, name):
    script = host.start(0, "sh", "-c", "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done")
    until(lambda: printed(host) == 1)
    script.terminate()
    until(lambda: printed(host, b"told") == 1)
    assert rank_processes.signal(call(), JOB, name, 1) == 1
    assert script.wait(LIMIT_S) == 128 + getattr(signal, f"SIG{name}")
