"""fsync of what lies on a plain path or is open already: folders, and whole trees. Failures are OSErrors.

`gpurun.state.durable` syncs what has a `StatePath`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from itertools import islice
from pathlib import Path

from gpurun.node.folder import below
from gpurun.node.folder.walk import walk

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
