"""The data sets and the code of jobs on this host: what is here, who uses it, what goes, what is damaged."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
import zlib
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from gpurun.node.agent import serve
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.folder import below
from gpurun.node.folder.below import ContentDigest, Entry, blocks, digest_of, timed_digest_of
from gpurun.node.transfer import blobs, spool
from gpurun.node.transfer.spool import ChunkHashes, checked_digest

# The sets on this host, the jobs that use them, and the choice of sets to remove for a new one.


DATA, CODE = "data", "code"
"""The two stores. A set of the second is the code of jobs: its digest names times, too, and nobody asks for it."""
WORKSPACE = "workspace"
"""In a job's folder: the link to its code. It is `gpurun.node.job.rules.CODE`, which this room must not import."""
BESIDE = ".beside"
"""How the name of the folder ends that keeps what was written beside code (`gpurun.node.job.parts.kept_layer`)."""
CODE_SHARE = 0.05
"""Code that no job uses takes at most this share of the disk."""
CODE_UNUSED_S = 24 * 3600.0
"""Code that no job uses goes after this long."""
ARRIVING, DOOMED, DAMAGED = ".arriving-", ".doomed-", ".damaged-"
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


def sets_folder(store: str = DATA) -> str:
    """Return the folder of all sets of a store.

    Raises:
        OpError: ``bad-request``: there is no such store.
    """
    if store not in (DATA, CODE):
        raise OpError("bad-request", "%.40r is not a store of sets" % (store,))
    return os.path.join(serve.root(), store)


def folder_of_set(digest: str, store: str = DATA) -> str:
    """Return the folder of one set."""
    return os.path.join(sets_folder(store), checked_digest(digest)[len("sha256:") :])


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
def alone_with_sets(call: Call, store: str = DATA) -> Iterator[None]:
    """Hold the lock that keeps others from looking for sets or removing some."""
    os.makedirs(sets_folder(store), mode=0o700, exist_ok=True)
    descriptor = os.open(
        os.path.join(sets_folder(store), ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            call.wait(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Return False if another process holds the lock. On a file system without locks, nobody does."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in below.NO_LOCKS:
            raise
    return True


def is_here(digest: str, store: str = DATA) -> bool:
    """Return whether a set is here, and mark it as used now."""
    try:
        os.utime(os.path.join(folder_of_set(digest, store), META))
    except FileNotFoundError:
        return False
    return True


def _open_lock(path: str) -> int:
    """Open the file of a set that processes lock: for writing, as NFS demands for a lock against all others."""
    return os.open(os.path.join(path, META), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def hold(path: str, shared: bool = True) -> int:
    """Return a descriptor that keeps the set in the folder `path` from being removed until it is closed.

    Raises:
        OpError: ``not-found``: it is gone; ``conflict``: another process has locked it.
    """
    try:
        descriptor = _open_lock(path)
    except FileNotFoundError:
        raise OpError("not-found", "the data set is not on this host") from None
    if not _try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        os.close(descriptor)
        raise OpError("conflict", "another process has locked the data set")
    return descriptor


def share(descriptor: int) -> None:
    """Let others `hold` a set that has arrived, too. The caller is `alone`, so nobody locks the set in between."""
    _try_lock(descriptor, fcntl.LOCK_SH)


def open_arrival(digest: str, rows: Sequence[Entry], entries: bytes, stored: int, store: str = DATA) -> Tuple[str, int]:
    """Return the folder of a set that should arrive, and the descriptor that holds its lock. The caller is `alone`.

    Args:
        stored: how many of its bytes will take space.
    """
    path = os.path.join(sets_folder(store), ARRIVING + secrets.token_hex(8))
    os.mkdir(path, 0o700)
    os.mkdir(os.path.join(path, TREE), 0o700)
    files = files_of(rows)
    size = sum(size for _, size in files)
    meta = {"digest": checked_digest(digest), "bytes": size, "stored": stored, "files": len(files)}
    for name, content in ((META, json.dumps(meta).encode("ascii")), (ENTRIES, entries)):
        with open(os.path.join(path, name), "xb") as stream:
            stream.write(content)
    return path, hold(path, shared=False)


def sets(pins: Optional[Dict[str, List[str]]] = None, store: str = DATA) -> List[DataSet]:
    """Return the sets that are here, and those that arrive."""
    users = pinned(store) if pins is None else pins
    found = []
    for name in os.listdir(sets_folder(store)):
        if name.startswith((DOOMED, DAMAGED)) or name == ".lock":
            continue
        path = os.path.join(sets_folder(store), name)
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
    """Return whether a process receives or sends the set in the folder `path`; without locks, whether one may do so."""
    try:
        descriptor = _open_lock(path)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in below.NO_LOCKS:
            raise
        return 0 <= time.time() - os.fstat(descriptor).st_mtime < CODE_UNUSED_S
    finally:
        os.close(descriptor)
    return False


def pinned(store: str = DATA) -> Dict[str, List[str]]:
    """Return digest → the jobs that use the set here. Code is used until the head has what was written beside it."""
    jobs, found = os.path.join(serve.root(), "jobs"), {}  # type: Tuple[str, Dict[str, List[str]]]
    if store == DATA:
        for job in _names(jobs):
            for name in _names(os.path.join(jobs, job, "data")):
                found.setdefault("sha256:" + name, []).append(job)
        return found
    kept = os.path.join(serve.root(), "outputs")
    names = [(jobs, name) for name in _names(jobs)]
    names += [(kept, name) for name in _names(kept) if name.endswith(BESIDE)]  # containers write into the others
    for folder, name in names:
        digest = linked_code(os.path.join(folder, name))
        if digest:
            found.setdefault(digest, []).append(name)
    return found


def link_to_code(digest: str) -> str:
    """Return the target of a job's link to its code. It is relative: hosts may have one home by several names."""
    return os.path.join("..", "..", CODE, os.path.basename(folder_of_set(digest, CODE)), TREE)


def linked_code(folder: str) -> str:
    """Return the digest of the code that is linked in a folder of a job; "" = none is."""
    try:
        return "sha256:" + os.readlink(os.path.join(folder, WORKSPACE)).split("/")[-2]
    except (OSError, IndexError):
        return ""


def code_in(folder: str) -> str:
    """Return the path of the code that is in a folder of a job: of a set, or of what an older gpurun has made there."""
    digest = linked_code(folder)
    return os.path.join(folder_of_set(digest, CODE), TREE) if digest else os.path.join(folder, WORKSPACE)


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


def put_aside(digest: str) -> None:
    """Take the name from damaged code, if there is any. The caller is `alone`."""
    path = folder_of_set(digest, CODE)
    try:
        os.rename(
            path, os.path.join(sets_folder(CODE), "%s%s-%s" % (DAMAGED, os.path.basename(path), secrets.token_hex(8)))
        )
    except FileNotFoundError:
        pass


def remove_set(digest: str, store: str = DATA) -> None:
    """Remove a set, even if it is in use. An interrupted removal leaves nothing that looks like the set."""
    _remove(folder_of_set(digest, store), store)


def _remove(path: str, store: str) -> None:
    doomed = os.path.join(sets_folder(store), DOOMED + secrets.token_hex(8))
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    _remove_leftover(doomed)


def _remove_leftover(path: str) -> None:
    """Remove as much as possible: what root has made in a set takes space, but must stop no job."""
    try:
        below.remove_path(path)
    except OSError:
        pass


def remove_unused_code(size: int, unused_s: float = CODE_UNUSED_S) -> None:
    """Remove code that no job uses: what was not used for this long, and the least recently used of the rest, until it
    takes no more than its share of the disk and `size` bytes are free. The caller is `alone`.
    """
    sweep(CODE)
    _remove_older_store()
    users = pinned(CODE)
    known = {os.path.basename(folder_of_set(one.digest)) for one in sets(users, CODE)}
    for name in _names(sets_folder(CODE)):
        digest = name.split("-")[1] if name.startswith(DAMAGED) else name
        is_rest = name not in known and not name.startswith((".lock", ARRIVING, DOOMED))  # or a power cut left it
        if is_rest and "sha256:" + digest not in users:
            _remove(os.path.join(sets_folder(CODE), name), CODE)
    top = os.open(sets_folder(CODE), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free, disk = serve.disk_of(top)
    finally:
        os.close(top)
    now_s = time.time()
    unused = [
        (0 <= now_s - one.used_s < unused_s, one.used_s, one)
        for one in sets(users, CODE)
        if not one.jobs and not one.is_moving
    ]
    left = sum(one.taken for _, _, one in unused)
    for is_recent, _, one in sorted(unused):
        if is_recent and left <= disk * CODE_SHARE and free >= size:
            return
        remove_set(one.digest, CODE)
        left, free = left - one.taken, free + one.taken


def prune_code(call: Call) -> None:
    """Remove all code that no job uses."""
    with alone_with_sets(call, CODE):
        remove_unused_code(0, unused_s=0.0)


def _remove_older_store() -> None:
    """Remove what an older gpurun kept of code, once its supervisors do not use it any more."""
    older = os.path.join(os.path.dirname(blobs.spool_folder()), "files")
    for name in _names(older):
        spool.sweep(os.path.join(older, name))
    spool.sweep(older)


def sweep(store: str = DATA) -> int:
    """Remove leftovers of killed agents; return their size in bytes. The caller is `alone`."""
    freed = 0
    for name in _names(sets_folder(store)):
        path = os.path.join(sets_folder(store), name)
        if name.startswith(DOOMED) or (name.startswith(ARRIVING) and not is_held(path)):
            freed += _taken(path)
            _remove_leftover(path)
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


def damage(path: str, digest: str, store: str = DATA) -> Iterator[int]:
    """Read everything in the folder `path` of a set; yield how many bytes of files have been read.

    Raises:
        OpError: ``corrupt``: a file, folder or link, the list of them or the hashes are not the set's.
    """
    rows = _rows(path, digest, store)
    hashes = _content(os.path.join(path, HASHES)) if store == DATA else None
    chunks = ChunkHashes() if store == DATA else None
    try:
        top = below.open_top(os.path.join(path, TREE))
    except OSError as error:
        raise OpError("corrupt", "the data set's files cannot be read: %s" % error.strerror) from None
    try:
        if store == CODE:
            _refuse_others(top, rows)
        with below.Cursor(top, below.READ) as cursor:
            for row in rows:
                try:
                    yield from _entry(cursor, row, chunks)
                except OSError as error:
                    raise OpError("corrupt", "%.200r: %s" % (row[0], error.strerror)) from None
    finally:
        os.close(top)
    if chunks is not None and chunks.hashes() != hashes:
        raise OpError("corrupt", "the data set's chunks do not match their hashes")


def _rows(path: str, digest: str, store: str) -> List[Entry]:
    rows = unpacked(_content(os.path.join(path, ENTRIES)))
    named = digest_of(rows) if store == DATA else timed_digest_of(rows)
    if named != digest or not {row[1] for row in rows} <= _KINDS:
        raise OpError("corrupt", "the list of files does not match the digest of the data set")
    return rows


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise OpError("corrupt", "%s: %s" % (os.path.basename(path), error.strerror)) from None


def _refuse_others(top: int, rows: Iterable[Entry]) -> None:
    """Refuse what is no part of a job's code: the job's programs would find it."""
    names = {row[0] for row in rows}
    for found in below.walk(top, below.READ):
        if below.text_of_path(found.parts) not in names:
            raise OpError("corrupt", "%.200r is no part of the code" % below.text_of_path(found.parts))


def _entry(cursor: below.Cursor, entry: Entry, chunks: Optional[ChunkHashes]) -> Iterator[int]:
    """Check one entry of a data set, or of code, if there are no `chunks`. Code gets its modes and times again."""
    path, kind, mode, mtime_ns, size, digest, target = entry
    parts = below.parts_of(path)
    above = cursor.at(parts[:-1])
    if kind == "dir":
        inner = cursor.at(parts)
        if chunks is None:
            _restore(inner, mode, mtime_ns)
    elif kind == "link":
        if os.readlink(parts[-1], dir_fd=above) != target.encode("utf-8", "surrogateescape"):
            raise OpError("corrupt", "the link %.200r has another target" % path)
    else:
        descriptor, whole = below.open_file(above, parts[-1], force=True), ContentDigest(like=digest)
        try:
            status = os.fstat(descriptor)
            # A file of code with several names is not ours alone: somebody else may write to it.
            is_right = status.st_size == size and (chunks is not None or status.st_nlink == 1)
            for zeros, piece in blocks(descriptor, size if is_right else 0):
                whole.add(zeros, piece)
                if chunks is not None:
                    chunks.skip(zeros)
                    chunks.add(piece)
                yield whole.size if chunks is None else chunks.size
            if chunks is None:
                _restore(descriptor, mode, mtime_ns)
        finally:
            os.close(descriptor)
        if not is_right or str(whole) != digest:
            raise OpError("corrupt", "%.200r does not match the digest of the data set" % path)


def _restore(descriptor: int, mode: int, mtime_ns: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_mode & 0o7777, status.st_mtime_ns) != (mode, mtime_ns):
        below.finish(descriptor, mode, mtime_ns)


def last_used_first(store: str) -> List[str]:
    """Return the folders of the sets that have arrived."""
    found = []
    for name in _names(sets_folder(store)):
        path = os.path.join(sets_folder(store), name)
        try:
            found += [(os.stat(os.path.join(path, META)).st_mtime, path)] if not name.startswith(".") else []
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)]


def rows_of(path: str) -> List[Entry]:
    """Return the entries of the set in the folder `path`."""
    with open(os.path.join(path, ENTRIES), "rb") as stream:
        return unpacked(stream.read())
