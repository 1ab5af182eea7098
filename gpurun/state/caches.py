"""Caches of the user, drafts that appear whole or not at all, and where data sets are.

A process fills a draft, a folder ``.new-XXXXXXXX``, and then renames it. It holds the lock of ``.new-XXXXXXXX.lock``
from before the draft exists until the draft is gone. So a draft whose lock is free was left by a dead process.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

import gpurun
from gpurun import faults
from gpurun.errors import StateError
from gpurun.msgspec_types import ready
from gpurun.state import locks
from gpurun.state.locks import OWN
from gpurun.state.paths import StatePath

# The user's own cache of results that are slow to compute, kept from one command to the next.


SETTLED_NS = 100_000_000
"""A file that changed this recently can change again without a new time stamp: one tick of its clock is up to 10 ms."""
COARSE_SETTLED_NS = 2_100_000_000
"""The same on a file system that keeps whole seconds."""
MAX_BYTES = 256 * 1024 * 1024
_DIGEST_BYTES = 32
_SECOND_NS = 1_000_000_000


def cache_room(environ: Mapping[str, str], room: str) -> Path | None:
    """Where the caches of one room lie. None if the environment names no place for caches."""
    base = environ.get("XDG_CACHE_HOME")
    if not base and environ.get("HOME"):
        base = f"{environ['HOME']}/.cache"
    return Path(base) / "gpurun" / room if base and Path(base).is_absolute() else None


def cache_file(kept: Path, what: str) -> Path:
    """The file in that folder for `what`, such as a path."""
    return kept / hashlib.sha256(os.fsencode(what)).hexdigest()[:32]


def read_cache(path: Path) -> bytes | None:
    """What `keep` stored there, byte for byte; else None."""
    try:
        data = _read_own(path)
    except OSError:
        return None
    key, (digest, payload) = _key(), (data[:_DIGEST_BYTES], data[_DIGEST_BYTES:])
    return payload if key is not None and hmac.compare_digest(_digest(key, path, payload), digest) else None


def keep_cache(path: Path, payload: bytes) -> None:
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
    """Changes with the version of gpurun and with the modules of these packages: other code can mean other values.

    While an installer replaces gpurun, modules may be gone for a moment.
    """
    changed_ns = [0]
    for package in packages:
        with suppress(FileNotFoundError):
            changed_ns += [each.stat().st_mtime_ns for each in os.scandir(package) if each.name.endswith(".py")]
    return f"{gpurun.__version__} {max(changed_ns)}"


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


# The user's cache of which hosts had which data sets when they were last asked.


MOST_SETS = 1000


class Site(msgspec.Struct):
    """What is known of a set.

    Attributes:
        source: where it came from when it was last pinned.
        hosts: host → when the host said that it has the set, in seconds since the epoch.
    """

    source: str = ""
    hosts: dict[str, float] = {}


Known = dict[str, Site]


def hosts_of(digest: str) -> frozenset[str]:
    """The hosts that had a set when they were last asked."""
    return frozenset(known().get(digest, Site()).hosts)


def holders() -> dict[str, frozenset[str]]:
    """Digest → the hosts that had the set when they were last asked."""
    return {digest: frozenset(site.hosts) for digest, site in known().items()}


def known() -> Known:
    """All that is known."""
    place = _place()
    try:
        return msgspec.json.decode((place and read_cache(place)) or b"{}", type=ready(Known))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def note_sites(digest: str, *, has: Iterable[str] = (), lacks: Iterable[str] = (), source: str = "") -> None:
    """Note what hosts have said of a set, and where it comes from."""
    note_all({digest: (has, lacks)}, source=source)


def note_all(heard: Mapping[str, tuple[Iterable[str], Iterable[str]]], *, source: str = "") -> None:
    """Note, at once, which hosts have said that they have each of these sets, and which that they lack it.

    Never fails: everything works without the cache. If it is full, it forgets new sets of many before those it knew.
    """
    place = _place()
    if place is None or not heard:
        return
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locks.alone(place.with_suffix(".lock")):
            found = known()
            now_s = time.time()
            new: Known = {}
            for digest, (has, lacks) in heard.items():
                site = found.pop(digest, None)
                among = new if site is None else found
                site = site or Site()
                site.hosts |= dict.fromkeys(has, now_s)
                for host in lacks:
                    site.hosts.pop(host, None)
                site.source = source or site.source
                among[digest] = site
            kept = [*new.items(), *found.items()] if len(new) > 1 else [*found.items(), *new.items()]
            keep_cache(place, msgspec.json.encode(dict(kept[-MOST_SETS:])))


def _place() -> Path | None:
    kept = cache_room(os.environ, "data")
    return None if kept is None else cache_file(kept, "sites")


PREFIX, LOCK = ".new-", ".lock"


@contextmanager
def new_folder(parent: StatePath) -> Iterator[StatePath]:
    """Give an empty folder in `parent`, to fill and to rename; remove it if it is still there afterwards.

    First removes drafts that this user's dead processes left there.

    Raises:
        StateError: it cannot be made, for example because the disk is full.
    """
    _remove_abandoned(parent)
    path, descriptor = _locked_name(parent)
    draft = path.sibling(path.name.removesuffix(LOCK))
    try:
        faults.point()
        draft.mkdir(0o755)
        yield draft
    finally:
        with suppress(StateError):  # the next process that makes a draft removes what stays
            _remove(draft, path)
        os.close(descriptor)


def _locked_name(parent: StatePath) -> tuple[StatePath, int]:
    """Make a lock file of a new name; return it, and the descriptor that holds its lock."""
    while True:
        path = parent / f"{PREFIX}{secrets.token_hex(4)}{LOCK}"
        descriptor = path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN)
        try:
            if locks.try_take(descriptor) and _is_still(path, descriptor):
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process took this file for an abandoned one, before its lock was held


def _is_still(path: StatePath, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_abandoned(parent: StatePath) -> None:
    for name in {name.removesuffix(LOCK) for name in parent.names() if name.startswith(PREFIX)}:
        with suppress(OSError, StateError):  # not what gpurun made, or gone meanwhile
            _remove_if_abandoned(parent / name, parent / f"{name}{LOCK}")


def _remove_if_abandoned(draft: StatePath, path: StatePath) -> None:
    if not _is_mine(draft) or not _is_mine(path):
        return
    try:
        descriptor = path.open_file(os.O_WRONLY)
    except FileNotFoundError:
        _remove(draft, path)
        return
    try:
        if locks.try_take(descriptor):
            _remove(draft, path)
    finally:
        os.close(descriptor)


def _is_mine(path: StatePath) -> bool:
    """Return whether the name is free or this user's own."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return True


def _remove(draft: StatePath, path: StatePath) -> None:
    with suppress(FileNotFoundError):
        draft.rmtree()
    path.unlink(missing_ok=True)
