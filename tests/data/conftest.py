"""What tests of data share: hosts without SSH, a folder, a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agents import Hosts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "head-cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "head-config"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A data set with everything that one may hold."""
    made = tmp_path / "data"
    (made / "sub/empty").mkdir(parents=True)
    (made / "big").write_bytes(os.urandom(3_000_000))
    (made / "sub" / "a b'\"\n$(x) ünï").write_text("hostile name")
    (made / os.fsdecode(b"caf\xe9")).write_text("no utf-8")
    (made / "zero").touch()
    (made / "same").write_text("hostile name")
    (made / "link").symlink_to("sub/empty")
    (made / "dangling").symlink_to("nowhere")
    (made / "tool").write_text("#!/bin/sh\n")
    (made / "tool").chmod(0o700)
    (made / ".gitignore").write_text("*.bin\n")
    (made / "kept.bin").write_text("git ignores it, a data set does not")
    return made
