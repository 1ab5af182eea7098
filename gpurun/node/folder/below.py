"""Read, create and remove folders that other programs may change at any moment, relative to a directory descriptor.

A container can replace a folder by a link between two system calls. So this module never opens a joined path. It opens
every folder on the way by its own name, relative to the descriptor of the folder above it, and follows no link. Links
are data. Names are bytes; as text they are UTF-8, with ``surrogateescape`` for bytes that are not UTF-8.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import stat
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from gpurun.node.agent.frames import OpError

Parts = Tuple[bytes, ...]

READ = 0o500
"""The rights that an owner needs to read a folder; a file needs 0o400 of them."""
CHANGE = 0o700
"""The rights that an owner needs to change what a folder holds."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks says."""
LONGEST = 32 << 10
"""No path is longer, in bytes: a container can nest folders without end."""
_OPEN_AT_ONCE = 64
_NO_NAMES = frozenset((b"", b".", b".."))
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _FLAGS
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def absolute(path: str) -> str:
    """Return the path if it is absolute, has no NUL and no ``..`` part.

    Raises:
        OpError: ``bad-request`` otherwise.
    """
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise OpError("bad-request", "%r is not an absolute path without '..'" % (path,))
    return path


def forget(path: str) -> None:
    """Remove a file or link, if it exists."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def text_of_path(parts: Parts) -> str:
    """Return a path below a folder as text, with ``/``."""
    return b"/".join(parts).decode("utf-8", "surrogateescape")


def parts_of(path: object) -> Parts:
    """Return the names of a path below a folder.

    Raises:
        OpError: ``refused``: it leads out of the folder, or no file system can have such a name.
    """
    try:
        parts = tuple(path.encode("utf-8", "surrogateescape").split(b"/")) if isinstance(path, str) else ()
    except UnicodeEncodeError:
        parts = ()
    if not parts or not _NO_NAMES.isdisjoint(parts) or "\0" in str(path) or max(map(len, parts)) > 255:
        raise OpError("refused", "%.200r is not a path inside the folder" % (path,))
    if len(parts) + sum(map(len, parts)) > LONGEST:
        raise OpError("refused", "%.200r… is longer than %d bytes" % (path, LONGEST))
    return parts


def open_top(path: str, make: bool = False, need: int = 0) -> int:
    """Return a descriptor of one of our own folders by its absolute path; only its last name must not be a link.

    Args:
        make: create it, and the folders above it, with mode 0700.
        need: as for `open_folder`: where it is mounted, a program can change its mode.
    """
    if make:
        os.makedirs(absolute(path), mode=0o700, exist_ok=True)
    folder, name = os.path.split(absolute(path))
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_folder(above, os.fsencode(name), need)
    finally:
        os.close(above)


def open_folder(above: int, name: bytes, need: int = 0) -> int:
    """Return a descriptor of a folder below `above`.

    Args:
        need: rights that its owner must have. If they are missing and the folder is ours, they are added permanently.

    Raises:
        OSError: there is no folder of this name, for example because it is a link.
    """
    return _open_folder(above, name, need)[0]


def _open_folder(above: int, name: bytes, need: int) -> Tuple[int, Optional[int]]:
    """Return the descriptor, and the folder's earlier mode if it had to change."""
    before = None
    if need and os.geteuid() != 0:
        looked = os.open(name, os.O_PATH | os.O_DIRECTORY | _FLAGS, dir_fd=above)
        try:
            mode = stat.S_IMODE(os.fstat(looked).st_mode)
            if mode & need != need and _set_mode(looked, mode | CHANGE):
                before = mode
        finally:
            os.close(looked)
    return os.open(name, _FOLDER, dir_fd=above), before


def _set_mode(descriptor: int, mode: int) -> bool:
    """Set the mode through a descriptor, also one opened with ``O_PATH``; return False if the file is not ours."""
    try:
        os.chmod("/proc/self/fd/%d" % descriptor, mode)
    except PermissionError:
        return False
    return True


def open_file(above: int, name: bytes, force: bool = False) -> int:
    """Do the same as `open_regular`, without the status."""
    return open_regular(above, name, force)[0]


def open_regular(above: int, name: bytes, force: bool = False) -> Tuple[int, os.stat_result]:
    """Return a descriptor for reading a regular file below `above`, and its status before anything was read.

    Never waits for a pipe, and never opens a device. Nor does it wait for a program with a lease on the file (fcntl(2),
    ``F_SETLEASE``): that would take 45 s for each.

    Args:
        force: read a file of ours whose mode keeps us out; its mode is restored before this returns.

    Raises:
        OSError: there is no file, or it may not be read; ``ELOOP`` also if it is not a regular file, ``EAGAIN`` if a
            program has a lease.
    """
    looked = os.open(name, os.O_PATH | _FLAGS, dir_fd=above)
    try:
        status = os.fstat(looked)
        mode = status.st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.ELOOP, "it is %s now" % kind_of(mode))
        if not force or mode & 0o400 or os.geteuid() == 0 or not _set_mode(looked, 0o400):
            return os.open("/proc/self/fd/%d" % looked, _READ), status
        try:
            descriptor = os.open("/proc/self/fd/%d" % looked, _READ)
        finally:
            _set_mode(looked, stat.S_IMODE(mode))
        return descriptor, os.fstat(looked)
    finally:
        os.close(looked)


def link_file(above: int, name: bytes, dest: int, dest_name: bytes) -> None:
    """Create a hard link to a regular file below `dest`. Raises OSError if it is anything else."""
    looked = os.open(name, os.O_PATH | _FLAGS, dir_fd=above)
    try:
        if not stat.S_ISREG(os.fstat(looked).st_mode):
            raise OSError(errno.ELOOP, "the file is not a regular file")
        os.link("/proc/self/fd/%d" % looked, dest_name, dst_dir_fd=dest, follow_symlinks=True)
    finally:
        os.close(looked)


def create_file(above: int, name: bytes) -> int:
    """Create a file of mode 0600 below `above`; return a descriptor for writing. Raises FileExistsError if it
    exists.
    """
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=above)


def finish(descriptor: int, mode: int, mtime_ns: int) -> None:
    """Set the mode, without set-user-id bits and the like, and the time of an open file or folder."""
    os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    os.fchmod(descriptor, mode & 0o777)


def kind_of(mode: int) -> str:
    """Return ``file``, ``dir``, ``link``, ``FIFO``, ``socket`` or ``device``."""
    return _KINDS.get(stat.S_IFMT(mode), "device")


class Cursor:
    """Moves from folder to folder below a descriptor, with few open descriptors at any depth. A context manager.

    Args:
        top: the folder's descriptor, which stays open.
        need: rights that we must have in every folder on the way. Folders of ours that lack them get them until the
            cursor leaves them.
    """

    def __init__(self, top: int, need: int = 0) -> None:
        self._top = top
        self._need = need
        self._at: Parts = ()
        self._open: List[Tuple[int, Optional[int]]] = []  # of the last folders of `_at`

    def at(self, parts: Parts) -> int:
        """Return a descriptor of the folder `parts`, valid until the next call. Raises OSError if it is not a
        folder.
        """
        if parts is not self._at:
            common = _common(self._at, parts)
            self._up(common)
            if self._at and not self._open:
                self._at, parts_above = (), self._at
                self._down(parts_above)
            self._down(parts[common:])
            self._at = parts
        return self._open[-1][0] if self._open else self._top

    def _down(self, names: Parts) -> None:
        for name in names:
            self._open.append(_open_folder(self._open[-1][0] if self._open else self._top, name, self._need))
            self._at = (*self._at, name)
            if len(self._open) > _OPEN_AT_ONCE:
                self._close(self._open.pop(0), again=False)

    def _up(self, depth: int) -> None:
        while len(self._at) > depth:
            self._at = self._at[:-1]
            if self._open:
                self._close(self._open.pop())

    def _close(self, opened: Tuple[int, Optional[int]], again: bool = True) -> None:
        """Close a folder, and restore its mode, unless it is still on the way."""
        descriptor, mode = opened
        if mode is not None and again:
            _set_mode(descriptor, mode)
        os.close(descriptor)

    def __enter__(self) -> "Cursor":
        return self

    def __exit__(self, *_: object) -> None:
        self._up(0)


def _common(one: Parts, other: Parts) -> int:
    count = 0
    for mine, theirs in zip(one, other):
        if mine != theirs:
            break
        count += 1
    return count


def names_in(folder: int) -> List[bytes]:
    """Return the names in a folder, in order."""
    return sorted(map(os.fsencode, os.listdir(folder)))


def remove_entry(above: int, name: bytes) -> None:
    """Remove a file, a link, or a folder with everything in it, whatever modes its folders have. Idempotent.

    Raises:
        OSError: something in it could not be removed; everything else is gone.
    """
    if _unlinked(above, name):
        return
    top = open_folder(above, name, CHANGE)
    try:
        for _ in range(3):  # somebody may still be adding names
            clearing = _Clearing(top)
            clearing.clear(top, 0)
            while clearing.again and clearing.error is None:
                clearing.again = False
                clearing.clear(top, 0)
            if clearing.error is None:
                break
    finally:
        os.close(top)
    if clearing.error is not None:
        raise clearing.error
    os.rmdir(name, dir_fd=above)


def remove_path(path: str) -> None:
    """Call `remove` for an absolute path whose folders are our own."""
    folder, name = os.path.split(absolute(path))
    try:
        above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_entry(above, os.fsencode(name))
    finally:
        os.close(above)


def _unlinked(above: int, name: bytes) -> bool:
    """Remove an entry that is not a folder; return False if it is a folder, or cannot be removed."""
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        return False
    return True


class _Clearing:
    """Empties a folder. Moves deep entries up first, so that no depth needs many descriptors."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._mark = os.urandom(8).hex()
        self._moved = 0
        self.again = False
        self.error: Optional[OSError] = None

    def clear(self, folder: int, depth: int) -> None:
        for name in names_in(folder):
            if _unlinked(folder, name):
                continue
            try:
                self._clear_folder(folder, name, depth)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.error = self.error or error

    def _clear_folder(self, above: int, name: bytes, depth: int) -> None:
        inner = open_folder(above, name, CHANGE)
        try:
            if depth < _OPEN_AT_ONCE:
                self.clear(inner, depth + 1)
        finally:
            os.close(inner)
        if depth < _OPEN_AT_ONCE:
            os.rmdir(name, dir_fd=above)
            return
        self._moved += 1
        moved = ".%s-%d" % (self._mark, self._moved)
        os.rename(name, os.fsencode(moved), src_dir_fd=above, dst_dir_fd=self._top)
        self.again = True


# Find what is below a folder that other programs may change at any moment; opens it like `below` does.


_LOOK_AT_ONCE = 1000


class Found(NamedTuple):
    """An entry below a folder.

    Attributes:
        above: a descriptor of its folder, valid until the next item.
        status: None if it could not be read, or is a folder that could not be read: see `why`.
    """

    parts: Parts
    above: int
    status: Optional[os.stat_result]
    why: str = ""


class Look(NamedTuple):
    """Some entries of one folder, names in order.

    Attributes:
        above: a descriptor of the folder, valid until the next item.
        at: how many names came before these.
        found: each name with its status, or with the reason why it has none (as in `Found`).
    """

    parts: Parts
    above: int
    at: int
    found: List[Tuple[bytes, Optional[os.stat_result], str]]


def walk_folder(top: int, need: int = 0) -> Iterator[Look]:
    """Yield everything below a folder, each folder before its content. Leaves out what disappears meanwhile.

    Args:
        need: as for `gpurun.node.folder.below.Cursor`.
    """
    with Cursor(top, need) as cursor:
        waiting: List[Tuple[Parts, int]] = [((), 0)]
        while waiting:
            folder, length = waiting.pop()
            try:
                names = names_in(cursor.at(folder))
            except FileNotFoundError:
                continue
            except OSError as error:
                if not folder:
                    raise
                yield _unread(folder, top, str(error.strerror))
                continue
            if length + 256 > LONGEST:
                fits = [name for name in names if length + 1 + len(name) <= LONGEST]
                if len(fits) < len(names):
                    yield _unread(folder, top, "holds a path that is longer than %d bytes" % LONGEST)
                names = fits
            inner: List[Tuple[Parts, int]] = []
            for at in range(0, len(names), _LOOK_AT_ONCE):
                yield _looked(folder, length, cursor.at(folder), at, names, inner)
            waiting += reversed(inner)


def _unread(folder: Parts, top: int, why: str) -> Look:
    return Look(folder[:-1], top, 0, [(folder[-1], None, why)])


def _looked(
    folder: Parts, length: int, above: int, at: int, names: List[bytes], inner: List[Tuple[Parts, int]]
) -> Look:
    """Look at some names of a folder; add those that are folders to `inner`."""
    found: List[Tuple[bytes, Optional[os.stat_result], str]] = []
    for name in names[at : at + _LOOK_AT_ONCE]:
        try:
            status = os.lstat(name, dir_fd=above)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append((name, None, str(error.strerror)))
            continue
        if stat.S_ISDIR(status.st_mode):
            inner.append(((*folder, name), length + 1 + len(name)))
        found.append((name, status, ""))
    return Look(folder, above, at, found)


def walk(top: int, need: int = 0) -> Iterator[Found]:
    """Do the same as `look`, one by one."""
    for parts, above, _, found in walk_folder(top, need):
        for name, status, why in found:
            yield Found((*parts, name), above, status, why)


# Detect changes of files that a program changes through a mapping, whose times are less reliable.


_LEAST_STEP, _STEPS = 64 << 20, 1000
_WAIT_WRITE_WAIT = 7
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE)


def changes_are_seen(descriptor: int, size: int) -> Iterator[None]:
    """After this, each change of a file's bytes gives the file other times. Waits for the host's disk.

    Yields repeatedly. A file system in memory has no disk to write to: there, such changes stay undetected.

    Raises:
        OSError: the disk failed.
    """
    step = max(_LEAST_STEP, size // _STEPS)
    for position in range(0, size, step):
        _write_back(descriptor, position, step)
        yield


def _write_back(descriptor: int, position: int, size: int) -> None:
    if _sync_file_range is None:
        os.fdatasync(descriptor)
    elif _sync_file_range(descriptor, position, size, _WAIT_WRITE_WAIT):
        number = ctypes.get_errno()
        if number not in _NOT_THERE:
            raise OSError(number, os.strerror(number))
        os.fdatasync(descriptor)


def _found() -> Any:
    """Return the C library's function that writes only pages, and no journal. None if the library has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _found()


# Read and digest a file at the cost of what it stores: blocks of zeros cost nothing if the file system stores none.


BLOCK = 1 << 16
LIKE = "sha256:"
"""Digests of code hash zeros, too (`ContentDigest`)."""
_ZEROS = bytes(BLOCK)


def blocks(descriptor: int, size: int) -> Iterator[Tuple[int, bytes]]:
    """Yield (length of whole blocks of zeros, b"") or (0, the next block), from the beginning of a file up to `size`.

    Blocks lie at multiples of `BLOCK`. Zeros after the last whole block are bytes.
    """
    position = 0
    while position < size:
        block = os.pread(descriptor, min(BLOCK, size - position), position)
        if not block:
            return  # it was cut: its marks tell
        position += len(block)
        if block != _ZEROS:
            yield 0, block
            continue
        data = seek(descriptor, position, os.SEEK_DATA, size) if position < size else size
        skipped = max(position, data - data % BLOCK)
        yield BLOCK + skipped - position, b""
        position = skipped


def seek(descriptor: int, position: int, what: int, size: int) -> int:
    """Return where the next data or hole begins, at most `size`."""
    try:
        return min(os.lseek(descriptor, position, what), size)
    except OSError:
        return size  # no data comes after this


class ContentDigest:
    """The digest of a content that comes as `blocks` yields it.

    It is ``sha256:`` and the content's SHA-256 if no whole block is zeros. Else it is ``sha256-holes:`` and the SHA-256
    of what is left without those blocks, of where they were, and of the size: nobody hashes zeros.

    Args:
        like: the digest to compare with. An older gpurun hashed zeros: if it is a SHA-256, so will this be.
    """

    def __init__(self, like: str = "") -> None:
        self._hashes_zeros = like.startswith("sha256:")
        self._bytes, self._holes = hashlib.sha256(), hashlib.sha256()
        self._zeros = 0
        self._has_holes = False
        self.size = 0

    def add(self, zeros: int, piece: bytes) -> None:
        """Add `zeros` zeros, or a piece."""
        if zeros and self._hashes_zeros:
            for _ in range(zeros // BLOCK):
                self._bytes.update(_ZEROS)
        elif zeros:
            self._zeros += zeros
        else:
            self._end_hole()
            self._bytes.update(piece)
        self.size += zeros + len(piece)

    def _end_hole(self) -> None:
        if self._zeros:
            self._holes.update(b"%d+%d;" % (self.size - self._zeros, self._zeros))
            self._zeros, self._has_holes = 0, True

    def __str__(self) -> str:
        self._end_hole()
        if not self._has_holes:
            return "sha256:" + self._bytes.hexdigest()
        parts = "%s %s %d" % (self._bytes.hexdigest(), self._holes.hexdigest(), self.size)
        return "sha256-holes:" + hashlib.sha256(parts.encode("ascii")).hexdigest()


def digest_of_file(descriptor: int, like: str = "") -> str:
    """Return the `ContentDigest` of a file as it is now."""
    whole = ContentDigest(like)
    for zeros, piece in blocks(descriptor, os.fstat(descriptor).st_size):
        whole.add(zeros, piece)
    return str(whole)


class Entry(NamedTuple):
    """One name of code or of a data set, on the head and on hosts. As JSON, it is a list.

    Attributes:
        path: relative, with ``/``.
        kind: ``file``, ``dir`` or ``link``.
        mode: permission bits; 0 for links.
        size, digest: of a file's content.
        target: of a link, as it is.
    """

    path: str
    kind: str
    mode: int
    mtime_ns: int = 0
    size: int = 0
    digest: str = ""
    target: str = ""


def digest_of(entries: Iterable[Entry]) -> str:
    """Return the digest of a folder's content without times. Folders with the same digest have the same content."""
    told = [[path, kind, mode, digest, target] for path, kind, mode, _, _, digest, target in entries]
    return "sha256:" + hashlib.sha256(json.dumps(sorted(told)).encode("ascii")).hexdigest()


def timed_digest_of(entries: Iterable[Entry]) -> str:
    """Return the digest of a folder's content and times."""
    told = [[path, kind, mode, digest, target, time_ns] for path, kind, mode, time_ns, _, digest, target in entries]
    return "sha256:" + hashlib.sha256(json.dumps(sorted(told)).encode("ascii")).hexdigest()


# The beginning of a file that an interrupted copy has left: it is compared, so that the next copy sends only the
# rest.


class Begun(NamedTuple):
    """The beginning of a file that its reader already has from an interrupted copy.

    Attributes:
        marks: the file's marks at that time.
        size: how many bytes of it are there.
        sha: their `gpurun.node.folder.below.ContentDigest`.
    """

    marks: List[int]
    size: int
    sha: str

    def counted(self) -> bytes:
        """Return the contribution of these bytes to the digest of the whole."""
        return b"from:%d:%s;" % (self.size, self.sha.encode("ascii", "replace"))


def begun(header: Dict[str, Any]) -> Optional[Begun]:
    """Return the beginning that a file's reader says it has; None if it has none, or the header is not valid."""
    marks, size, sha = header.get("marks"), header.get("at"), header.get("sha")
    if not isinstance(marks, list) or type(size) is not int or size <= 0 or not isinstance(sha, str):
        return None
    return Begun(marks, size, sha)
