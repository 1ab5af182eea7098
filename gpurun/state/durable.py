"""Write files that are complete or absent after a crash: the only way to write state."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from gpurun import faults
from gpurun.errors import StateError, StateUnavailable
from gpurun.msgspec_types import ready
from gpurun.state import lock
from gpurun.state.path import StatePath, blame, examined, told
from gpurun.state.syncing import sync_open_folder, sync_plain_folder

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
            is_ready = not locked or lock.try_take(descriptor)
        except OSError as error:
            raise told(error, path, "locked") from error
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
        raise told(error, path, "written") from error
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
        raise told(error, path, "written") from error


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
        raise told(error, path, "written") from error
    finally:
        os.close(descriptor)


def remove(path: StatePath) -> None:
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
        raise told(error, path, done) from error
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
        failure = told(error, StatePath(home), "made")
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
            raise told(error, path, "read") from error
    if len(data) > MAX_STATE_BYTES:
        raise StateError(f"the file is larger than any state file that gpurun writes{blame(found)}", where=str(path))
    try:
        record = msgspec.json.decode(data, type=ready(kind))
        msgspec.msgpack.encode(record)  # refuses numbers beyond 64 bits, which no index of records could keep
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise StateError(f"the file is not a valid {kind.__name__}: {error}{blame(found)}", where=str(path)) from error
    return record, None if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else found.st_uid
