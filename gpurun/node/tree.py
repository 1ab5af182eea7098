"""A folder made the same as one on the head: content, modes, links; only what is new has to be sent.

File contents live by digest in a store of the user's cache folder, so that the folder of the next job, or of the next
attempt, is mostly copied from there.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from gpurun.node import blobs, frames
from gpurun.node.archive import absolute, forget
from gpurun.node.call import Call, OpError
from gpurun.node.spool import CHUNK, checked

# The store never takes more than this share of its disk, least recently used contents going first.
SHARE = 0.05

Entry = Tuple[str, str, int, int, int, str, str]


def _folder() -> str:
    return os.path.join(os.path.dirname(blobs.spool_folder()), "files")


def _place(digest: str) -> str:
    name = checked(digest)[len("sha256:") :]
    return os.path.join(_folder(), name[:2], name)


def lacking(call: Call, digests: List[str]) -> List[str]:
    """Those contents that the store does not have."""
    return [digest for digest in digests if not os.path.exists(_place(digest))]


def add(call: Call) -> Dict[str, Any]:
    """Put contents into the store: the payload is a sequence of frames ``{"d", "end"}`` with pieces of them.

    Raises:
        OpError: ``corrupt``: a content does not have its digest.
    """
    decoder, received = frames.Decoder(), 0
    making: "Dict[str, _Making]" = {}
    try:
        for piece in call.chunks():
            for frame in decoder.feed(piece):
                digest = str(frame.header["d"])
                if digest not in making:
                    making[digest] = _Making(digest)
                making[digest].write(frame.payload)
                received += len(frame.payload)
                if frame.header.get("end"):
                    making.pop(digest).keep()
    finally:
        for unfinished in making.values():
            unfinished.drop()
    return {"bytes": received}


def unpack(call: Call, transfer: str, pack: str, index: Sequence[Tuple[str, int, int]]) -> None:
    """Put contents into the store that came as one blob of a transfer, at (digest, offset, size)."""
    blob = blobs.find(transfer).blob(pack)
    while not blob.wait_complete(0.5):
        call.check()
    for digest, offset, size in index:
        if os.path.exists(_place(digest)):
            continue
        making = _Making(digest)
        try:
            for start in range(offset, offset + size, CHUNK):
                making.write(os.pread(blob.descriptor, min(CHUNK, offset + size - start), start))
            making.keep()
        finally:
            making.drop()


class _Making:
    """One content on its way into the store."""

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._place = _place(digest)
        os.makedirs(os.path.dirname(self._place), mode=0o700, exist_ok=True)
        self._hash = hashlib.sha256()
        handle, self._temporary = tempfile.mkstemp(dir=_folder(), prefix="making-")
        self._file = os.fdopen(handle, "wb", buffering=0)

    def write(self, piece: frames.Bytes) -> None:
        self._hash.update(piece)
        self._file.write(piece)

    def keep(self) -> None:
        self._file.close()
        if "sha256:" + self._hash.hexdigest() != self._digest:
            self.drop()
            raise OpError("corrupt", "what arrived for %s has another digest" % self._digest)
        os.replace(self._temporary, self._place)

    def drop(self) -> None:
        """Forget it; does nothing once it is kept."""
        self._file.close()
        forget(self._temporary)


def make(call: Call, dest: str, entries: List[Entry]) -> Dict[str, Any]:
    """Make `dest` a folder that holds exactly these entries; all contents are in the store.

    What is right already stays as it is; every other byte is verified while it is copied.

    Returns:
        ``{"written", "bytes"}``: files and bytes that had to be written.

    Raises:
        OpError: ``refused``: a name that leads out of the folder; ``not-found``: a content is not in the store;
            ``corrupt``.
    """
    os.makedirs(absolute(dest), mode=0o700, exist_ok=True)
    root = os.path.realpath(dest)
    os.chmod(root, 0o700)
    kinds = {_checked_name(entry[0]): entry[1] for entry in entries}
    if len(kinds) != len(entries):
        raise OpError("refused", "a name comes twice")
    _remove_others(root, kinds)
    written = size = 0
    for path, kind, mode, mtime_ns, length, digest, target in entries:
        call.check()
        place = os.path.join(root, path)
        if kinds.get(os.path.dirname(path), "dir") != "dir":
            raise OpError("refused", "%r passes through something that is no folder" % path)
        if kind == "dir":
            os.makedirs(place, mode=0o700, exist_ok=True)
            os.chmod(place, 0o700)
        elif kind == "link":
            _link(place, target)
        elif _has(place, length, digest):
            _finish(place, mode, mtime_ns)
        else:
            _copy(place, mode, mtime_ns, digest)
            written, size = written + 1, size + length
    for path, kind, mode, mtime_ns, _, _, _ in reversed(entries):
        if kind == "dir":
            _finish(os.path.join(root, path), mode, mtime_ns)
    _evict()
    return {"written": written, "bytes": size}


def _checked_name(path: str) -> str:
    parts = path.split("/") if isinstance(path, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise OpError("refused", "%r is no name inside the folder" % (path,))
    return path


def _remove_others(root: str, kinds: Dict[str, str]) -> None:
    """Remove what is not wanted, or is of another kind."""
    for folder, names, files in os.walk(root):
        os.chmod(folder, 0o700)
        inside = os.path.relpath(folder, root)
        for name in [*names, *files]:
            path = name if inside == "." else os.path.join(inside, name)
            place = os.path.join(folder, name)
            if _kind(place) == kinds.get(path):
                continue
            if name in names and not os.path.islink(place):
                names.remove(name)
                _open_up(place)
                shutil.rmtree(place)
            else:
                os.unlink(place)


def _open_up(path: str) -> None:
    os.chmod(path, 0o700)
    for folder, names, _files in os.walk(path):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o700)


def _kind(place: str) -> str:
    mode = os.lstat(place).st_mode
    return "dir" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "file" if stat.S_ISREG(mode) else "other"


def _link(place: str, target: str) -> None:
    if os.path.islink(place):
        if os.readlink(place) == target:
            return
        os.unlink(place)
    os.symlink(target, place)


def _has(place: str, size: int, digest: str) -> bool:
    """Whether a file is there with that content."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        # A file with several names is not ours alone: somebody else may write to it.
        if status.st_size != size or status.st_nlink != 1:
            return False
        return _digest(file) == digest


def _digest(file: Any) -> str:
    whole = hashlib.sha256()
    while True:
        piece = file.read(CHUNK)
        if not piece:
            return "sha256:" + whole.hexdigest()
        whole.update(piece)


def _copy(place: str, mode: int, mtime_ns: int, digest: str) -> None:
    """A file's content out of the store, verified, in place only when it is whole."""
    source = _place(digest)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".making-")
    try:
        with os.fdopen(handle, "wb", buffering=0) as out, open(source, "rb", buffering=0) as file:
            os.utime(source)
            copied = _digest(_Tee(file, out))
        if copied != digest:
            forget(source)
            raise OpError("corrupt", "the stored copy of %s has changed; it was removed" % digest)
        _finish(temporary, mode, mtime_ns)
        os.replace(temporary, place)
    except BaseException:
        forget(temporary)
        raise


class _Tee:
    """Reads from one file and writes what it read to another."""

    def __init__(self, source: Any, copy: Any) -> None:
        self._source, self._copy = source, copy

    def read(self, size: int) -> bytes:
        piece: bytes = self._source.read(size)
        view = memoryview(piece)
        while view:
            view = view[self._copy.write(view) :]
        return piece


def _finish(place: str, mode: int, mtime_ns: int) -> None:
    os.chmod(place, mode & 0o777)
    os.utime(place, ns=(mtime_ns, mtime_ns))


def _contents() -> Iterator[Tuple[float, int, str]]:
    """(last used, size, path) of everything in the store."""
    for folder, _names, files in os.walk(_folder()):
        for name in files:
            place = os.path.join(folder, name)
            try:
                status = os.stat(place)
            except FileNotFoundError:
                continue
            yield status.st_mtime, status.st_size, place


def _evict() -> None:
    """Keep the store within its share of the disk."""
    if not os.path.isdir(_folder()):
        return
    contents = sorted(_contents())
    used = sum(size for _, size, _ in contents)
    limit = shutil.disk_usage(_folder()).total * SHARE
    for _, size, place in contents:
        if used <= limit:
            return
        forget(place)
        used -= size


OPS = {"lacking": lacking, "add": add, "unpack": unpack, "make": make}
