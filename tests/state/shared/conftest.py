"""A shared state directory and its users: real processes of throw-away uids."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest
from shared_code import INVENTORY
from users import ALICE, BOB, GROUP, STRANGER, left_over, make_user, open_folder

from gpurun.state.paths import StatePath
from gpurun.state.sharing import StateDirectory, append_only


@pytest.fixture
def tmp_path():
    with open_folder() as made:
        yield made


@pytest.fixture
def state(tmp_path):
    """A shared state directory."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    home = tmp_path / "state"
    StateDirectory(home).make_shared(GROUP)
    yield home
    for pid in left_over(home):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    append_only(StatePath(home) / "audit.jsonl", on=False)


@pytest.fixture
def alice(tmp_path, state):
    return make_user(ALICE, tmp_path, state)


@pytest.fixture
def bob(tmp_path, state):
    return make_user(BOB, tmp_path, state)


@pytest.fixture
def stranger(tmp_path, state):
    return make_user(STRANGER, tmp_path, state, groups=())
