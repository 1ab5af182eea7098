"""The user's own cache of results that are slow to compute, kept from one command to the next.

A cache only saves time. `read` ignores a file that is missing or damaged, that another user could have written, or that
gpurun did not write to exactly this path. `keep` never fails, because everything works without a cache.

People mount `~/.cache` into containers, so a hostile program of the same user may write there. So each file has a keyed
digest. The key is outside the cache folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import gpurun

SETTLED_NS = 100_000_000
"""A file that changed this recently can change again without a new time stamp: one tick of its clock is up to 10 ms."""
COARSE_SETTLED_NS = 2_100_000_000
"""The same on a file system that keeps whole seconds."""
MAX_BYTES = 256 * 1024 * 1024
_DIGEST_BYTES = 32
_SECOND_NS = 1_000_000_000


def folder(environ: Mapping[str, str], room: str) -> Path | None:
    """Where the caches of one room lie. None if the environment names no place for caches."""
    base = environ.get("XDG_CACHE_HOME")
    if not base and environ.get("HOME"):
        base = f"{environ['HOME']}/.cache"
    return Path(base) / "gpurun" / room if base and Path(base).is_absolute() else None


def place(kept: Path, what: str) -> Path:
    """The file in that folder for `what`, such as a path."""
    return kept / hashlib.sha256(os.fsencode(what)).hexdigest()[:32]


def read(path: Path) -> bytes | None:
    """What `keep` stored there, byte for byte; else None."""
    try:
        data = _read_own(path)
    except OSError:
        return None
    key, (digest, payload) = _key(), (data[:_DIGEST_BYTES], data[_DIGEST_BYTES:])
    return payload if key is not None and hmac.compare_digest(_digest(key, path, payload), digest) else None


def keep(path: Path, payload: bytes) -> None:
    """Replace the cache file, whole. Not synced: a power cut leaves a file that `read` ignores."""
    with suppress(OSError):
        key = _key() or _new_key()
        if key is not None:
            _replace(path, _digest(key, path, payload), payload)


def is_settled(changed_ns: int, now_ns: int | None = None) -> bool:
    """Return whether a later change of a file gets another time stamp than `changed_ns`, its last one.

    Args:
        now_ns: a time before the file was read; None = now. A clock that was set back makes this False.
    """
    needed_ns = SETTLED_NS if changed_ns % _SECOND_NS else COARSE_SETTLED_NS
    return (time.time_ns() if now_ns is None else now_ns) - changed_ns >= needed_ns


def code_stamp(*packages: Path) -> str:
    """Changes with the version of gpurun and with the modules of these packages: other code can mean other values."""
    modules = (entry for package in packages for entry in os.scandir(package) if entry.name.endswith(".py"))
    changed_ns = max(entry.stat().st_mtime_ns for entry in modules)
    return f"{gpurun.__version__} {changed_ns}"


def _digest(key: bytes, path: Path, payload: bytes) -> bytes:
    """Also of the file's name: one cache file in the place of another counts as damaged."""
    made = hmac.new(key, os.fsencode(path.name) + b"\0", hashlib.sha256)
    made.update(payload)
    return made.digest()


def _key_file() -> Path | None:
    base = os.environ.get("XDG_CONFIG_HOME")
    if not base and os.environ.get("HOME"):
        base = f"{os.environ['HOME']}/.config"
    return Path(base) / "gpurun" / "cache.key" if base and Path(base).is_absolute() else None


def _key() -> bytes | None:
    file = _key_file()
    try:
        key = _read_own(file) if file is not None else b""
    except OSError:
        return None
    return key if len(key) == _DIGEST_BYTES else None


def _new_key() -> bytes | None:
    """Another key. When two processes make one at once, the second one's stays; files of the first are then ignored."""
    file = _key_file()
    if file is None:
        return None
    _replace(file, secrets.token_bytes(_DIGEST_BYTES))
    return _key()


def _replace(path: Path, *parts: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_own(path: Path) -> bytes:
    """A file that only this user can have written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(path)
        return file.read(MAX_BYTES)
