"""Write an environment's folder as the tar of one layer. The same files always give the same bytes."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

MTIME_S = 946_684_800
"""1 January 2000: zip files, which programs make of packages, know no time before 1980."""
_PIECE = 1 << 20
_END = bytes(1024)


def layer_tar(folder: Path, target: str) -> Iterator[bytes]:
    """Yield the tar in pieces: sorted, owned by root, with one time, readable for everybody, without set-ID bits.

    Keeps links. Leaves out sockets, FIFOs and devices.

    Args:
        target: absolute path of the folder in the image; the tar also contains the folders above it.
    """
    above = target.strip("/").split("/")
    for depth in range(1, len(above)):
        yield _header("/".join(above[:depth]), tarfile.DIRTYPE)
    yield from _tree(folder, target.strip("/"))
    yield _END


def _tree(folder: Path, name: str) -> Iterator[bytes]:
    yield _header(name, tarfile.DIRTYPE)
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        path = f"{name}/{entry.name}"
        if stat.S_ISDIR(status.st_mode):
            yield from _tree(folder / entry.name, path)
        elif stat.S_ISLNK(status.st_mode):
            yield _header(path, tarfile.SYMTYPE, target=os.readlink(entry.path))  # noqa: PTH115 - bytes as they are
        elif stat.S_ISREG(status.st_mode):
            yield from _file(folder / entry.name, path, executable=bool(status.st_mode & 0o111))


def _file(path: Path, name: str, *, executable: bool) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = left = os.fstat(descriptor).st_size
        yield _header(name, tarfile.REGTYPE, size=size, mode=0o755 if executable else 0o644)
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise OSError(0, "the file became shorter", str(path))
            left -= len(piece)
            yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)


def _header(name: str, kind: bytes, *, size: int = 0, mode: int = 0o755, target: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode, entry.mtime, entry.linkname = kind, size, mode, MTIME_S, target
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
