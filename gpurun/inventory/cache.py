"""A cache of large inventories: the values of the last parse, in the user's own cache folder.

gpurun parses the file if there is no cache entry, or if the entry is from another file, other code or older content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.inventory.model import Inventory
from gpurun.msgspec_types import ready
from gpurun.state import own_cache

PACKAGES = (Path(__file__).parent, Path(__file__).parents[1] / "documents")
CODE = own_cache.code_stamp(*PACKAGES)
"""Of the code that this process runs, which pip may have replaced since."""
MIN_HOSTS = 256  # gpurun parses a smaller inventory as fast as it reads a cache entry


@dataclass(frozen=True)
class Key:
    """The origin of a cached inventory: the file in this exact state, and the code that parsed it."""

    path: str
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    code: str


@dataclass(frozen=True)
class _Cached:
    key: Key
    inventory: Inventory


def folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of parsed inventories; None if the environment names none."""
    return own_cache.folder(environ, "inventory")


def key(path: Path, status: os.stat_result) -> Key:
    """Return the key of a file. `status` must come from the descriptor from which the caller reads the file."""
    return Key(
        path=str(path),
        inode=status.st_ino,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        code=CODE,
    )


def fetch(cache: Path, wanted: Key) -> Inventory | None:
    """Return the cached inventory for this key, or None."""
    payload = own_cache.read(own_cache.place(cache, wanted.path))
    try:
        entry = msgspec.msgpack.decode(payload or b"", type=ready(_Cached))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return entry.inventory if entry.key == wanted else None


def keep(cache: Path, made_from: Key, inventory: Inventory) -> None:
    """Store an inventory for the next command, if it is large and its file has not just changed. Never fails."""
    if len(inventory.hosts) >= MIN_HOSTS and own_cache.is_settled(made_from.changed_ns):
        own_cache.keep(own_cache.place(cache, made_from.path), msgspec.msgpack.encode(_Cached(made_from, inventory)))
