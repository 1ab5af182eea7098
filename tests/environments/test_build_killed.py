"""Builds of one environment in several processes, some of which are killed half way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import building
import pytest
from fake_engine import BASE, FakeEngine, ensure
from waiting import LIMIT_S

WAITS = "waiting for another build of the same environment\n"


class HaltingEngine(FakeEngine):
    """Halts at the first request with `step` in its path, before or after doing it, until the test lets it go on."""

    def __init__(self, step="", *, after=False, pip=None):
        super().__init__(pip)
        self._step, self._after = step, after
        self.reached, self.may_go_on, self.has_gone_on = (threading.Event() for _ in range(3))

    def exchange(self, method, path, body=None, timeout_s=60.0):
        return self._halting(path, lambda: super(HaltingEngine, self).exchange(method, path, body))

    def upload(self, path, tar):
        return self._halting(path, lambda: super(HaltingEngine, self).upload(path, tar))

    def _halting(self, path, ask):
        if not self._step or self._step not in path or self.reached.is_set():
            return ask()
        said = ask() if self._after else None
        self.reached.set()
        assert self.may_go_on.wait(LIMIT_S)
        said = said or ask()
        self.has_gone_on.set()
        return said


@pytest.fixture
def start(wanted, tmp_path):
    """Start a process that builds the environment with an engine of this one."""
    started, listening = [], []

    def begin(engine, *, ignores=False):
        socket = tmp_path / "engine.sock"
        if not socket.exists():
            listening.append(building.serve(engine, socket))
        argv = [sys.executable, building.__file__, str(socket), wanted.path]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        argv = ["nohup", *argv] if ignores else argv
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    for listener in listening:
        listener.close()


def half(folders):
    """Leave what no complete build has."""
    (folders["/opt/gpurun/environment"] / "half.py").write_text("")


@pytest.fixture
def clean(wanted):
    """What an undisturbed build gives."""
    return list(ensure(wanted, FakeEngine())[0].layers)


def nothing_is_left(engine, cache, builds):
    assert engine.containers == {} and list(cache.iterdir()) == []
    assert engine.builds == builds and len(engine.made) == 2 and BASE in engine.made


def test_two_processes_that_want_the_same_build_it_once(start, cache, clean):
    engine = HaltingEngine("/start", after=True)
    first = start(engine)
    assert engine.reached.wait(LIMIT_S)
    second = start(engine)
    assert second.stdout.readline() == WAITS
    engine.may_go_on.set()
    said = [process.communicate(timeout=LIMIT_S)[0].splitlines()[-1] for process in (first, second)]
    assert list(map(json.loads, said)) == [clean, clean]
    nothing_is_left(engine, cache, builds=1)


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("-build", True), ("/start", False), ("/start", True), ("-layer", True), ("/archive", False),
        ("/archive", True), ("/commit", False), ("/commit", True),
    ],
)  # fmt: skip
def test_a_build_that_is_killed_and_begun_again(start, wanted, cache, clean, step, after):
    hooks = [] if step in ("-build", "/commit") else [half]
    engine = HaltingEngine(step, after=after, pip=lambda folders: hooks and hooks.pop()(folders))
    killed = start(engine)
    assert engine.reached.wait(LIMIT_S)
    killed.kill()
    killed.wait(LIMIT_S)
    engine.may_go_on.set()  # Docker does what it was asked to, although nobody waits for the answer
    assert engine.has_gone_on.wait(LIMIT_S)
    image, _ = ensure(wanted, engine)
    assert list(image.layers) == clean
    ensure(wanted, engine)
    assert len(engine.made) == 2
    assert engine.containers == {} and list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("step", "number"),
    [("/start", signal.SIGTERM), ("/archive", signal.SIGHUP), ("-build", signal.SIGINT), ("/start", None)],
)
def test_a_build_that_is_told_to_end_removes_its_container_first(start, cache, step, number):
    """SIGTERM to `submit` and a closed terminal left the container, and pip ran on in it."""
    engine = HaltingEngine(step, after=True)
    told = start(engine, ignores=number is None)
    assert engine.reached.wait(LIMIT_S)
    for _ in range(1 if number is signal.SIGINT else 2):
        told.send_signal(number or signal.SIGHUP)
    if number is None:  # nohup
        engine.may_go_on.set()
        assert told.wait(LIMIT_S) == 0
        return
    assert told.wait(LIMIT_S) in (128 + number, -number)
    assert engine.containers == {} and list(cache.iterdir()) == [] and list(engine.made) == [BASE]
    engine.may_go_on.set()


@pytest.mark.parametrize("step", ["/start", "/archive"])
def test_who_waits_for_a_build_that_is_killed_builds_it(start, cache, clean, step):
    hooks = [half]
    engine = HaltingEngine(step, after=True, pip=lambda folders: hooks and hooks.pop()(folders))
    killed = start(engine)
    assert engine.reached.wait(LIMIT_S)
    waits = start(engine)
    assert waits.stdout.readline() == WAITS
    killed.kill()
    said = waits.communicate(timeout=LIMIT_S)[0]
    engine.may_go_on.set()
    assert waits.returncode == 0 and json.loads(said.splitlines()[-1]) == clean
    nothing_is_left(engine, cache, builds=2)
