"""Fleets that take over others: hosts that are opened again and again."""

from __future__ import annotations

from types import SimpleNamespace

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
