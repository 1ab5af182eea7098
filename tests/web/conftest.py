"""A state directory of the test's own."""

from __future__ import annotations

import pytest
from sites import INVENTORY, pages


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path / "home"


@pytest.fixture
def door(home):
    return pages(home)
