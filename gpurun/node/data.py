"""Data sets and code on this host: look up, receive, pass on, list, remove."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Sequence, Tuple

from gpurun.node.agent import frames, serve
from gpurun.node.agent.frames import Call, OpError, OpReply
from gpurun.node.folder import below
from gpurun.node.folder.below import ContentDigest, Entry, blocks, digest_of_file
from gpurun.node.folder.contents import Maker, write_all
from gpurun.node.folder.contents import unpacked as frames_of
from gpurun.node.job.parts import held_by, job_folder
from gpurun.node.job.rules import CODE as WORKSPACE
from gpurun.node.transfer import blobs
from gpurun.node.transfer.sets import (
    CODE,
    DATA,
    ENTRIES,
    HASHES,
    META,
    MOST_DESCRIBED_BYTES,
    TREE,
    alone_with_sets,
    damage,
    files_of,
    folder_of_set,
    hold,
    is_here,
    last_used_first,
    link_to_code,
    linked_code,
    make_room,
    open_arrival,
    put_aside,
    remove_set,
    remove_unused_code,
    rows_of,
    sets,
    share,
    sweep,
    unpacked,
)
from gpurun.node.transfer.spool import CHUNK, Blob, FilesBlob, ManyFiles

LEAST_SEARCHED_BYTES = 64 << 10
"""Less content is sent anew: to look for it takes longer."""
MOST_SEARCHED = 30_000
"""So many files of earlier sets are looked at for content that a new set has, too: they take 0.1 s of CPU."""
MOST_REUSED_BYTES = 16 << 30
"""So much content of earlier sets is copied: a host has an hour for that, and then for the rest."""
LONGEST_LIST = 8 << 20
"""A longer list of files, some hundred thousand, is not looked at: it would take too much memory."""
MOST_NAMED = 4096
"""A host names at most so many contents that it lacks."""

_PIECE = 1 << 20
_TELL_S = 1.0


def make_entries(call: Call, maker: Maker, entries: Sequence[Entry], make_file: Callable[[Entry], None]) -> None:
    """Create the folders and links of a set, and call `make_file` for each file.

    Raises:
        OpError: ``refused``: an entry is of another kind.
    """
    makers = {"dir": maker.folder, "link": maker.link, "file": make_file}
    for entry in entries:
        call.check()
        if entry.kind not in makers:
            raise OpError("refused", "%.200r is a %.20r" % (entry.path, entry.kind))
        makers[entry.kind](entry)


class ArrivingSet:
    """A set that is arriving on this host.

    Args:
        path: its folder, which `open_arrival` has made.
        descriptor: holds its lock.
    """

    def __init__(self, digest: str, rows: Sequence[Entry], path: str, descriptor: int, store: str = DATA) -> None:
        self.digest, self.path, self.store = digest, path, store
        self.blob: Optional[Blob] = None
        self._rows = rows
        self._lacks: Dict[str, List[Entry]] = {}
        for row in rows:
            if row.kind == "file" and row.size:
                self._lacks.setdefault(row.digest, []).append(row)
        self._descriptor = descriptor
        self._busy = threading.Lock()
        self._top = below.open_top(os.path.join(path, TREE))
        self._maker = Maker(self._top)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the set from being dropped: its descriptors' numbers may then be those of another one.

        Raises:
            OpError: ``closed``: it has been dropped.
        """
        with self._busy:
            if self._descriptor < 0:
                raise OpError("closed", "the transfer of %s has ended" % self.digest)
            yield

    def make(self, call: Call) -> None:
        """Create all folders and links, and all files without their contents."""

        def make_file(entry: Entry) -> None:
            parts = below.parts_of(entry.path)
            descriptor = below.create_file(self._maker.cursor.at(parts[:-1]), parts[-1])
            os.ftruncate(descriptor, entry.size)
            os.close(descriptor)

        make_entries(call, self._maker, self._rows, make_file)

    def reuse(self, call: Call) -> None:
        """Fill files whose content earlier sets of the store have; each is compared with its digest."""
        if sum(rows[0].size for rows in self._lacks.values()) < LEAST_SEARCHED_BYTES:
            return
        left, files = MOST_REUSED_BYTES, MOST_SEARCHED
        for path in last_used_first(self.store):
            if not self._lacks or files <= 0:
                return
            try:
                if os.path.getsize(os.path.join(path, ENTRIES)) > LONGEST_LIST:
                    continue
                rows = rows_of(path)
                top = below.open_top(os.path.join(path, TREE))
            except (OSError, OpError):  # it is being removed, or is damaged
                continue
            files -= len(rows)
            try:
                with below.Cursor(top, below.READ) as cursor:
                    for row in rows:
                        if row.digest in self._lacks and row.size <= left and row.kind == "file":
                            call.check()
                            left -= row.size
                            self._copy(call, cursor, row)
            finally:
                os.close(top)

    def _copy(self, call: Call, cursor: below.Cursor, row: Entry) -> None:
        """Fill all files of a content from one of an earlier set, if it is what its digest says."""
        parts = below.parts_of(row.path)
        try:
            source = below.open_file(cursor.at(parts[:-1]), parts[-1], force=True)
        except OSError:
            return
        try:
            self._fill(row.digest, lambda: _checked(call, blocks(source, row.size)))
        except OpError:
            pass  # it is damaged
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        finally:
            os.close(source)

    def _fill(self, digest: str, content: Callable[[], Iterable[Tuple[int, bytes]]]) -> None:
        """Write a content to all files that have it, as `blocks` yields it.

        Raises:
            OpError: ``corrupt``: it has another digest. The files are empty again.
        """
        for row in self._lacks[digest]:
            descriptor, whole, is_right = self._opened(row), ContentDigest(like=digest), False
            try:
                for zeros, piece in content():
                    write_all(descriptor, piece, whole.size + zeros)
                    whole.add(zeros, piece)
                is_right = (str(whole), whole.size) == (digest, row.size)
            finally:
                if not is_right:  # chunks of zeros count as arrived: no other byte may be there
                    os.ftruncate(descriptor, 0)
                    os.ftruncate(descriptor, row.size)
                os.close(descriptor)
            if not is_right:
                raise OpError("corrupt", "%.200r does not match its digest" % row.path)
        del self._lacks[digest]

    def _opened(self, row: Entry) -> int:
        parts = below.parts_of(row.path)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(parts[-1], flags, dir_fd=self._maker.cursor.at(parts[:-1]))

    def lacking(self, most_bytes: int) -> Optional[List[str]]:
        """Return the contents that are still missing; None if they are more than that."""
        size = sum(rows[0].size for rows in self._lacks.values())
        return None if size > most_bytes or len(self._lacks) > MOST_NAMED else list(self._lacks)

    def take(self, sent: Iterable[frames.Frame]) -> int:
        """Fill files with contents from the head, each in one or more frames ``{"d"}``; return how many bytes came.

        Raises:
            OpError: ``corrupt``: a content does not have its digest, or was not asked for.
        """
        came: Dict[str, bytearray] = {}
        for frame in sent:
            digest = str(frame.header.get("d"))
            if digest not in self._lacks:
                raise OpError("corrupt", "the head sent a content that this host does not lack")
            came.setdefault(digest, bytearray()).extend(frame.payload)
        for digest, content in came.items():
            self._fill(digest, lambda content=content: [(0, bytes(content))])  # type: ignore[misc]
        return sum(map(len, came.values()))

    def expect(self, blob: str, hashes: bytes) -> Blob:
        """Return the blob that fills the files. What is there already has arrived."""
        if self.store == DATA:
            with open(os.path.join(self.path, HASHES), "xb") as stream:
                stream.write(hashes)
        content = ManyFiles(os.dup(self._top), files_of(self._rows), writable=True)
        self.blob = FilesBlob(blob, hashes, content, os.dup(self._descriptor))
        self.blob.take_holes()
        begun = at = 0
        for row in self._rows:
            if row.digest in self._lacks:
                self._take(begun, at)
                begun = at + row.size
            at += row.size
        self._take(begun, at)
        return self.blob

    def _take(self, begun: int, end: int) -> None:
        """Count the whole chunks between two places of the blob as arrived."""
        assert self.blob is not None
        first = -(-begun // CHUNK)
        after = self.blob.count if end == self.blob.size else end // CHUNK
        self.blob.take(first, after - first)

    @property
    def _is_complete(self) -> bool:
        return self.store == CODE and not self._lacks if self.blob is None else self.blob.complete

    def finish(self, call: Call, verify: bool) -> None:
        """Set all modes and times, and give the set its name. Keeps a set of that name that is there already.

        Raises:
            OpError: ``corrupt``: a file does not match its entry; ``conflict``: contents are missing.
        """
        if not self._is_complete:
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
        if self.store == DATA:  # code is read again before each use
            _sync(self._top)
        with alone_with_sets(call, self.store):
            try:
                os.rename(self.path, folder_of_set(self.digest, self.store))
                share(self._descriptor)  # until `drop`, which may be long after: others still receive it
            except OSError:
                if not is_here(self.digest, self.store):
                    raise

    def drop(self) -> None:
        """Remove an incomplete set, once nobody uses it. Idempotent."""
        with self._busy:
            if self._descriptor < 0:
                return
            self._maker.__exit__()
            os.close(self._top)
            os.close(self._descriptor)
            self._descriptor = -1
        below.remove_path(self.path)


def _checked(call: Call, content: Iterable[Tuple[int, bytes]]) -> Iterator[Tuple[int, bytes]]:
    """Yield a content, until nobody waits for it any more."""
    for piece in content:
        call.check()
        yield piece


_arriving: Dict[str, ArrivingSet] = {}
_lock = threading.Lock()


def use(call: Call, digests: List[str], job: str = "", attempt: int = 0, store: str = DATA) -> List[str]:
    """Return which of these sets are here, and mark them as used now. Reads code for a job again.

    Args:
        job: uses the sets from now on until its fence: none of them is removed, nor one that arrives later.

    Raises:
        OpError: ``fenced``: the job's folder is no longer this attempt's.
    """
    if job and store == CODE:
        with held_by(call, job, attempt):
            _link_code(job, digests[0])
        return [digest for digest in digests if _is_sound(call, digest)]
    if job:
        with held_by(call, job, attempt):
            pins = os.path.join(job_folder(job), "data")
            os.makedirs(pins, mode=0o700, exist_ok=True)
            for digest in digests:
                name = os.path.basename(folder_of_set(digest))
                os.close(os.open(os.path.join(pins, name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with alone_with_sets(call, store):
        return [digest for digest in digests if is_here(digest, store)]


def _link_code(job: str, digest: str) -> None:
    """Make a set the job's code: containers mount the link, and it keeps the set. The caller holds the lock."""
    if linked_code(job_folder(job)) == digest:
        return
    link = os.path.join(job_folder(job), WORKSPACE)
    new = "%s.%s" % (link, secrets.token_hex(4))
    os.symlink(link_to_code(digest), new)
    try:
        os.rename(new, link)
    except OSError:  # the folder that an older gpurun has made
        below.remove_path(link)
        os.rename(new, link)


def _is_sound(call: Call, digest: str) -> bool:
    """Return whether code is here, as its digest says. Puts a damaged copy aside, for jobs that run with it."""
    path = folder_of_set(digest, CODE)
    with alone_with_sets(call, CODE):
        if not is_here(digest, CODE):
            put_aside(digest)  # a power cut, or a cleaner, may have left the rest
            return False
        descriptor = hold(path)
    try:
        for _ in damage(path, digest, CODE):
            call.check()
        return True
    except OpError as error:
        if error.kind != "corrupt":
            raise
        with alone_with_sets(call, CODE):
            if is_here(digest, CODE) and os.path.samestat(os.fstat(descriptor), os.stat(os.path.join(path, META))):
                put_aside(digest)
        return False
    finally:
        os.close(descriptor)


def begin_set(
    call: Call, transfer: str, digest: str, quota: Optional[int] = None, keep: Sequence[str] = (),
    stored: Optional[int] = None, store: str = DATA, direct: int = 0,
) -> Optional[List[str]]:  # fmt: skip
    """Free space for a set and begin to receive it; the payload is its entries, packed.

    Args:
        transfer: the name of this arrival, until `drop`.
        stored: how many of its bytes take space here; None = all.
        quota: how many bytes all data sets may take here; None = a quarter of the disk.
        keep: sets that must not be removed for it, besides those that jobs use here.
        direct: how many bytes the head would send with `put`.

    Returns:
        The contents that this host lacks, if `put` may bring them; else None: a blob of the transfer brings them.

    Raises:
        OpError: ``no-space``.
    """
    entries = call.whole(MOST_DESCRIBED_BYTES)
    rows = unpacked(entries)
    with alone_with_sets(call, store):
        size = sum(size for _, size in files_of(rows)) if stored is None else stored
        if store == CODE:
            remove_unused_code(size)
        else:
            make_room(size, quota, keep)
        path, descriptor = open_arrival(digest, rows, entries, size, store)
    arriving = ArrivingSet(digest, rows, path, descriptor, store)
    with arriving.used():
        with _lock:
            _arriving[transfer] = arriving
        arriving.make(call)
        arriving.reuse(call)
        return arriving.lacking(direct) if direct else None


def put(call: Call, transfer: str) -> Dict[str, int]:
    """Take from the head the contents that a set lacks (see `ArrivingSet.take`), and end its arrival."""
    arriving = _arrival(transfer)
    with arriving.used():
        received = arriving.take(frames_of(call.chunks()))
        arriving.finish(call, verify=False)
    drop(call, transfer)
    return {"bytes": received}


def _arrival(transfer: str) -> ArrivingSet:
    with _lock:
        arriving = _arriving.get(transfer)
    if arriving is None:
        raise OpError("not-found", "no data set arrives with the transfer %s" % transfer)
    return arriving


def expect(call: Call, transfer: str, digest: str, blob: str, store: str = DATA) -> None:
    """Announce the blob of a set that arrives, or that is here to be passed on; the payload is its chunks' hashes."""
    hashes, here = call.whole(MOST_DESCRIBED_BYTES), blobs.find_transfer(transfer)
    arriving = _arriving.get(transfer)
    if arriving is None:
        here.blobs[blob] = _served(call, digest, blob, hashes, store)
        return
    with arriving.used():
        here.blobs[blob] = arriving.expect(blob, hashes)


def _served(call: Call, digest: str, blob: str, hashes: bytes, store: str = DATA) -> Blob:
    """Return a set that is here, to be passed on; it stays while the blob is open."""
    path = folder_of_set(digest, store)
    with alone_with_sets(call, store):
        descriptor = hold(path)
    try:
        content = ManyFiles(below.open_top(os.path.join(path, TREE)), files_of(rows_of(path)), force=True)
        return FilesBlob(blob, hashes, content, descriptor, complete=True)
    except BaseException:
        os.close(descriptor)
        raise


def finish(call: Call, transfer: str, verify: bool = False) -> None:
    """Complete an arrived set, so that jobs can use it.

    Args:
        verify: read all files again, because the source of the chunks' hashes is not trusted.

    Raises:
        OpError: ``corrupt``, ``conflict``.
    """
    arriving = _arrival(transfer)
    with arriving.used():
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
    "put": put,
    "expect": expect,
    "finish": finish,
    "drop": drop,
    "manifest": manifest,
    "verify": verify,
    "list": list_sets,
    "evict": evict,
    "folders": folders,
}
