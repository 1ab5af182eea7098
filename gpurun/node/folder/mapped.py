"""Detect changes of files that a program changes through a mapping, whose times are less reliable.

The kernel gives a mapped file a new time when a program first writes to a page, but not for later writes to it
(mmap(2)). After the kernel has written the page to the disk, the next change gives the file a new time again.
"""

import ctypes
import errno
import os
from typing import Any, Iterator

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
