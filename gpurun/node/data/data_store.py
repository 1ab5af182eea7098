"""The data sets on this host, the jobs that use them, and the choice of sets to remove for a new one.

``data/HEX`` in gpurun's folder is the set with the digest ``sha256:HEX``. ``tree`` is the content for jobs, ``entries``
lists it (`packed`), and ``hashes`` has the SHA-256 of each chunk of its blob. ``set.json`` has the set's size, and how
much of it takes space; its time is the last use. An arriving set is named ``.arriving-*``, one being removed
``.doomed-*``. A process that receives or sends a set holds the lock of its ``set.json``.

A job that uses a set has an empty file ``data/HEX`` in its own folder, which the job's fence removes.
"""

import fcntl
import hashlib
import json
import os
import secrets
import zlib
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from gpurun.node.agent import disk_reserve, place
from gpurun.node.agent.call import Call, OpError
from gpurun.node.folder import below
from gpurun.node.transfer.spool import checked

ARRIVING, DOOMED = ".arriving-", ".doomed-"
TREE, ENTRIES, HASHES, META = "tree", "entries", "hashes", "set.json"
SHARE = 4
"""Without a quota, all sets together may take this part of the disk: a quarter."""
_POLL_S = 0.05
MOST_DESCRIBED_BYTES = 1 << 30
"""The longest description of a set: its entries, or the hashes of the chunks of 8 TiB."""
MOST_ENTRIES = 2_000_000
"""No set has more files, folders and links: each takes up to 1 KiB of memory."""
_MARKS_PER_ENTRY = 16
"""An entry has 8 commas and brackets without those in its names. So a small description cannot fill the memory."""

Row = Tuple[str, str, int, int, int, str, str]
"""``(path, kind, mode, mtime_ns, size, digest, target)`` of a file, folder or link of a set."""


class DataSet(NamedTuple):
    """A set that is here.

    Attributes:
        used_s: when a job or person last used it, in seconds since the epoch.
        jobs: the jobs that use it here.
        is_moving: it is being received or sent.
        stored: how many of its bytes take space, all but zeros; -1 = all.
    """

    digest: str
    size: int
    files: int
    used_s: float
    jobs: Tuple[str, ...]
    is_moving: bool
    stored: int = -1

    @property
    def taken(self) -> int:
        """Return how many bytes it takes."""
        return self.size if self.stored < 0 else self.stored

    def as_json(self) -> Dict[str, Any]:
        """Return the set's description for the head."""
        return {"digest": self.digest, "bytes": self.size, "files": self.files, "used_s": self.used_s,
                "jobs": list(self.jobs)}  # fmt: skip


def folder() -> str:
    """Return the folder of all sets."""
    return os.path.join(place.root(), "data")


def place_of(digest: str) -> str:
    """Return the folder of one set."""
    return os.path.join(folder(), checked(digest)[len("sha256:") :])


def packed(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the entries of a set in their format for transfer."""
    return zlib.compress(json.dumps(list(rows), separators=(",", ":")).encode("ascii"))


def unpacked(content: bytes) -> List[Row]:
    """Return the entries of a set.

    Raises:
        OpError: ``corrupt``: they are not entries.
    """
    try:
        unpacker = zlib.decompressobj()
        said = unpacker.decompress(content, MOST_DESCRIBED_BYTES)
        if sum(map(said.count, (b",", b"[", b"{"))) > MOST_ENTRIES * _MARKS_PER_ENTRY:
            raise ValueError("more than %d entries" % MOST_ENTRIES)
        rows = json.loads(said)
        return [(str(p), str(k), int(m), int(t), int(s), str(d), str(to)) for p, k, m, t, s, d, to in rows]
    except (zlib.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise OpError("corrupt", "the entries of a data set cannot be read: %s" % error) from None


def digest_of(rows: Iterable[Sequence[Any]]) -> str:
    """Return the digest of a folder's content without times. Folders with the same digest have the same content."""
    told = [[path, kind, mode, digest, target] for path, kind, mode, _, _, digest, target in rows]
    return "sha256:" + hashlib.sha256(json.dumps(sorted(told)).encode("ascii")).hexdigest()


def files_of(rows: Iterable[Row]) -> List[Tuple[str, int]]:
    """Return path and size of the files, in order."""
    return [(path, size) for path, kind, _, _, size, _, _ in rows if kind == "file"]


@contextmanager
def alone(call: Call) -> Iterator[None]:
    """Hold the lock that keeps others from looking for sets or removing some."""
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    descriptor = os.open(os.path.join(folder(), ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            call.wait(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_here(digest: str) -> bool:
    """Return whether a set is here, and mark it as used now."""
    try:
        os.utime(os.path.join(place_of(digest), META))
    except FileNotFoundError:
        return False
    return True


def hold(path: str, shared: bool = True) -> int:
    """Return a descriptor that keeps the set in the folder `path` from being removed until it is closed.

    Raises:
        OpError: ``not-found``: it is gone; ``conflict``: another process has locked it.
    """
    try:
        descriptor = os.open(os.path.join(path, META), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OpError("not-found", "the data set is not on this host") from None
    if not _try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        os.close(descriptor)
        raise OpError("conflict", "another process has locked the data set")
    return descriptor


def share(descriptor: int) -> None:
    """Let others `hold` a set that has arrived, too. The caller is `alone`, so nobody locks the set in between."""
    _try_lock(descriptor, fcntl.LOCK_SH)


def begin(digest: str, rows: Sequence[Row], entries: bytes, stored: int) -> Tuple[str, int]:
    """Return the folder of a set that should arrive, and the descriptor that holds its lock. The caller is `alone`.

    Args:
        stored: how many of its bytes will take space.
    """
    path = os.path.join(folder(), ARRIVING + secrets.token_hex(8))
    os.mkdir(path, 0o700)
    os.mkdir(os.path.join(path, TREE), 0o700)
    files = files_of(rows)
    size = sum(size for _, size in files)
    meta = {"digest": checked(digest), "bytes": size, "stored": stored, "files": len(files)}
    for name, content in ((META, json.dumps(meta).encode("ascii")), (ENTRIES, entries)):
        with open(os.path.join(path, name), "xb") as stream:
            stream.write(content)
    return path, hold(path, shared=False)


def sets(pins: Optional[Dict[str, List[str]]] = None) -> List[DataSet]:
    """Return the sets that are here, and those that arrive."""
    users = pinned() if pins is None else pins
    found = []
    for name in os.listdir(folder()):
        if name.startswith(DOOMED) or name == ".lock":
            continue
        path = os.path.join(folder(), name)
        try:
            with open(os.path.join(path, META), "rb") as stream:
                meta = json.load(stream)
                used_s = os.fstat(stream.fileno()).st_mtime
            digest, size, files = checked(meta["digest"]), int(meta["bytes"]), int(meta["files"])
            stored = int(meta.get("stored", size))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OpError):
            continue
        moving = name.startswith(ARRIVING) or is_held(path)
        found.append(DataSet(digest, size, files, used_s, tuple(users.get(digest, ())), moving, stored))
    return found


def is_held(path: str) -> bool:
    """Return whether a process receives or sends the set in the folder `path`."""
    try:
        descriptor = os.open(os.path.join(path, META), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def pinned() -> Dict[str, List[str]]:
    """Return digest → the jobs that use the set here."""
    jobs, found = os.path.join(place.root(), "jobs"), {}  # type: Tuple[str, Dict[str, List[str]]]
    for job in _names(jobs):
        for name in _names(os.path.join(jobs, job, "data")):
            found.setdefault("sha256:" + name, []).append(job)
    return found


def _names(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def make_room(size: int, quota: Optional[int], keep: Iterable[str]) -> None:
    """Remove least recently used sets until another one fits. The caller is `alone`.

    Args:
        size: how much the set that should arrive takes.
        quota: how much all sets may take; None = a quarter of the disk.
        keep: sets that jobs elsewhere will use.

    Raises:
        OpError: ``no-space``; nothing was removed.
    """
    sweep()
    top = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free, disk = disk_reserve.disk_of(top)
    finally:
        os.close(top)
    spare = free - disk_reserve.reserve_of(disk) - unwritten()
    going = choose(size, sets(), disk // SHARE if quota is None else quota, spare, keep)
    for digest in going:
        remove(digest)


def unwritten() -> int:
    """Return how many bytes arriving sets will still take from the disk: their files exist, but are empty at first."""
    total = 0
    for name in _names(folder()):
        if name.startswith(ARRIVING):
            path = os.path.join(folder(), name)
            total += max(0, _taken(path) - _allocated(os.path.join(path, TREE)))
    return total


def _allocated(top: str) -> int:
    found = 0
    try:
        for _, _, names, descriptor in os.fwalk(top):
            for name in names:
                found += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:  # its transfer has just dropped it
        pass
    return found


def choose(size: int, here: Iterable[DataSet], quota: int, spare: int, keep: Iterable[str]) -> List[str]:
    """Return the sets to remove so that another one fits: unused ones, least recently used first.

    Args:
        spare: free bytes without the reserve; negative if less than the reserve is free.

    Raises:
        OpError: ``no-space``: it would not fit however many sets were removed.
    """
    all_sets, kept, going = sorted(here, key=lambda each: each.used_s), frozenset(keep), []
    left = min(quota - sum(each.taken for each in all_sets), spare)
    for each in all_sets:
        if left >= size:
            break
        if not each.jobs and not each.is_moving and each.digest not in kept:
            going.append(each.digest)
            left += each.taken
    if left < size:
        used = sum(each.taken for each in all_sets if each.digest not in going)
        raise OpError(
            "no-space",
            "the host has no room for a data set of %d MiB: the disk has room for %d MiB, data sets in "
            "use take %d MiB, "
            "and the limit for all data sets is %d MiB" % (size >> 20, max(0, spare) >> 20, used >> 20, quota >> 20),
        )
    return going


def remove(digest: str) -> None:
    """Remove a set, even if it is in use. An interrupted removal leaves nothing that looks like the set."""
    doomed = os.path.join(folder(), DOOMED + secrets.token_hex(8))
    try:
        os.rename(place_of(digest), doomed)
    except FileNotFoundError:
        return
    below.remove_path(doomed)


def sweep() -> int:
    """Remove leftovers of killed agents; return their size in bytes. The caller is `alone`."""
    freed = 0
    for name in _names(folder()):
        path = os.path.join(folder(), name)
        if name.startswith(DOOMED) or (name.startswith(ARRIVING) and not is_held(path)):
            freed += _taken(path)
            below.remove_path(path)
    return freed


def _taken(path: str) -> int:
    try:
        with open(os.path.join(path, META), "rb") as stream:
            meta = json.load(stream)
            return int(meta.get("stored", meta["bytes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
