"""Data sets on this host: store, receive, pass on, choose what to remove."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import threading
import time
import zlib
from contextlib import contextmanager
from typing import Any, Dict, Generator, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from gpurun.node.agent import serve
from gpurun.node.agent.frames import Call, OpError, OpReply
from gpurun.node.folder import below
from gpurun.node.folder.below import ContentDigest, Entry, blocks, digest_of, digest_of_file
from gpurun.node.folder.contents import Maker
from gpurun.node.job.parts import held_by, job_folder
from gpurun.node.transfer import blobs
from gpurun.node.transfer.spool import Blob, ChunkHashes, FilesBlob, ManyFiles, checked_digest
from gpurun.node.transfer.tree import make_entries

# The data sets on this host, the jobs that use them, and the choice of sets to remove for a new one.


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


def sets_folder() -> str:
    """Return the folder of all sets."""
    return os.path.join(serve.root(), "data")


def folder_of_set(digest: str) -> str:
    """Return the folder of one set."""
    return os.path.join(sets_folder(), checked_digest(digest)[len("sha256:") :])


def packed(rows: Iterable[Entry]) -> bytes:
    """Return the entries of a set in their format for transfer."""
    return zlib.compress(json.dumps(list(rows), separators=(",", ":")).encode("ascii"))


def unpacked(content: bytes) -> List[Entry]:
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
        return [Entry(str(p), str(k), int(m), int(t), int(s), str(d), str(to)) for p, k, m, t, s, d, to in rows]
    except (zlib.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise OpError("corrupt", "the entries of a data set cannot be read: %s" % error) from None


def files_of(rows: Iterable[Entry]) -> List[Tuple[str, int]]:
    """Return path and size of the files, in order."""
    return [(path, size) for path, kind, _, _, size, _, _ in rows if kind == "file"]


@contextmanager
def alone_with_sets(call: Call) -> Iterator[None]:
    """Hold the lock that keeps others from looking for sets or removing some."""
    os.makedirs(sets_folder(), mode=0o700, exist_ok=True)
    descriptor = os.open(
        os.path.join(sets_folder(), ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
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
        os.utime(os.path.join(folder_of_set(digest), META))
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


def open_arrival(digest: str, rows: Sequence[Entry], entries: bytes, stored: int) -> Tuple[str, int]:
    """Return the folder of a set that should arrive, and the descriptor that holds its lock. The caller is `alone`.

    Args:
        stored: how many of its bytes will take space.
    """
    path = os.path.join(sets_folder(), ARRIVING + secrets.token_hex(8))
    os.mkdir(path, 0o700)
    os.mkdir(os.path.join(path, TREE), 0o700)
    files = files_of(rows)
    size = sum(size for _, size in files)
    meta = {"digest": checked_digest(digest), "bytes": size, "stored": stored, "files": len(files)}
    for name, content in ((META, json.dumps(meta).encode("ascii")), (ENTRIES, entries)):
        with open(os.path.join(path, name), "xb") as stream:
            stream.write(content)
    return path, hold(path, shared=False)


def sets(pins: Optional[Dict[str, List[str]]] = None) -> List[DataSet]:
    """Return the sets that are here, and those that arrive."""
    users = pinned() if pins is None else pins
    found = []
    for name in os.listdir(sets_folder()):
        if name.startswith(DOOMED) or name == ".lock":
            continue
        path = os.path.join(sets_folder(), name)
        try:
            with open(os.path.join(path, META), "rb") as stream:
                meta = json.load(stream)
                used_s = os.fstat(stream.fileno()).st_mtime
            digest, size, files = checked_digest(meta["digest"]), int(meta["bytes"]), int(meta["files"])
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
    jobs, found = os.path.join(serve.root(), "jobs"), {}  # type: Tuple[str, Dict[str, List[str]]]
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
    top = os.open(sets_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free, disk = serve.disk_of(top)
    finally:
        os.close(top)
    spare = free - serve.reserve_of(disk) - unwritten()
    going = choose_evicted(size, sets(), disk // SHARE if quota is None else quota, spare, keep)
    for digest in going:
        remove_set(digest)


def unwritten() -> int:
    """Return how many bytes arriving sets will still take from the disk: their files exist, but are empty at first."""
    total = 0
    for name in _names(sets_folder()):
        if name.startswith(ARRIVING):
            path = os.path.join(sets_folder(), name)
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


def choose_evicted(size: int, here: Iterable[DataSet], quota: int, spare: int, keep: Iterable[str]) -> List[str]:
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


def remove_set(digest: str) -> None:
    """Remove a set, even if it is in use. An interrupted removal leaves nothing that looks like the set."""
    doomed = os.path.join(sets_folder(), DOOMED + secrets.token_hex(8))
    try:
        os.rename(folder_of_set(digest), doomed)
    except FileNotFoundError:
        return
    below.remove_path(doomed)


def sweep() -> int:
    """Remove leftovers of killed agents; return their size in bytes. The caller is `alone`."""
    freed = 0
    for name in _names(sets_folder()):
        path = os.path.join(sets_folder(), name)
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


# Read a data set of this host again, and compare it with the set's digest.


_KINDS = frozenset(("dir", "file", "link"))


def damage(path: str, digest: str) -> Iterator[int]:
    """Read everything in the folder `path` of a set; yield how many bytes of files have been read.

    Raises:
        OpError: ``corrupt``: a file, folder or link, the list of them or the hashes are not the set's.
    """
    rows = _rows(path, digest)
    hashes = _content(os.path.join(path, HASHES))
    chunks = ChunkHashes()
    try:
        top = below.open_top(os.path.join(path, TREE))
    except OSError as error:
        raise OpError("corrupt", "the data set's files cannot be read: %s" % error.strerror) from None
    try:
        with below.Cursor(top) as cursor:
            for row in rows:
                try:
                    yield from _entry(cursor, row, chunks)
                except OSError as error:
                    raise OpError("corrupt", "%.200r: %s" % (row[0], error.strerror)) from None
    finally:
        os.close(top)
    if chunks.hashes() != hashes:
        raise OpError("corrupt", "the data set's chunks do not match their hashes")


def _rows(path: str, digest: str) -> List[Entry]:
    rows = unpacked(_content(os.path.join(path, ENTRIES)))
    if digest_of(rows) != digest or not {row[1] for row in rows} <= _KINDS:
        raise OpError("corrupt", "the list of files does not match the digest of the data set")
    return rows


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise OpError("corrupt", "%s: %s" % (os.path.basename(path), error.strerror)) from None


def _entry(cursor: below.Cursor, entry: Entry, chunks: ChunkHashes) -> Iterator[int]:
    path, kind, _, _, size, digest, target = entry
    parts = below.parts_of(path)
    above = cursor.at(parts[:-1])
    if kind == "dir":
        cursor.at(parts)
    elif kind == "link":
        if os.readlink(parts[-1], dir_fd=above) != target.encode("utf-8", "surrogateescape"):
            raise OpError("corrupt", "the link %.200r has another target" % path)
    else:
        descriptor, whole = below.open_file(above, parts[-1]), ContentDigest(like=digest)
        try:
            is_right = os.fstat(descriptor).st_size == size
            for zeros, piece in blocks(descriptor, size if is_right else 0):
                whole.add(zeros, piece)
                chunks.skip(zeros)
                chunks.add(piece)
                yield chunks.size
        finally:
            os.close(descriptor)
        if not is_right or str(whole) != digest:
            raise OpError("corrupt", "%.200r does not match the digest of the data set" % path)


# Data sets on this host: look up, receive, pass on, list, remove.


_PIECE = 1 << 20
_TELL_S = 1.0


class ArrivingSet:
    """A set that is arriving on this host.

    Args:
        path: its folder, which `data_store.begin` has made.
        descriptor: holds its lock.
    """

    def __init__(self, digest: str, rows: Sequence[Entry], path: str, descriptor: int) -> None:
        self.digest, self.path = digest, path
        self.blob: Optional[Blob] = None
        self._rows = rows
        self._descriptor = descriptor
        self._top = below.open_top(os.path.join(path, TREE))
        self._maker = Maker(self._top)

    def make(self, call: Call) -> None:
        """Create all folders and links, and all files without their contents."""

        def make_file(entry: Entry) -> None:
            parts = below.parts_of(entry.path)
            descriptor = below.create_file(self._maker.cursor.at(parts[:-1]), parts[-1])
            os.ftruncate(descriptor, entry.size)
            os.close(descriptor)

        make_entries(call, self._maker, self._rows, make_file)

    def expect(self, blob: str, hashes: bytes) -> Blob:
        """Return the blob that fills the files."""
        with open(os.path.join(self.path, HASHES), "xb") as stream:
            stream.write(hashes)
        content = ManyFiles(os.dup(self._top), files_of(self._rows), writable=True)
        self.blob = FilesBlob(blob, hashes, content, os.dup(self._descriptor))
        self.blob.take_holes()
        return self.blob

    def finish(self, call: Call, verify: bool) -> None:
        """Set all modes and times, and give the set its name. Keeps a set of that name that is there already.

        Raises:
            OpError: ``corrupt``: a file does not match its entry; ``conflict``: contents are missing.
        """
        if self.blob is None or not self.blob.complete:
            raise OpError("conflict", "the data set has not arrived")
        for path, kind, mode, mtime_ns, _, digest, _ in self._rows:
            if kind == "file":
                call.check()
                parts = below.parts_of(path)
                descriptor = below.open_file(self._maker.cursor.at(parts[:-1]), parts[-1])
                try:
                    if verify and digest_of_file(descriptor, digest) != digest:
                        raise OpError("corrupt", "%.200r does not match the digest of the data set" % path)
                    below.finish(descriptor, mode, mtime_ns)
                finally:
                    os.close(descriptor)
        self._maker.close_folders()
        _sync(self._top)
        with alone_with_sets(call):
            try:
                os.rename(self.path, folder_of_set(self.digest))
                share(self._descriptor)  # until `drop`, which may be long after: others still receive it
            except OSError:
                if not is_here(self.digest):
                    raise

    def drop(self) -> None:
        """Remove an incomplete set. Idempotent."""
        if self._descriptor >= 0:
            self._maker.__exit__()
            os.close(self._top)
            os.close(self._descriptor)
            self._descriptor = -1
            below.remove_path(self.path)


_arriving: Dict[str, ArrivingSet] = {}
_lock = threading.Lock()


def use(call: Call, digests: List[str], job: str = "", attempt: int = 0) -> List[str]:
    """Return which of these sets are here, and mark them as used now.

    Args:
        job: uses the sets from now on until its fence: none of them is removed, nor one that arrives later.

    Raises:
        OpError: ``fenced``: the job's folder is no longer this attempt's.
    """
    if job:
        with held_by(call, job, attempt):
            pins = os.path.join(job_folder(job), "data")
            os.makedirs(pins, mode=0o700, exist_ok=True)
            for digest in digests:
                name = os.path.basename(folder_of_set(digest))
                os.close(os.open(os.path.join(pins, name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with alone_with_sets(call):
        return [digest for digest in digests if is_here(digest)]


def begin_set(
    call: Call, transfer: str, digest: str, quota: Optional[int] = None, keep: Sequence[str] = (),
    stored: Optional[int] = None,
) -> None:  # fmt: skip
    """Free space for a set and begin to receive it; the payload is its entries, packed.

    Args:
        stored: how many of its bytes take space here; None = all.
        quota: how many bytes all sets may take here; None = a quarter of the disk.
        keep: sets that must not be removed for it, besides those that jobs use here.

    Raises:
        OpError: ``no-space``.
    """
    blobs.find_transfer(transfer)
    entries = call.whole(MOST_DESCRIBED_BYTES)
    rows = unpacked(entries)
    with alone_with_sets(call):
        size = sum(size for _, size in files_of(rows)) if stored is None else stored
        make_room(size, quota, keep)
        path, descriptor = open_arrival(digest, rows, entries, size)
    arriving = ArrivingSet(digest, rows, path, descriptor)
    with _lock:
        _arriving[transfer] = arriving
    arriving.make(call)


def expect(call: Call, transfer: str, digest: str, blob: str) -> None:
    """Announce the blob of a set that arrives, or that is here to be passed on; the payload is its chunks' hashes."""
    hashes, here = call.whole(MOST_DESCRIBED_BYTES), blobs.find_transfer(transfer)
    arriving = _arriving.get(transfer)
    here.blobs[blob] = arriving.expect(blob, hashes) if arriving is not None else _served(call, digest, blob, hashes)


def _served(call: Call, digest: str, blob: str, hashes: bytes) -> Blob:
    """Return a set that is here, to be passed on; it stays while the blob is open."""
    path = folder_of_set(digest)
    with alone_with_sets(call):
        descriptor = hold(path)
    try:
        content = ManyFiles(below.open_top(os.path.join(path, TREE)), files_of(_rows_of(path)))
        return FilesBlob(blob, hashes, content, descriptor, complete=True)
    except BaseException:
        os.close(descriptor)
        raise


def _rows_of(path: str) -> List[Entry]:
    with open(os.path.join(path, ENTRIES), "rb") as stream:
        return unpacked(stream.read())


def finish(call: Call, transfer: str, verify: bool = False) -> None:
    """Complete an arrived set, so that jobs can use it.

    Args:
        verify: read all files again, because the source of the chunks' hashes is not trusted.

    Raises:
        OpError: ``corrupt``, ``conflict``.
    """
    with _lock:
        arriving = _arriving.get(transfer)
    if arriving is None:
        raise OpError("not-found", "no data set arrives with the transfer %s" % transfer)
    arriving.finish(call, verify)


def drop(call: Call, transfer: str) -> None:
    """Remove an incomplete set. Idempotent."""
    with _lock:
        arriving = _arriving.pop(transfer, None)
    if arriving is not None:
        arriving.drop()


def manifest(call: Call, digest: str, part: str) -> Generator[OpReply, None, None]:
    """Yield the description of a set that is here: its ``entries``, packed, or the ``hashes`` of its blob's chunks."""
    if part not in (ENTRIES, HASHES):
        raise OpError("bad-request", "a data set has no %.40r" % part)
    with open(os.path.join(folder_of_set(digest), part), "rb") as stream:
        for piece in iter(lambda: stream.read(_PIECE), b""):
            yield OpReply(None, piece)


def verify(call: Call, digest: str) -> Generator[int, None, None]:
    """Read a set that is here, and yield about once a second how many bytes have been read.

    Raises:
        OpError: ``corrupt``: it is not what its digest says; ``not-found``.
    """
    path = folder_of_set(digest)
    with alone_with_sets(call):
        descriptor = hold(path)
    try:
        told_s = time.monotonic()
        for count in damage(path, digest):
            call.check()
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                yield count
    finally:
        os.close(descriptor)


def list_sets(call: Call) -> Dict[str, Any]:
    """Return ``{"sets": [as `DataSet.as_json`…]}``: the sets that are here."""
    with alone_with_sets(call):
        sweep()
        return {"sets": [one.as_json() for one in sets() if os.path.isdir(folder_of_set(one.digest))]}


def evict(call: Call, digests: List[str], job: str = "") -> Dict[str, str]:
    """Remove sets; return those that stay, with the reason: a job uses it, or it is being sent.

    Args:
        job: has not started yet, so that its sets may go.
    """
    kept: Dict[str, str] = {}
    with alone_with_sets(call):
        here = {one.digest: one for one in sets()}
        for digest in digests:
            one = here.get(digest)
            users = [user for user in one.jobs if user != job] if one is not None else []
            if users:
                kept[digest] = "used by %s" % ", ".join(users)
            elif one is not None and one.is_moving:
                kept[digest] = "the host receives or sends the data set now"
            else:
                remove_set(digest)
        sweep()
    return kept


def folders(call: Call, paths: List[str]) -> Dict[str, str]:
    """Return the paths that are not mountable folders, with the reasons.

    An automounter whose file server is off says that a folder does not exist (autofs(5)).
    """
    wrong = {}
    for path in paths:
        below.absolute(path)
        try:
            os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            wrong[path] = str(error.strerror)
            if serve.filesystem(os.path.realpath(path), serve.mounts()) == "autofs":
                wrong[path] = "the automounter does not mount this folder: %s" % error.strerror
    return wrong


def _sync(descriptor: int) -> None:
    """Sync the whole file system: a set that has its name must be complete after a power cut, too."""
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    except (OSError, AttributeError):
        os.sync()


OPS = {
    "use": use,
    "begin": begin_set,
    "expect": expect,
    "finish": finish,
    "drop": drop,
    "manifest": manifest,
    "verify": verify,
    "list": list_sets,
    "evict": evict,
    "folders": folders,
}
