"""What holds for every test process."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import forked
import pytest
import roomy_disk
from how_many import HOW_MANY
from hypothesis import HealthCheck, settings

import gpurun

pytest_plugins = ("tiers", "timing")

# A busy machine makes an example slow, not wrong: neither Hypothesis's deadline nor its health check judges time.
# What a change is judged by is the same every time; the long profile looks for what nobody has seen yet.
# `how_many` says how many examples each profile tries.
FEW, MANY = HOW_MANY["examples"]
settings.register_profile("timeless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", settings.get_profile("timeless"), max_examples=FEW, derandomize=True)
settings.register_profile("long", settings.get_profile("timeless"), max_examples=MANY)
settings.load_profile("default")


def pytest_configure(config):
    """Compile gpurun as pip does at installation: tests start hundreds of its processes. Then restore signals.

    Tests in the background, or under nohup, may have to ignore signals, and so would all that they start.
    """
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(gpurun.__file__).parent, quiet=1)
    for number, usual in {
        signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
    }.items():  # fmt: skip
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection():
    """Make collecting cheap: all that it makes stays, and no test's own collections look through it again."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    forked.close()


@pytest.fixture(autouse=True)
def usual_umask():
    """Who enters a shared state directory changes the umask: other users could not read the next test's files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests(tmp_path_factory):
    """End what tests left running, such as a supervisor that waits for a host that never comes back."""
    yield
    mine = b"GPURUN_HOME=" + os.fsencode(tmp_path_factory.getbasetemp()) + b"/"
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if any(word.startswith(mine) for word in (entry / "environ").read_bytes().split(b"\0")):
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
def nothing_resumes(monkeypatch):
    """Commands in this process start neither passes nor supervisors, which would write the test's records, too."""
    monkeypatch.setattr("gpurun.head.waiter.Waiter.resume", lambda *_: ())


@pytest.fixture
def own_copy(monkeypatch):
    """Replace functions of a module such as `time` in one other module alone: threads elsewhere keep the real ones."""

    def replace(user, name, **functions):
        copy = ModuleType(name)
        vars(copy).update({**vars(getattr(user, name)), **functions})
        monkeypatch.setattr(user, name, copy)

    return replace


@pytest.fixture(autouse=True)
def caches_of_the_tests(request, tmp_path_factory, monkeypatch):
    """No test writes caches and their key to the developer's home. The lab's own images and disks stay there."""
    if request.node.get_closest_marker("lab") is None:
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp() / name.lower()))


@pytest.fixture(autouse=True)
def quick_starts(request, monkeypatch):
    """`python -m gpurun…` is a fork of a process that has imported it; not on the lab, nor where starts are judged."""
    if request.node.get_closest_marker("lab") is None and "real_starts" not in request.fixturenames:
        monkeypatch.setattr(subprocess, "Popen", forked.Popen)


@pytest.fixture(autouse=True)
def room_on_the_disk(request):
    """No quick test depends on how full this machine's disk is, also after `monkeypatch.undo`."""
    if request.node.get_closest_marker("lab") is None:
        with roomy_disk.installed():
            yield
    else:
        yield


@pytest.fixture
def real_starts():
    """The test is about how a process starts, or what it costs: it gets real ones."""


@pytest.fixture(name="gpurun")
def command_in_this_process(capsys):
    """Run a command in this process; its exit code, and what it printed on stdout and stderr."""
    from json_shapes import printed_problems

    from gpurun.cli.main import main

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert printed_problems(argv, out) == []
        return ended.value.code, out, err

    return run
