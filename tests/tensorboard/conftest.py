"""Calls of ``gpurun tensorboard`` that end with their test."""

from __future__ import annotations

import pytest
from boards import INVENTORY, Call


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path / "home"


@pytest.fixture
def call(home):
    calls = []

    def begin(*argv):
        calls.append(Call(home, *argv))
        return calls[-1]

    yield begin
    for one in calls:
        one.process.terminate()
        one.process.communicate()
