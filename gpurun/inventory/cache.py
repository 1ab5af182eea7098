"""Large inventories, parsed once: the values of the last parse, kept in the user's own cache folder.

A cache is only ever a shortcut. One that is missing, stale, damaged, or that somebody else could have
written is passed over without a word, and the file is parsed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import gpurun
from gpurun.inventory.model import Inventory

MIN_HOSTS = 256  # a smaller inventory is parsed as fast as its cache would be found
_SETTLED_NS = 100_000_000  # a file just written may be written again within one tick of its clock
_MAX_BYTES = 256 * 1024 * 1024
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Key:
    """What a cached inventory was made from: this very file, unchanged, by this very code."""

    path: str
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    version: str
    code_ns: int


@dataclass(frozen=True)
class _Entry:
    key: Key
    inventory: Inventory


def folder(environ: Mapping[str, str]) -> Path | None:
    """Where parsed inventories are kept; None if the environment names no place."""
    base = environ.get("XDG_CACHE_HOME")
    if not base and environ.get("HOME"):
        base = f"{environ['HOME']}/.cache"
    return Path(base) / "gpurun" / "inventory" if base and Path(base).is_absolute() else None


def key(path: Path, status: os.stat_result) -> Key:
    """The key of a file whose status was taken from the descriptor it is read from."""
    here = Path(__file__).parent
    code_ns = max(entry.stat().st_mtime_ns for entry in os.scandir(here) if entry.name.endswith(".py"))
    return Key(
        path=str(path),
        inode=status.st_ino,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        version=gpurun.__version__,
        code_ns=code_ns,
    )


def fetch(cache: Path, wanted: Key) -> Inventory | None:
    """The inventory that was kept for this key, or None."""
    try:
        data = _read_own(_place(cache, wanted))
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        entry = msgspec.msgpack.decode(payload, type=_Entry)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return entry.inventory if entry.key == wanted else None


def keep(cache: Path, made_from: Key, inventory: Inventory) -> None:
    """Keeps an inventory for the next command, if it is worth it and the file is at rest. Never fails."""
    if len(inventory.hosts) < MIN_HOSTS or time.time_ns() - made_from.changed_ns < _SETTLED_NS:
        return
    payload = msgspec.msgpack.encode(_Entry(made_from, inventory))
    place = _place(cache, made_from)
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)


def _place(cache: Path, wanted: Key) -> Path:
    return cache / hashlib.sha256(os.fsencode(wanted.path)).hexdigest()[:32]


def _read_own(path: Path) -> bytes:
    """A file that only this user can have written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(path)
        return file.read(_MAX_BYTES)
