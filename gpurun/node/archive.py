"""Folders as tar streams, in and out.

Nothing that arrives may leave the folder it was sent to: see `extract` for what is refused.
"""

import io
import os
import shutil
import stat
import tarfile
from typing import Any, Dict, Iterator, List, Optional

from gpurun.node import frames
from gpurun.node.call import Call, OpError


def absolute(path: str) -> str:
    """The path itself, if it is absolute, has no NUL and no ``..`` part.

    Raises:
        OpError: ``bad-request`` otherwise.
    """
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise OpError("bad-request", "%r is not an absolute path without '..'" % (path,))
    return path


def forget(path: str) -> None:
    """Remove a file or link, if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


class ChunkReader(io.RawIOBase):
    """The pieces of a payload as a readable binary file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:  # noqa: D102 - of RawIOBase
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: D102 - of RawIOBase
        while not self._rest:
            piece = next(self._chunks, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def untar(call: Call, dest: str) -> Dict[str, Any]:
    """Unpack the payload, a tar stream, below `dest` (made with mode 0700 if missing).

    Existing files are replaced; see `extract` for what is refused.

    Returns:
        ``{"entries", "bytes"}``.
    """
    os.makedirs(absolute(dest), mode=0o700, exist_ok=True)
    source = io.BufferedReader(ChunkReader(call.chunks()), 1 << 18)
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            return extract(archive, dest)
    except tarfile.TarError as error:
        raise OpError("bad-request", "not a tar stream: %s" % error) from None


def extract(archive: tarfile.TarFile, dest: str) -> Dict[str, Any]:
    """Unpack files, folders and links below `dest`, byte for byte, with their modes and modification times.

    Refused, as what only an attack or a mistake sends: absolute names, ``..``, names that pass through a symbolic
    link, links that lead out of `dest`, devices, sockets, FIFOs, set-user-id and set-group-id bits.

    Raises:
        OpError: ``refused``, with the entry's name; entries before it are already unpacked.
    """
    root = os.path.realpath(dest)
    entries, size = 0, 0
    folders: List[tarfile.TarInfo] = []
    for entry in archive:
        target = inside(root, entry.name)
        if entry.isdir():
            _make_folder(target)
            folders.append(entry)
        elif entry.isreg():
            size += _extract_file(archive, entry, target)
        elif entry.issym():
            _extract_symlink(root, entry, target)
        elif entry.islnk():
            _clear(target)
            os.link(inside(root, entry.linkname), target, follow_symlinks=False)
        else:
            raise OpError("refused", "%r is a device, socket or FIFO" % entry.name)
        entries += 1
    for entry in reversed(folders):
        target = inside(root, entry.name)
        os.chmod(target, entry.mode & 0o777)
        os.utime(target, (entry.mtime, entry.mtime))
    return {"entries": entries, "bytes": size}


def inside(root: str, name: str) -> str:
    """Where an entry goes; its parent folder is real, made if it is missing, and inside `root`.

    Raises:
        OpError: ``refused``: it would not be.
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise OpError("refused", "%r leads out of the folder" % name)
    target = os.path.normpath(os.path.join(root, name))
    parent = root if target == root else os.path.dirname(target)
    os.makedirs(parent, mode=0o755, exist_ok=True)
    if os.path.realpath(parent) != parent:
        raise OpError("refused", "%r passes through a symbolic link" % name)
    return target


def _make_folder(target: str) -> None:
    if os.path.islink(target) or (os.path.exists(target) and not os.path.isdir(target)):
        os.unlink(target)
    os.makedirs(target, mode=0o755, exist_ok=True)


def _clear(target: str) -> None:
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    else:
        forget(target)


def _extract_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: str) -> int:
    _clear(target)
    source = archive.extractfile(entry)
    if source is None:
        raise OpError("refused", "%r has no content" % entry.name)
    # O_EXCL and O_NOFOLLOW: whatever appears at this name in between is not ours to write to.
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 18)
        file.flush()
        os.fchmod(handle, entry.mode & 0o777)
        os.utime(handle, (entry.mtime, entry.mtime))
    return entry.size


def _extract_symlink(root: str, entry: tarfile.TarInfo, target: str) -> None:
    leads_to = os.path.normpath(os.path.join(os.path.dirname(target), entry.linkname))
    if os.path.isabs(entry.linkname) or not (leads_to == root or leads_to.startswith(root + "/")):
        raise OpError("refused", "the link %r leads out of the folder, to %r" % (entry.name, entry.linkname))
    _clear(target)
    os.symlink(entry.linkname, target)


Listing = Dict[str, List[int]]
"""Name → [size, modification time in ns, inode] of every regular file in a folder, by which a change is seen."""


def listing(call: Call, path: str) -> Listing:
    """The regular files below `path`; none if it is no folder. Files that vanish meanwhile are left out."""
    found: Listing = {}
    for folder, _, files in os.walk(absolute(path)):
        for name in files:
            full = os.path.join(folder, name)
            try:
                status = os.lstat(full)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found[os.path.relpath(full, path)] = _marks(status)
    return found


def _marks(status: os.stat_result) -> List[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def tar(call: Call, path: str, known: Optional[Listing] = None) -> Dict[str, Any]:
    """The folder `path` as a tar stream; names are relative to it. Files that vanish meanwhile are left out.

    Args:
        known: regular files that are as they were are left out.

    Returns:
        ``{"entries", "listing"}``, after the stream items whose payloads make up the tar: how the regular files were
        when each was read.
    """
    if not os.path.isdir(absolute(path)):
        raise OpError("not-found", "%s is not a folder" % path)
    entries = 0
    read: Listing = {}
    sink: Any = _Sender(call)
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=frames.PIECE) as archive:
        for folder, names, files in os.walk(path):
            names.sort()
            for name in sorted([*names, *files]):
                full, relative = os.path.join(folder, name), os.path.relpath(os.path.join(folder, name), path)
                entries += _add(archive, full, relative, known or {}, read)
    return {"entries": entries, "listing": read}


def _add(archive: tarfile.TarFile, full: str, name: str, known: Listing, read: Listing) -> int:
    """Add one entry; the number of entries added. `read` learns how a regular file was."""
    file: Optional[Any] = None
    try:
        info = archive.gettarinfo(full, name)
        if info is None:
            return 0  # a socket: tar has no such entry
        if info.isreg():
            file = open(full, "rb")  # noqa: SIM115 - closed below
            status = os.fstat(file.fileno())
            read[name], info.size = _marks(status), status.st_size
            if known.get(name) == read[name]:
                file.close()
                return 0
    except FileNotFoundError:
        return 0
    if file is None:
        archive.addfile(info)
        return 1
    with file:
        source: Any = _Exactly(file, info.size)
        archive.addfile(info, source)
    return 1


class _Sender(io.RawIOBase):
    """A writable file whose content goes to the head as stream items."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        for piece in frames.pieces(data):
            self._call.send(None, piece)
        return len(data)


class _Exactly(io.RawIOBase):
    """Exactly `size` bytes of a file; one that shrinks meanwhile is filled up with zeros."""

    def __init__(self, file: Any, size: int) -> None:
        self._file = file
        self._left = size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data: bytes = self._file.read(size)
        self._left -= size
        return data + b"\0" * (size - len(data))
