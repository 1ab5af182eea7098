"""Fleets that take over others: hosts that are opened again and again."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from gpurun.errors import HostUnreachable
from gpurun.remote.fleet import Fleet


def agent(host, closed):
    return SimpleNamespace(
        host=host, alive=True, last_heard_s=0.0, close=lambda: closed.append(host), die=lambda error: None
    )


def test_a_host_that_is_off_for_a_day_is_tried_every_second():
    fleet = Fleet({}, {})
    empty = len(vars(fleet))
    for _ in range(86_400):
        fleet.absorb(Fleet({}, {"gpu-1": HostUnreachable("off", host="gpu-1")}))
    assert len(vars(fleet)) == empty and not fleet.agents and list(fleet.failures) == ["gpu-1"]
    fleet.close()


def test_an_agent_that_is_opened_again_replaces_the_one_before_which_is_closed():
    fleet, closed = Fleet({}, {}), []
    for number in range(2000):
        fleet.absorb(Fleet({"gpu-1": agent(number, closed)}, {}))
    assert closed == list(range(1999)) and list(fleet.agents) == ["gpu-1"]
    fleet.close()
    assert closed == list(range(2000))


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_head_that_can_start_few_threads_calls_every_host_once_or_none(monkeypatch, most):
    """The calls of threads that had started went on behind the back of whoever then tried again."""
    hosts = [f"h{number}" for number in range(8)]
    with Fleet({host: SimpleNamespace(host=host, is_open=True, close=lambda: None) for host in hosts}, {}) as fleet:
        begin, begun, called = threading.Thread.start, [], []

        def start(thread):
            if len(begun) == most:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
            begin(thread)

        with monkeypatch.context() as few:
            few.setattr(threading.Thread, "start", start)
            if most:
                fleet.map(lambda agent: called.append(agent.host))
            else:
                with pytest.raises(RuntimeError, match="new thread"):
                    fleet.map(lambda agent: called.append(agent.host))
    assert sorted(called) == (hosts if most else [])
