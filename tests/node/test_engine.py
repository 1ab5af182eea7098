"""Whether a host's Docker engine is the one that it was: real sockets, served by processes that come and go."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from waiting import LIMIT_S, until

from gpurun.node import docker
from gpurun.node import docker as engine
from gpurun.node.agent.frames import Call

NOBODY = 65534
ENGINE = """
import http.server, os, socketserver, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"OK")
    def log_message(self, *_): pass
    def address_string(self): return ""
if os.path.exists(sys.argv[1]): os.unlink(sys.argv[1])
socketserver.UnixStreamServer(sys.argv[1], Answer).serve_forever()
"""


@pytest.fixture
def call():
    return Call(1, lambda *_: None, False, b"")


@pytest.fixture
def path(tmp_path, monkeypatch):
    found = tmp_path / "docker's.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{found}")
    return found


@pytest.fixture
def start(path):
    """Start an engine; it answers on return."""
    started = []

    def begin():
        started.append(subprocess.Popen([sys.executable, "-c", ENGINE, str(path)]))
        until(answers)
        return started[-1]

    def answers():
        connection = docker.Connection(str(path), LIMIT_S)
        try:
            connection.connect()
        except OSError:
            return False
        connection.close()
        return True

    yield begin
    for each in started:
        each.kill()
        each.wait()


def test_an_engine_that_stays_is_the_same(call, start, tmp_path):
    start()
    engine.note_engine(call, str(tmp_path))
    assert engine.compare(call, str(tmp_path))["state"] == "same"


def test_an_engine_that_was_restarted_is_another_with_its_age(call, start, tmp_path):
    first = start()
    engine.note_engine(call, str(tmp_path))
    first.kill()
    first.wait()
    began = time.monotonic()
    start()
    time.sleep(0.5)
    found = engine.compare(call, str(tmp_path))
    assert found["state"] == "restarted"
    assert 0.4 < found["up_s"] < time.monotonic() - began + 0.1
    assert str(first.pid) in found["why"]


def test_an_engine_that_is_gone(call, start, tmp_path, path):
    first = start()
    engine.note_engine(call, str(tmp_path))
    first.kill()
    first.wait()
    refused = engine.compare(call, str(tmp_path))
    path.unlink()
    missing = engine.compare(call, str(tmp_path))
    assert [refused["state"], missing["state"]] == ["gone", "gone"]
    assert str(path) in missing["why"]


def test_one_that_is_frozen_is_the_same_and_nobody_waits_long_for_it(call, start, tmp_path, monkeypatch):
    """It has ended nothing; while it stops for good it refuses who asks."""
    monkeypatch.setattr(engine, "LIVES_S", 0.2)
    first = start()
    engine.note_engine(call, str(tmp_path))
    first.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    found = engine.compare(call, str(tmp_path))
    assert (found["state"], time.monotonic() - began < engine.ANSWER_S / 2) == ("same", True)
    first.kill()
    first.wait()
    assert engine.compare(call, str(tmp_path))["state"] == "gone"


def test_one_that_keeps_who_asks_waiting_is_gone(call, tmp_path, path, monkeypatch):
    """As systemd does with the socket of an engine that is down."""
    monkeypatch.setattr(engine, "ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert engine.compare(call, str(tmp_path))["state"] == "gone"


def test_one_that_may_not_be_asked_is_unknown(call, start, tmp_path, path):
    start()
    path.chmod(0)
    with ordinary_user():
        assert engine.compare(call, str(tmp_path))["state"] == "unknown"


@contextmanager
def ordinary_user():
    """Give up what only root may do: root may use a socket whatever its mode says."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"pid": "x", "started": 1}', '{"pid": [], "started": {}}', "\xff"]
)
def test_a_note_that_is_damaged_says_nothing(call, start, tmp_path, text):
    start()
    (tmp_path / engine.FILE).write_text(text)
    assert engine.compare(call, str(tmp_path))["state"] == "unknown"


def test_a_job_from_before_has_no_note(call, start, tmp_path):
    start()
    assert engine.compare(call, str(tmp_path))["state"] == "unknown"


def test_an_old_note_goes_when_nothing_can_be_known(call, tmp_path, path):
    (tmp_path / engine.FILE).write_text(json.dumps({"pid": 1, "started": 1}))
    engine.note_engine(call, str(tmp_path))
    assert not (tmp_path / engine.FILE).exists()


def test_the_socket_of_systemd_tells_of_dockerd(call, start, tmp_path, monkeypatch):
    """Whoever called listen() is who the socket tells of; dockerd then is to be found among all processes."""
    start()
    real = engine.processes.read_process(os.getpid())
    dockerd = real._replace(pid=4242, command="/usr/bin/dockerd -H fd://")
    monkeypatch.setattr(
        engine.processes, "read_process", lambda pid: real._replace(pid=pid, command="/lib/systemd/systemd --user")
    )
    monkeypatch.setattr(engine.processes, "list_processes", lambda: [real, dockerd])
    engine.note_engine(call, str(tmp_path))
    assert json.loads((tmp_path / engine.FILE).read_text()) == {"pid": 4242, "started": real.started}
    monkeypatch.setattr(engine.processes, "list_processes", lambda: [dockerd, dockerd._replace(pid=4243)])
    assert engine.compare(call, str(tmp_path))["state"] == "unknown", "two of them: nobody knows whose socket it is"
