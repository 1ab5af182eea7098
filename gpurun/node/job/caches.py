"""A user's caches of models and kernels on this host: one folder for all jobs of the user, with a limit.

Programs in containers write all of it. So this module follows no link, and what this account cannot remove stays, and
is said. Entries go, the least recently used first, while no job uses the folder: before a job's container is made, and
when the user prunes. A job uses it from then on until its fence removes the job's folder, which says so.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from gpurun.node.agent import serve
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.agent.serve import disk_of, reserve_of
from gpurun.node.folder import below
from gpurun.node.folder.below import walk
from gpurun.node.job.parts import job_folder
from gpurun.node.job.rules import OWNER, depth_of

USE_FILE = "caches"
"""In a job's folder: whose caches the job uses."""
_POLL_S = 0.05
_MOST_STUCK = 3
_JOIN_S = 20.0
_LONGEST_OWNER = 64
_LEAST_BYTES = 4096
"""What an entry of a folder counts at least, so that empty ones without end have an end."""


class _LateError(Exception):
    """A job has waited long enough."""


class CachedEntry(NamedTuple):
    """What goes as a whole, such as a model."""

    used_s: float
    parts: below.Parts
    bytes: int


class _Aside(NamedTuple):
    """What was taken out of a cache, not removed yet.

    Attributes:
        found: the bytes of all entries before.
        left: the bytes of those that stay.
        names: name in the folder of what goes → where it was.
    """

    found: int
    left: int
    names: Mapping[bytes, below.Parts]


def caches_folder(owner: str) -> str:
    """Return the folder that a user's jobs see. Raises OpError: ``bad-request``: it is nobody's."""
    return os.path.join(_top(owner), "files")


def folder_of_job(job: str) -> str:
    """Return the folder that a job uses; "" if it uses none."""
    owner = _owner_of(job_folder(job))
    return caches_folder(owner) if OWNER.match(owner) else ""


def is_newest_user(job: str) -> bool:
    """Return whether a job uses caches, and no other job on this host has begun later to use the same."""
    owner, began = _owner_of(job_folder(job)), []
    for each in _users(owner) if owner else ():
        with suppress(FileNotFoundError):  # fenced meanwhile
            began.append((os.stat(os.path.join(job_folder(each), USE_FILE)).st_mtime_ns, each))
    return bool(began) and max(began)[1] == job


def join(call: Call, job: str, owner: str, most_bytes: int) -> None:
    """Make the folder for a job that begins here, and note that the job uses it. The caller holds the job's lock.

    Unless a job uses it already, entries go until the limit holds and the disk's reserve is free. The job waits for
    that, but not for long: what still is beyond the limit goes when the next job begins.
    """
    for each in (os.path.dirname(_top(owner)), _top(owner), caches_folder(owner), _gone(owner)):
        os.makedirs(each, mode=0o700, exist_ok=True)
    if _owner_of(job_folder(job)) == owner:
        return
    ends_s = time.monotonic() + _JOIN_S
    try:
        with _alone(call, owner, ends_s):
            with suppress(_LateError, OSError):  # a disk that cannot be read: the job needs nothing of what is there
                if not _users(owner):
                    _set_aside(call, owner, most_bytes, ends_s=ends_s)
            _note_use(job, owner)
    except _LateError:
        _note_use(job, owner)  # who removes entries looks for it before each
    remover = threading.Thread(target=_emptied, args=(_gone(owner),), name="caches", daemon=True)
    remover.start()
    while remover.is_alive() and time.monotonic() < ends_s:
        call.wait(_POLL_S)


def list_caches(call: Call, owner: str) -> Dict[str, Any]:
    """Return ``{"bytes", "entries", "jobs"}``: what a user's caches take here, and the jobs that use them."""
    entries = _entries(call, caches_folder(owner), 0)
    return {
        "bytes": sum(each.bytes for each in entries) + _left_over(call, owner),
        "entries": len(entries),
        "jobs": _users(owner),
    }


def trim(call: Call, owner: str, most_bytes: int) -> Dict[str, Any]:
    """Remove entries until at most so many bytes are left, unless a job uses them.

    Returns:
        ``{"freed_bytes", "bytes", "jobs", "stuck"}``: `jobs` use the caches, so more than the limit stays; `stuck`:
        some entries that this account cannot remove, and why.
    """
    if not os.path.isdir(caches_folder(owner)):
        return {"freed_bytes": 0, "bytes": 0, "jobs": [], "stuck": []}
    _emptied(_gone(owner))  # an agent was killed here
    stays = _left_over(call, owner)
    with _alone(call, owner):
        aside = _set_aside(call, owner, most_bytes, stays)
    stuck = _emptied(_gone(owner), aside.names)
    left = aside.left + _left_over(call, owner)
    return {
        "freed_bytes": max(0, aside.found + stays - left),
        "bytes": left,
        "jobs": _users(owner) if left > most_bytes else [],
        "stuck": stuck[:_MOST_STUCK],
    }


def _set_aside(call: Call, owner: str, most_bytes: int, stays: int = 0, ends_s: Optional[float] = None) -> _Aside:
    """Take entries out of the folder that jobs see, until at most so many bytes are left, unless a job uses it.

    Args:
        stays: the bytes of what could not be removed.
        ends_s: a job waits until then, and needs the disk's reserve.
    """
    top, trash = (
        below.open_top(caches_folder(owner), need=below.CHANGE),
        below.open_top(_gone(owner), need=below.CHANGE),
    )
    try:
        users = _users(owner)
        entries = _entries(call, caches_folder(owner), 0 if users else below.CHANGE, ends_s)
        found = left = sum(each.bytes for each in entries)
        if ends_s is not None:
            free, disk = disk_of(top)
            most_bytes = min(most_bytes, max(0, left - max(0, reserve_of(disk) - free)))
        names: Dict[bytes, below.Parts] = {}
        for entry in sorted(entries):
            if left + stays <= most_bytes or _users(owner):
                break
            _check(call, ends_s)
            with suppress(OSError):
                names[_moved(top, entry.parts, trash)] = entry.parts
                left -= entry.bytes
    finally:
        os.close(top)
        os.close(trash)
    return _Aside(found, left, names)


def _moved(top: int, parts: below.Parts, trash: int) -> bytes:
    """Move an entry out of the cache; return its name there. A killed agent leaves no half of a model in its place."""
    name = os.urandom(8).hex().encode()
    with below.Cursor(top, below.CHANGE) as cursor:
        above = cursor.at(parts[:-1])
        try:
            os.rename(parts[-1], name, src_dir_fd=above, dst_dir_fd=trash)
        except PermissionError:  # a folder that moves must be writable itself
            os.close(below.open_folder(above, parts[-1], below.CHANGE))
            os.rename(parts[-1], name, src_dir_fd=above, dst_dir_fd=trash)
        with suppress(OSError):  # not empty
            for depth in range(len(parts) - 1, 0, -1):
                os.rmdir(parts[depth - 1], dir_fd=cursor.at(parts[: depth - 1]))
    return name


def _emptied(gone: str, names: Mapping[bytes, below.Parts] = {}) -> List[str]:
    """Remove what was taken out of a cache; return what cannot be removed, and why.

    Args:
        names: name there → where it was.
    """
    stuck = []
    trash = below.open_top(gone, need=below.CHANGE)
    try:
        for name in below.names_in(trash):
            try:
                below.remove_entry(trash, name)
            except FileNotFoundError:
                pass  # another thread or agent has removed it
            except OSError as error:
                was = names.get(name)
                shown = os.path.join(gone, os.fsdecode(name)) if was is None else _shown(was)
                stuck.append("%.200s: %s" % (shown, error.strerror))
    finally:
        os.close(trash)
    return stuck


def _check(call: Call, ends_s: Optional[float]) -> None:
    call.check()
    if ends_s is not None and time.monotonic() >= ends_s:
        raise _LateError


def _left_over(call: Call, owner: str) -> int:
    """Return the bytes of what could not be removed, or is being removed."""
    return sum(each.bytes for each in _entries(call, _gone(owner), 0))


def _entries(call: Call, path: str, need: int, ends_s: Optional[float] = None) -> List[CachedEntry]:
    """Return what lies in a cache. A file with several names counts once, and an empty folder is an entry, too.

    Args:
        need: as for `walk`: no mode changes while jobs may be there, but that of the folder itself.
    """
    sizes: Dict[below.Parts, int] = {}
    used: Dict[below.Parts, float] = {}
    linked: Set[Tuple[int, int]] = set()
    now_s = time.time()
    try:
        top = below.open_top(path, need=below.CHANGE)
    except FileNotFoundError:
        return []
    try:
        for found in walk(top, need):
            _check(call, ends_s)
            depth, status = depth_of(found.parts), found.status
            is_folder = status is None or stat.S_ISDIR(status.st_mode)
            for above in range(1, min(depth, len(found.parts))):
                sizes.pop(found.parts[:above], None)  # it holds entries, and is none
            key = found.parts[:depth]
            sizes.setdefault(key, 0)
            used.setdefault(key, 0.0)
            if status is None:
                continue
            if not is_folder:
                used[key] = max(used[key], min(now_s, max(status.st_atime, status.st_mtime)))
                if status.st_nlink > 1:
                    if (status.st_dev, status.st_ino) in linked:
                        continue
                    linked.add((status.st_dev, status.st_ino))
            sizes[key] += max(_LEAST_BYTES, status.st_blocks * 512)
    finally:
        os.close(top)
    return [CachedEntry(used[key], key, size) for key, size in sizes.items()]


def _users(owner: str) -> List[str]:
    """Return the jobs that use a user's caches here."""
    jobs = os.path.join(serve.root(), "jobs")
    try:
        names = sorted(os.listdir(jobs))
    except FileNotFoundError:
        return []
    return [name for name in names if _owner_of(os.path.join(jobs, name)) == owner]


def _note_use(job: str, owner: str) -> None:
    with open(os.path.join(job_folder(job), USE_FILE), "w", encoding="ascii") as file:
        file.write(owner)


def _owner_of(job_folder: str) -> str:
    try:
        with open(os.path.join(job_folder, USE_FILE), encoding="ascii") as file:
            return file.read(_LONGEST_OWNER)
    except (OSError, ValueError):
        return ""


def _shown(parts: below.Parts) -> str:
    return "%r" % below.text_of_path(parts)


def _gone(owner: str) -> str:
    return os.path.join(_top(owner), "gone")


def _top(owner: str) -> str:
    if not OWNER.match(owner):
        raise OpError("bad-request", "%r does not name an owner of caches" % owner)
    return os.path.join(serve.root(), "caches", owner)


@contextmanager
def _alone(call: Call, owner: str, ends_s: Optional[float] = None) -> Iterator[None]:
    """Hold the lock of a user's caches: nothing goes while a job begins to use them.

    Raises:
        _LateError: nobody waits any longer than until `ends_s`.
    """
    path = os.path.join(_top(owner), "lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _check(call, ends_s)
                call.wait(_POLL_S)
        yield
    finally:
        os.close(descriptor)


OPS = {"list": list_caches, "trim": trim}
