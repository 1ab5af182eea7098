"""The threads of a ship always answer: hosts wait for what they say, for hours if need be."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from gpurun.content.ship import _Transfer
from gpurun.errors import HostNotReady, HostUnreachable

FULL = OSError(errno.ENOSPC, "No space left on device", "/cache/layers/x")


def transfer(layer):
    return _Transfer(None, SimpleNamespace(layer=layer), {"layers": []}, None, lambda: None)


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FULL, pytest.raises(HostNotReady, match="No space left on device")),
        (HostNotReady("Docker fails"), pytest.raises(HostNotReady, match="Docker fails")),
        (ZeroDivisionError("a mistake"), pytest.raises(ZeroDivisionError)),
    ],
)
def test_an_export_that_fails_in_any_way_ends_the_ship(error, told):
    ship = transfer(failing(error))
    ship._export(["sha256:0"])
    with told:
        ship._announce(None, None)


@pytest.mark.parametrize("error", [HostUnreachable("gone", host="gpu-1"), KeyError("state"), FULL])
def test_a_load_that_fails_in_any_way_is_over(error):
    ship = transfer(None)
    agent = SimpleNamespace(host="gpu-1", stream=failing(error))
    ship._install(agent, "t", SimpleNamespace(store="graph", have=()), b"")
    assert ship._installed.get_nowait().error is error
