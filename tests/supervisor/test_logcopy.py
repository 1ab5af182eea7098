"""The copy of a gang's log: complete at its end, whatever breaks on the way, and waited for no longer than that."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from gpurun.errors import HostUnreachable
from gpurun.remote.agent import RemoteOpFailed, Reply
from gpurun.state.path import StatePath
from gpurun.supervisor import logcopy
from gpurun.supervisor.logcopy import LogCopy


def piece(nanos, text):
    return Reply({"stream": "stdout"}, f"2026-11-21T01:02:03.{nanos:09d}Z {text}\n".encode())


class Stream:
    """A stream of a script: replies, errors to raise, events to wait for."""

    def __init__(self, script):
        self._script = script

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        for each in self._script:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, threading.Event):
                each.wait(10)
            else:
                yield each


class Host:
    """An agent and the links to it: each follow gets the next script; the container ends with the last one."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.since = []

    def agent(self, _host):
        return self

    def stream(self, op, *, container, since):
        assert (op, container) == ("docker.logs", "c")
        self.since.append(since)
        return Stream(self.scripts.pop(0))

    def call(self, op, *, job):
        assert (op, job) == ("gang.inspect", "j")
        return Reply([{"name": "c", "status": "running" if self.scripts else "exited"}])


@pytest.fixture
def copy(tmp_path, monkeypatch):
    monkeypatch.setattr(logcopy, "RETRY_S", 0.01)

    def start(*scripts):
        host = Host(*scripts)
        made = LogCopy(host, "h", job="j", container="c", path=StatePath(tmp_path) / "log")
        made.start()
        return made, host

    yield start


def text(tmp_path):
    return [line.split(" ", 2)[2] for line in (tmp_path / "log").read_text().splitlines()]


def test_it_ends_with_the_container(copy, tmp_path):
    made, _ = copy([piece(1, "a"), piece(2, "b")])
    assert made.wait(10)
    made.close()
    assert text(tmp_path) == ["a", "b"]


def test_the_end_of_the_engine_is_not_the_end_of_the_container(copy, tmp_path):
    made, host = copy([piece(1, "a")], [piece(1, "a"), piece(2, "b")])
    assert made.wait(10)
    made.close()
    assert text(tmp_path) == ["a", "b"]
    assert host.since == [None, "1795222923.000000001"]


@pytest.mark.parametrize(
    "error",
    [HostUnreachable("cut", host="h"), RemoteOpFailed("gone", kind="no-docker"), RemoteOpFailed("", kind="internal")],
)
def test_what_breaks_is_tried_again(copy, tmp_path, error):
    made, _ = copy([piece(1, "a"), error], [error], [piece(1, "a"), piece(2, "b")])
    assert made.wait(10)
    made.close()
    assert text(tmp_path) == ["a", "b"]


def test_a_container_that_is_gone_prints_no_more(copy):
    made, _ = copy([RemoteOpFailed("no such container", kind="not-found")])
    assert made.wait(10)


def test_what_comes_while_it_is_waited_for_is_waited_for(copy, tmp_path):
    gates = [threading.Event() for _ in range(4)]
    script = [each for number, gate in enumerate(gates) for each in (gate, piece(number, str(number)))]
    made, _ = copy(script)
    timers = [threading.Timer(0.5 * (number + 1), gate.set) for number, gate in enumerate(gates)]
    for timer in timers:
        timer.start()
    assert made.wait(1.6)
    made.close()
    assert text(tmp_path) == ["0", "1", "2", "3"]


def test_silence_is_waited_for_no_longer_than_said(copy):
    gate = threading.Event()
    made, _ = copy([gate, piece(1, "late")])
    began = time.monotonic()
    assert not made.wait(0.2)
    assert time.monotonic() - began < 5
    made.close()
    gate.set()


def test_nothing_is_written_after_it_was_closed(copy, tmp_path):
    gate = threading.Event()
    made, _ = copy([piece(1, "a"), gate, piece(2, "b")])
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    made.close()
    gate.set()
    time.sleep(0.1)
    assert text(tmp_path) == ["a"]
    made.close()


def test_a_full_disk_is_waited_for_and_nothing_is_lost(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(logcopy, "FULL_RETRY_S", 0.01)
    write, full = os.write, [True, True]

    def to_a_full_disk(descriptor, data):
        if b" b\n" in data and full:
            full.pop()
            write(descriptor, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", to_a_full_disk)
    lines = [piece(1, "a"), piece(2, "b"), piece(3, "c")]
    made, host = copy(lines, lines, lines)
    assert made.wait(10)
    made.close()
    assert text(tmp_path) == ["a", "b", "c"]
    assert len(host.since) == 3


def test_what_was_never_begun_makes_no_file(tmp_path):
    LogCopy(Host(), "h", job="j", container="c", path=StatePath(tmp_path) / "log").close()
    assert not (tmp_path / "log").exists()
