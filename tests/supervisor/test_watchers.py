"""The threads that watch a running gang: they outlive what goes wrong on the head."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from waiting import until

from gpurun.errors import HostUnreachable, UnsafeState
from gpurun.jobs.spec import Grant
from gpurun.supervisor import health
from gpurun.supervisor import watch as watchers

SHORT = [
    OSError(24, "Too many open files"), UnsafeState("others may write there"), HostUnreachable("lost", host="h1"),
    RuntimeError("can't start new thread"), MemoryError(),
]  # fmt: skip


class Flaky:
    """Links to one host. The first calls fail, as on a head that is short of something."""

    def __init__(self, *errors, on_open=()):
        self.errors, self.on_open = list(errors), list(on_open)

    def agent(self, host):
        if self.errors:
            raise self.errors.pop(0)
        return SimpleNamespace(stream=self.stream, call=self.call)

    def open(self, hosts, **_):
        if self.on_open:
            raise self.on_open.pop(0)
        return {}

    def silent_s(self, host):
        return 0.0

    def stream(self, op, **_):
        self.streamed = op
        return _Stream([SimpleNamespace(value={"code": 3} if op == "docker.wait" else [])])

    def call(self, op, **_):
        return SimpleNamespace(value=[])


class _Stream(list):
    def __enter__(self):
        return iter(self)

    def __exit__(self, *_):
        pass


def job_with(links):
    lease = SimpleNamespace(job="j-00000001", attempt=1, grants=(Grant("h1", (0,)),))
    events = SimpleNamespace(emit=lambda *_, **__: None)
    return SimpleNamespace(links=links, lease=lease, members=("h1",), events=events, note=print, ran_s=1.0)


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
def test_the_end_of_a_container_is_seen_whatever_failed_before(monkeypatch, error):
    monkeypatch.setattr(watchers, "RECONNECT_S", 0.001)
    links = Flaky(error, error, on_open=[OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
    watch = watchers.Watchers(job_with(links), threading.Event())
    watch._until_exit("h1")
    assert watch.exits["h1"].code == 3 and watch.down_since == {}


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
def test_a_hosts_hardware_is_watched_whatever_failed_before(monkeypatch, error):
    monkeypatch.setattr(health, "RETRY_S", 0.001)
    monkeypatch.setattr(health, "GpuUseMeter", lambda _: None)
    stop, links = threading.Event(), Flaky(error, error)
    watch = health.HealthWatch(job_with(links), stop, SimpleNamespace(every_s=30.0))
    (thread,) = watch.threads(["h1"])
    thread.start()
    until(lambda: not thread.is_alive() or getattr(links, "streamed", ""))
    stop.set()
    thread.join()
    assert links.streamed == "health.watch"
