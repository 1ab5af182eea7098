"""What tests of environments share: wheels that are made here, and an engine without Docker."""

from __future__ import annotations

from pathlib import Path

import pytest
from wheels import make_wheel

from gpurun.jobs.recipe_values import environment_of


@pytest.fixture
def write(tmp_path):
    """Write files below the test's folder; the first one's path."""

    def make(files: dict[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / next(iter(files))

    return make


@pytest.fixture
def wheel(tmp_path):
    """Make a wheel of one module in a folder."""

    def make(name: str, version: str = "1.0", requires: tuple[str, ...] = (), folder: str = "wheels") -> Path:
        return make_wheel(tmp_path / folder, name, version, requires)

    return make


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/gpurun/environments"


@pytest.fixture
def wanted(write, wheel, cache):
    wheel("tinyone")
    path = write({"requirements.txt": "tinyone==1.0\n"})
    return environment_of({"requirements": path.name, "index": "wheels"}, path.parent)
