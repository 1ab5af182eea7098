"""Fleets that take over others: hosts that are opened again and again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from gpurun.errors import HostUnreachable
from gpurun.remote.fleet import Fleet


def agent(host):
    return SimpleNamespace(host=host, alive=True, last_heard_s=0.0, close=lambda: None, die=lambda error: None)


def test_a_host_that_is_off_for_a_day_is_tried_every_second():
    closed = Counter()
    fleet = Fleet({}, {}, close=lambda: closed.update(["own"]))
    for number in range(86_400):
        off = {"gpu-1": HostUnreachable("off", host="gpu-1")}
        fleet.absorb(Fleet({}, off, close=lambda number=number: closed.update([number])))
    assert len(closed) == 86_400, "a try that opened nothing leaves nothing open"
    fleet.close()
    assert set(closed.values()) == {1}


def test_what_was_taken_over_is_closed_at_the_end_and_once():
    closed = Counter()
    fleet = Fleet({}, {})
    for number in range(2000):
        fleet.absorb(Fleet({"gpu-1": agent("gpu-1")}, {}, close=lambda number=number: closed.update([number])))
    assert not closed and "gpu-1" in fleet.agents
    fleet.close()
    assert len(closed) == 2000 and set(closed.values()) == {1}
