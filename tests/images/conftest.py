"""What tests of images share: hosts without SSH, a layer store, blobs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_agents import Hosts

from gpurun.content.store import LayerStore, Stored


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    folder = tmp_path / "store"
    folder.mkdir()
    return LayerStore(folder)


@pytest.fixture
def blob(store: LayerStore) -> Callable[..., Stored]:
    """Make a blob of random content."""

    def make(size: int, seed: int | None = None) -> Stored:
        content = os.urandom(size) if seed is None else bytes([seed]) * size
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return store.add(digest, lambda: [content])

    return make
