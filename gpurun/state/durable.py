"""Files that are whole or absent, whatever crashes: the only way state is written."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from gpurun import faults
from gpurun.errors import StateError

Record = TypeVar("Record")

MAX_STATE_BYTES = 16 * 1024 * 1024


def write_record(path: Path, record: object, *, mode: int = 0o644) -> None:
    """Write a dataclass as JSON so that a reader, also after a power loss, sees the old file or the new one.

    Temporary file in the same folder, fsync, rename, fsync of the folder. OSErrors pass through.

    Raises:
        StateError: a text in it is no text, such as a path that is not UTF-8.
    """
    write_bytes(path, _encoded(path, record), mode=mode)


def write_locked_record(path: Path, record: object, *, mode: int = 0o644) -> int:
    """Like `write_record`, and the file is born with an exclusive flock on it.

    Returns:
        The descriptor that holds the lock. The lock is taken before the file has its name, so nobody ever
        sees the file unlocked.
    """
    descriptor = _write(path, _encoded(path, record), mode=mode, lock=True)
    sync_folder(path.parent)
    return descriptor


def is_locked(descriptor: int) -> bool:
    """Whether somebody holds an exclusive flock on a file. Only looks: a shared one, gone when the file is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Like `write_record`, for bytes."""
    os.close(_write(path, data, mode=mode, lock=False))
    sync_folder(path.parent)


def _encoded(path: Path, record: object) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    except UnicodeEncodeError as error:
        raise StateError(f"cannot be written: {error.object!r} is not UTF-8", where=str(path)) from error


def _write(path: Path, data: bytes, *, mode: int, lock: bool) -> int:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        if lock:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        faults.point()
        temporary.replace(path)
        faults.point()
    except BaseException:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return descriptor


def append_line(path: Path, line: str, *, mode: int = 0o644) -> None:
    """Append a line to a file of lines, in one write and unsynced: of several processes, lines never mix.

    What a power loss has left of a last line, torn or zeros, stays a line of its own. A line that another process is
    writing just now may look torn: then an empty line parts the two.

    Raises:
        StateError: it is not a file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StateError("is not a regular file", where=str(path))
        torn = found.st_size and os.pread(descriptor, 1, found.st_size - 1) != b"\n"
        os.write(descriptor, f"{chr(10) if torn else ''}{line}\n".encode())
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Unlink `path` for good: gone after a power loss too. Absent is fine."""
    faults.point()
    path.unlink(missing_ok=True)
    faults.point()
    sync_folder(path.parent)


def set_aside(path: Path) -> Path:
    """Rename what is damaged, whatever it is, so that its place is free; its name then. Evidence is never deleted."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that names created in or removed from it stay so."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file that was appended to, and its folder: what is in it by now stays. One that is none has nothing."""
    with suppress(FileNotFoundError, StateError), opened(path) as stream:
        os.fsync(stream.fileno())
        sync_folder(path.parent)


def sync_tree(top: Path) -> None:
    """fsync every file and folder of a tree; links are names, and so synced with their folders."""
    try:
        for folder, _, names in os.walk(top, onerror=_raise):
            for name in names:
                path = Path(folder, name)
                if stat.S_ISREG(path.lstat().st_mode):
                    _sync(path, os.O_NONBLOCK)
            sync_folder(Path(folder))
    except PermissionError:  # modes may keep even their owner out
        os.sync()


def _raise(error: OSError) -> None:
    raise error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, there after a power loss too. Present is fine.

    One that is present may have been made by somebody who has not synced it yet, or was killed before. Nothing is put
    in a folder before its own name is durable: what has something in it needs no more.
    """
    if not _has_entries(folder):
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # the folder above is somebody else's, who lets us through, not in
            sync_folder(folder.parent)


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except PermissionError:
        return folder.is_dir()


def opened(path: Path) -> BinaryIO:
    """A state file, open for reading. Never waits: in its place may lie a pipe that nobody writes to.

    Raises:
        FileNotFoundError: there is none.
        StateError: it cannot be read, or is not a file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateError("is not a regular file", where=str(path))
    return os.fdopen(descriptor, "rb")


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a file that `write_record` wrote, as the dataclass `kind`.

    Raises:
        FileNotFoundError: there is none.
        StateError: it is there but unreadable, too large, not JSON, or not a `kind`.
    """
    with opened(path) as stream:
        try:
            data = stream.read(MAX_STATE_BYTES + 1)
        except OSError as error:
            raise StateError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(data) > MAX_STATE_BYTES:
        raise StateError("is larger than any state file gpurun writes", where=str(path))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"is not a valid {kind.__name__}: {error}", where=str(path)) from error
