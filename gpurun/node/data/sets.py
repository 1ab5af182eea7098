"""Data sets on this host: look up, receive, pass on, list, remove.

The bytes travel as one blob of a transfer (`gpurun.node.transfer.blobs`): the contents of all files, one after the
other. A host writes them straight into the files (`gpurun.node.transfer.many_files`). A set gets its name only when it
is complete.
"""

import ctypes
import os
import threading
import time
from typing import Any, Dict, Generator, List, Optional, Sequence

from gpurun.node.agent import place
from gpurun.node.agent.call import Call, OpError, OpReply
from gpurun.node.data import data_store, reading
from gpurun.node.data.data_store import TREE, Row
from gpurun.node.folder import below
from gpurun.node.folder.contents import Listed
from gpurun.node.folder.holes import ContentDigest, blocks
from gpurun.node.folder.making import Maker
from gpurun.node.job import job_lock, job_parts
from gpurun.node.transfer import blobs
from gpurun.node.transfer.many_files import FilesBlob, ManyFiles
from gpurun.node.transfer.spool import Blob

_PIECE = 1 << 20
_TELL_S = 1.0


class ArrivingSet:
    """A set that is arriving on this host.

    Args:
        path: its folder, which `data_store.begin` has made.
        descriptor: holds its lock.
    """

    def __init__(self, digest: str, rows: Sequence[Row], path: str, descriptor: int) -> None:
        self.digest, self.path = digest, path
        self.blob: Optional[Blob] = None
        self._rows = rows
        self._descriptor = descriptor
        self._top = below.open_top(os.path.join(path, TREE))
        self._maker = Maker(self._top)

    def make(self, call: Call) -> None:
        """Create all folders and links, and all files without their contents."""
        for path, kind, mode, mtime_ns, size, _, target in self._rows:
            call.check()
            if kind == "dir":
                self._maker.folder(Listed(path, kind, mode, mtime_ns))
            elif kind == "link":
                self._maker.link(Listed(path, kind, mtime_ns=mtime_ns, target=target))
            elif kind == "file":
                parts = below.parts_of(path)
                descriptor = below.create(self._maker.cursor.at(parts[:-1]), parts[-1])
                os.ftruncate(descriptor, size)
                os.close(descriptor)
            else:
                raise OpError("refused", "%.200r is a %.20r" % (path, kind))

    def expect(self, blob: str, hashes: bytes) -> Blob:
        """Return the blob that fills the files."""
        with open(os.path.join(self.path, data_store.HASHES), "xb") as stream:
            stream.write(hashes)
        content = ManyFiles(os.dup(self._top), data_store.files_of(self._rows), writable=True)
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
                    if verify and _digest(descriptor, digest) != digest:
                        raise OpError("corrupt", "%.200r does not match the digest of the data set" % path)
                    below.finish(descriptor, mode, mtime_ns)
                finally:
                    os.close(descriptor)
        self._maker.close_folders()
        _sync(self._top)
        with data_store.alone(call):
            try:
                os.rename(self.path, data_store.place_of(self.digest))
                data_store.share(self._descriptor)  # until `drop`, which may be long after: others still receive it
            except OSError:
                if not data_store.is_here(self.digest):
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
        with job_lock.held_by(call, job, attempt):
            pins = os.path.join(job_parts.folder(job), "data")
            os.makedirs(pins, mode=0o700, exist_ok=True)
            for digest in digests:
                name = os.path.basename(data_store.place_of(digest))
                os.close(os.open(os.path.join(pins, name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with data_store.alone(call):
        return [digest for digest in digests if data_store.is_here(digest)]


def begin(
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
    blobs.find(transfer)
    entries = call.whole(data_store.MOST_DESCRIBED_BYTES)
    rows = data_store.unpacked(entries)
    with data_store.alone(call):
        size = sum(size for _, size in data_store.files_of(rows)) if stored is None else stored
        data_store.make_room(size, quota, keep)
        path, descriptor = data_store.begin(digest, rows, entries, size)
    arriving = ArrivingSet(digest, rows, path, descriptor)
    with _lock:
        _arriving[transfer] = arriving
    arriving.make(call)


def expect(call: Call, transfer: str, digest: str, blob: str) -> None:
    """Announce the blob of a set that arrives, or that is here to be passed on; the payload is its chunks' hashes."""
    hashes, here = call.whole(data_store.MOST_DESCRIBED_BYTES), blobs.find(transfer)
    arriving = _arriving.get(transfer)
    here.blobs[blob] = arriving.expect(blob, hashes) if arriving is not None else _served(call, digest, blob, hashes)


def _served(call: Call, digest: str, blob: str, hashes: bytes) -> Blob:
    """Return a set that is here, to be passed on; it stays while the blob is open."""
    path = data_store.place_of(digest)
    with data_store.alone(call):
        descriptor = data_store.hold(path)
    try:
        content = ManyFiles(below.open_top(os.path.join(path, TREE)), data_store.files_of(_rows_of(path)))
        return FilesBlob(blob, hashes, content, descriptor, complete=True)
    except BaseException:
        os.close(descriptor)
        raise


def _rows_of(path: str) -> List[Row]:
    with open(os.path.join(path, data_store.ENTRIES), "rb") as stream:
        return data_store.unpacked(stream.read())


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
    if part not in (data_store.ENTRIES, data_store.HASHES):
        raise OpError("bad-request", "a data set has no %.40r" % part)
    with open(os.path.join(data_store.place_of(digest), part), "rb") as stream:
        for piece in iter(lambda: stream.read(_PIECE), b""):
            yield OpReply(None, piece)


def verify(call: Call, digest: str) -> Generator[int, None, None]:
    """Read a set that is here, and yield about once a second how many bytes have been read.

    Raises:
        OpError: ``corrupt``: it is not what its digest says; ``not-found``.
    """
    path = data_store.place_of(digest)
    with data_store.alone(call):
        descriptor = data_store.hold(path)
    try:
        told_s = time.monotonic()
        for count in reading.damage(path, digest):
            call.check()
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                yield count
    finally:
        os.close(descriptor)


def list_(call: Call) -> Dict[str, Any]:
    """Return ``{"sets": [as `DataSet.as_json`…]}``: the sets that are here."""
    with data_store.alone(call):
        data_store.sweep()
        return {"sets": [one.as_json() for one in data_store.sets() if os.path.isdir(data_store.place_of(one.digest))]}


def evict(call: Call, digests: List[str], job: str = "") -> Dict[str, str]:
    """Remove sets; return those that stay, with the reason: a job uses it, or it is being sent.

    Args:
        job: has not started yet, so that its sets may go.
    """
    kept: Dict[str, str] = {}
    with data_store.alone(call):
        here = {one.digest: one for one in data_store.sets()}
        for digest in digests:
            one = here.get(digest)
            users = [user for user in one.jobs if user != job] if one is not None else []
            if users:
                kept[digest] = "used by %s" % ", ".join(users)
            elif one is not None and one.is_moving:
                kept[digest] = "the host receives or sends the data set now"
            else:
                data_store.remove(digest)
        data_store.sweep()
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
            if place.filesystem(os.path.realpath(path), place.mounts()) == "autofs":
                wrong[path] = "the automounter does not mount this folder: %s" % error.strerror
    return wrong


def _digest(descriptor: int, like: str) -> str:
    whole = ContentDigest(like)
    for zeros, piece in blocks(descriptor, os.fstat(descriptor).st_size):
        whole.add(zeros, piece)
    return str(whole)


def _sync(descriptor: int) -> None:
    """Sync the whole file system: a set that has its name must be complete after a power cut, too."""
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    except (OSError, AttributeError):
        os.sync()


OPS = {
    "use": use,
    "begin": begin,
    "expect": expect,
    "finish": finish,
    "drop": drop,
    "manifest": manifest,
    "verify": verify,
    "list": list_,
    "evict": evict,
    "folders": folders,
}
