"""Write files that are complete or absent after a crash: the only way to write state; and read files that grow."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from gpurun import faults
from gpurun.errors import StateError, StateUnavailable
from gpurun.msgspec_types import ready
from gpurun.node.folder import below
from gpurun.node.folder.below import walk
from gpurun.state import locks
from gpurun.state.paths import StatePath, blame, examined, state_error

# fsync of what lies on a plain path or is open already: folders, and whole trees. Failures are OSErrors.


SYNCED_ONE_BY_ONE = 50
"""200 files of 2 KiB take 100 to 500 ms one by one, and 6 ms together (ext4)."""
EARLY_SYNC_BYTES, SYNC_COST_BYTES = 64 << 20, 16 << 10
"""After so many bytes a sync begins early. Each file counts for so many more: to sync it costs as much."""
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def sync_open_folder(descriptor: int) -> None:
    """fsync an open folder. Raises OSError, unless the file system syncs no folders at all.

    Such a file system answers EINVAL, ENOTSUP or ENOSYS (man 2 fsync). It wrote nothing and lost nothing. Every other
    error says that names may be lost.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise


def sync_tree(top: Path) -> None:
    """fsync every file and folder of a tree of outputs; links are names, and so synced with their folders.

    A tree of many files is synced together with all of its file system: that is one wait.

    Raises:
        OSError: the disk failed, so the tree may not survive a power loss.
    """
    descriptor = below.open_top(str(top))
    try:
        if sum(1 for _ in islice(walk(descriptor), SYNCED_ONE_BY_ONE + 1)) > SYNCED_ONE_BY_ONE:
            sync_file_system(descriptor)
            return
        with below.Cursor(descriptor) as cursor:
            sync_open_folder(descriptor)
            for found in walk(descriptor):
                if found.status is None:
                    sync_file_system(descriptor)  # the modes of some keep even their owner out
                    return
                if stat.S_ISREG(found.status.st_mode):
                    _sync_and_close(below.open_file(found.above, found.parts[-1], force=True))
                elif stat.S_ISDIR(found.status.st_mode):
                    sync_open_folder(cursor.at(found.parts))
    except PermissionError:
        sync_file_system(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(descriptor: int) -> None:
    """Sync the whole file system of an open file or folder. Raises OSError if the disk failed.

    `os.sync` returns before a disk's failure can be told. syncfs says EIO from Linux 5.8 on (man 2 syncfs).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(descriptor):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class EarlySync:
    """Syncs a file system in a thread now and then, while more is written: less is left to wait for at the end.

    Args:
        descriptor: of a file or folder there; it must stay open until `end`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unsynced = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def wrote(self, size: int) -> None:
        """A file of so many bytes was written.

        Raises:
            OSError: the disk failed.
        """
        self._unsynced += SYNC_COST_BYTES + size
        if self._unsynced > EARLY_SYNC_BYTES and (self._thread is None or not self._thread.is_alive()):
            self.end()
            self._unsynced = 0
            self._thread = threading.Thread(target=self._sync, name="early sync", daemon=True)
            self._thread.start()

    def _sync(self) -> None:
        try:
            sync_file_system(self._descriptor)
        except OSError as error:
            self._error = error

    def end(self) -> None:
        """Wait for the running sync. The kernel reports a write error only once, so a later sync may not see it.

        Raises:
            OSError: the disk failed.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def sync_plain_folder(folder: Path) -> None:
    """As `sync_folder`, for a folder outside the state directory. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        sync_open_folder(descriptor)
    finally:
        os.close(descriptor)


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Python's garbage collector, switched off while many values are made that all stay.


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector from looking at a growing heap again and again: a third of the time of a large pass.

    What is dropped meanwhile is freed as ever, by its reference count; only cycles wait.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# The lines of a file that somebody appends to, read piece by piece as it grows.


PIECE_BYTES = 1 << 22


class GrowingFile:
    """Whole lines, each once.

    Attributes:
        offset: where the first line begins that was not read yet.
    """

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.offset = 0

    def lines(self) -> Iterator[bytes]:
        """Lines that came since, without their ends. A line that is not whole yet is left for later. No file: none."""
        while piece := self._piece():
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) < 2 * PIECE_BYTES:
                return
            if not end:  # no line is as long as that: a hole
                self.offset += len(piece)
            for line in piece[:end].split(b"\n")[:-1]:
                self.offset += len(line) + 1  # before the next: a reader that stops here continues there
                yield line

    def _piece(self) -> bytes:
        try:
            with self.path.reader() as stream:
                self.offset = _data_from(stream.fileno(), self.offset)
                stream.seek(self.offset)
                return stream.read(PIECE_BYTES) + stream.readline(PIECE_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise state_error(error, self.path, "read") from error


def _data_from(descriptor: int, offset: int) -> int:
    """Return the offset of the next data: a writer may have freed a part of the file by a hole (man lseek)."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # nothing follows, or the file system does not tell
        return offset


Record = TypeVar("Record")

MAX_STATE_BYTES = 16 * 1024 * 1024
SYNCS_AT_ONCE = 32
LOCK_TRIES = 100


def write_record(path: StatePath, record: object, *, mode: int = 0o644) -> None:
    """Write a dataclass as JSON so that a reader, also after a power loss, sees the old file or the new one.

    Temporary file in the same folder, fsync, rename, fsync of the folder.

    Raises:
        FileNotFoundError: there is no such folder.
        StateError: it cannot be written, or a text in it is no text, such as a path that is not UTF-8.
    """
    write_bytes(path, _encoded(path, record), mode=mode)


def write_locked_record(path: StatePath, record: object, *, mode: int = 0o644, mine: bool = False) -> int:
    """Like `write_record`, and the file is born with its lock held. The caller syncs the folder.

    So an error says that the file has not got its name, and no error loses the descriptor of a file that has it.

    Args:
        mine: the file belongs to this user. Otherwise root leaves it to the owner of the file that it replaces.

    Returns:
        The descriptor that holds the lock. The lock is taken before the file has its name, so no process ever
        sees the file unlocked.
    """
    return _write(path, _encoded(path, record), mode=mode, locked=True, mine=mine)


def write_bytes(path: StatePath, data: bytes, *, mode: int = 0o644, like: os.stat_result | None = None) -> None:
    """Like `write_record`, for bytes.

    Args:
        like: the status of a file whose mode and owner the new one gets, as far as this user may give them.
    """
    folder = path.parent.open_folder()  # first: a process without descriptors then changes nothing
    try:
        os.close(_write(path, data, mode=mode, locked=False, like=like))
    except BaseException:
        os.close(folder)
        raise
    _apply(sync_open_folder, folder, path.parent, "synced")


def _encoded(path: StatePath, record: object) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    except UnicodeEncodeError as error:
        raise StateError(f"the file cannot be written: {error.object!r} is not UTF-8", where=str(path)) from error


def _write(
    path: StatePath, data: bytes, *, mode: int, locked: bool, mine: bool = False, like: os.stat_result | None = None
) -> int:
    temporary, descriptor = _new_file(path, mode, locked=locked)
    try:
        _fill(descriptor, path, data, mine=mine)
        if like is not None:
            make_like(descriptor, like)
        faults.point()
        temporary.rename(path)
        faults.point()
    except BaseException:
        os.close(descriptor)
        with suppress(StateError):
            temporary.unlink(missing_ok=True)
        raise
    return descriptor


def _new_file(path: StatePath, mode: int, *, locked: bool) -> tuple[StatePath, int]:
    """Make the temporary file of a writer; with `locked`, take its lock.

    Other users may read the file, so one of them can read-lock it before this process does. Then another file takes its
    place.
    """
    for _ in range(LOCK_TRIES):
        temporary = path.sibling(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        descriptor = temporary.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        is_ready = False
        try:
            is_ready = not locked or locks.try_take(descriptor)
        except OSError as error:
            raise state_error(error, path, "locked") from error
        finally:
            if not is_ready:
                os.close(descriptor)
                temporary.unlink(missing_ok=True)
        if is_ready:
            return temporary, descriptor
    raise StateUnavailable(
        "gpurun cannot write the file: another user's process locks each temporary file that gpurun creates",
        where=str(path),
        hint=f"run `fuser -v {path.parent}` as root to find the process",
    )  # fmt: skip


def write_unsynced(path: StatePath, record: object, *, mode: int = 0o644) -> None:
    """Write a new file in a folder that nobody reads yet. `sync_all` makes it durable.

    Raises:
        StateError: as `write_record`.
    """
    descriptor = path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        write_all(descriptor, _encoded(path, record))
    except OSError as error:
        raise state_error(error, path, "written") from error
    finally:
        os.close(descriptor)


def sync_all(*, files: Iterable[StatePath], folders: Iterable[StatePath]) -> None:
    """fsync many files and folders, in no order, several at a time: file systems commit them together.

    Raises:
        FileNotFoundError, StateError: the first failure. The rest need not be synced then.
    """
    wanted = [*((path, False) for path in files), *((path, True) for path in folders)]
    todo, drawing = iter(wanted), threading.Lock()
    failures: list[Exception] = []

    def work() -> None:
        while not failures:
            with drawing:
                path, is_folder = next(todo, (None, False))
            if path is None:
                return
            try:
                opened = path.open_folder() if is_folder else path.open_file(os.O_RDONLY)
                _apply(sync_open_folder if is_folder else os.fsync, opened, path, "synced")
            except (FileNotFoundError, StateError) as error:
                failures.append(error)

    threads = list[threading.Thread]()
    with suppress(RuntimeError):  # no thread can start just now: fewer do all of it
        for _ in range(min(SYNCS_AT_ONCE, len(wanted)) - 1):
            thread = threading.Thread(target=work)
            thread.start()
            threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _fill(descriptor: int, path: StatePath, data: bytes, *, mine: bool) -> None:
    """Write all of a new file and sync it. As root, let it belong to the owner of the file that it replaces."""
    try:
        if os.geteuid() == 0 and not mine:
            with suppress(FileNotFoundError):
                os.fchown(descriptor, path.stat().st_uid, -1)
        write_all(descriptor, data)
        os.fsync(descriptor)
    except OSError as error:
        raise state_error(error, path, "written") from error


def make_like(descriptor: int, status: os.stat_result) -> None:
    """Give an open file the mode, the group and, as root, the owner of another one."""
    for uid in (status.st_uid, -1):  # only root gives files away; their group is for its members to give
        with suppress(PermissionError):
            os.fchown(descriptor, uid, status.st_gid)
            break
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def write_all(descriptor: int, data: bytes, position: int | None = None) -> None:
    """Write all of it, at the file's own position or at another one. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view) if position is None else os.pwrite(descriptor, view, position)
        view, position = view[written:], None if position is None else position + written


def append_line(path: StatePath, line: str, *, mode: int = 0o644) -> None:
    """Append a line to a file of lines, in one write and unsynced: of several processes, lines never mix.

    What a power loss has left of a last line, torn or zeros, stays a line of its own. A line that another process is
    writing just now may look torn: then an empty line parts the two.

    Raises:
        StateError: it is not a file, or cannot be written whole.
    """
    descriptor = path.open_file(os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
    try:
        size = os.fstat(descriptor).st_size
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
        data = f"{chr(10) if torn else ''}{line}\n".encode()
        if os.write(descriptor, data) < len(data):  # the rest would not be the same write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise state_error(error, path, "written") from error
    finally:
        os.close(descriptor)


def remove_file(path: StatePath) -> None:
    """Unlink `path` for good: gone after a power loss too. Absent is fine."""
    faults.point()
    path.unlink(missing_ok=True)
    faults.point()
    sync_folder(path.parent)


def set_aside(path: StatePath) -> StatePath:
    """Rename a damaged file or folder, so that its place is free; return the new name. gpurun never deletes
    evidence.
    """
    aside = path.sibling(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def sync_folder(folder: StatePath) -> None:
    """fsync a folder, so that names created in or removed from it stay so.

    Raises:
        StateError: the folder cannot be opened, or the disk failed.
    """
    _apply(sync_open_folder, folder.open_folder(), folder, "synced")


def touch_folder(folder: StatePath) -> None:
    """Give a folder a new time of change, as a change of what is in it does."""
    _apply(os.utime, folder.open_folder(), folder, "touched")


def _apply(act: Callable[[int], None], descriptor: int, path: StatePath, done: str) -> None:
    """Do something to an open file or folder, and close it."""
    try:
        act(descriptor)
    except OSError as error:
        raise state_error(error, path, done) from error
    finally:
        os.close(descriptor)


def sync_file(path: StatePath) -> None:
    """fsync a file that was appended to, and its folder.

    If the path is absent or not a file, there is nothing to sync, because gpurun appends only to files.

    Raises:
        StateError: the disk failed, so the last lines may be lost.
    """
    try:
        descriptor = path.open_file(os.O_RDONLY)
    except FileNotFoundError:
        return
    except StateUnavailable:
        raise
    except StateError:
        return
    _apply(os.fsync, descriptor, path, "synced")
    sync_folder(path.parent)


def make_folder(folder: StatePath) -> None:
    """Create a folder and those above it, durably. Does nothing if it exists.

    If it exists, another process may have made it without a sync, or been killed before. gpurun puts nothing into a
    folder before the folder's own name is durable, so a folder with content is durable.

    Raises:
        StateError: it cannot be created, or something else has its name.
    """
    if not folder.parts:
        make_home(folder.home)
        return
    try:
        if folder.names():
            return
    except FileNotFoundError:
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir()
        folder.names()  # else something that is no folder has the name
    try:
        sync_folder(folder.parent)
    except StateError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        # The folder above is somebody else's, who lets us through, not in: its owner synced it.


def make_home(home: Path) -> None:
    """Make the state directory itself and the folders above it, as `make_folder` does.

    Raises:
        StateError: it cannot be made.
    """
    try:
        _make_plain(home)
    except OSError as error:
        failure = state_error(error, StatePath(home), "made")
        failure.hint = failure.hint or "set GPURUN_HOME to a folder on a local disk that you may write"
        raise failure from error


def _make_plain(folder: Path) -> None:
    if _has_entries(folder):
        return
    _make_plain(folder.parent)
    folder.mkdir(0o755, exist_ok=True)
    with suppress(PermissionError):
        sync_plain_folder(folder.parent)


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except PermissionError:
        return folder.is_dir()


def read_record(path: StatePath, kind: type[Record]) -> Record:
    """Read a file that `write_record` wrote, as the dataclass `kind`.

    Raises:
        FileNotFoundError: there is none.
        StateError: it is there but unreadable, too large, not JSON, not a `kind`, or has a number beyond 64 bits.
    """
    return read_signed(path, kind)[0]


def read_signed(path: StatePath, kind: type[Record], *, linked: bool = False) -> tuple[Record, int | None]:
    """Like `read_record`; and the uid of the only user who can have written it, None if several can.

    Root can always. A file that its group or everybody may write is nobody's word.

    Args:
        linked: as for `StatePath.open_file`.
    """
    with path.reader(linked=linked) as stream:
        found = examined(stream.fileno(), path)
        try:
            data = stream.read(MAX_STATE_BYTES + 1)
        except OSError as error:
            raise state_error(error, path, "read") from error
    if len(data) > MAX_STATE_BYTES:
        raise StateError(f"the file is larger than any state file that gpurun writes{blame(found)}", where=str(path))
    try:
        record = msgspec.json.decode(data, type=ready(kind))
        msgspec.msgpack.encode(record)  # refuses numbers beyond 64 bits, which no index of records could keep
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise StateError(f"the file is not a valid {kind.__name__}: {error}{blame(found)}", where=str(path)) from error
    return record, None if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else found.st_uid
