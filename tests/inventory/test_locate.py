"""Which inventory file a command means."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.errors import BadInput
from gpurun.inventory.read import find_inventory, load_inventory


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config" / "gpurun" / "inventory.yaml"
    config.parent.mkdir(parents=True)
    environ = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    with pytest.raises(BadInput) as nowhere:
        find_inventory(None, environ)
    assert str(tmp_path / "inventory.yaml") in str(nowhere.value)
    assert str(config) in str(nowhere.value)
    assert "/etc/gpurun/inventory.yaml" in str(nowhere.value)
    config.touch()
    assert find_inventory(None, environ) == config
    (tmp_path / "inventory.yaml").touch()
    assert find_inventory(None, environ) == tmp_path / "inventory.yaml"
    other = tmp_path / "a'; touch x #.yaml"
    other.touch()
    assert find_inventory(None, {**environ, "GPURUN_INVENTORY": str(other)}) == other
    assert find_inventory(other.name, environ) == other


def test_a_named_one_is_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").touch()
    with pytest.raises(BadInput, match="no inventory at"):
        find_inventory("nope.yaml", {})
    with pytest.raises(BadInput, match="no inventory at"):
        find_inventory(None, {"GPURUN_INVENTORY": "/nope.yaml"})


@pytest.mark.parametrize(
    ("named", "why"), [("~nobody-of-that-name/i.yaml", "no such user"), ("x" * 5000, "File name too long")]
)
def test_a_name_that_cannot_be_looked_up(named: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        load_inventory(find_inventory(named, {}))
