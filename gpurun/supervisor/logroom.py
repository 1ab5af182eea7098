"""Keep a job's log within its ``log_limit``: its beginning and its end stay, and what is between is said to be gone.

The middle becomes a hole in the file (man fallocate): all offsets stay, so whoever reads the log while it grows can
continue. A line before the hole says how much is missing. Where a file system makes no holes, such as NFS before 4.2,
the file ends with its beginning, and a job's last lines are added when its log is closed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

from gpurun.state import durable

LEAST_BYTES = 64 << 20
"""No limit is smaller: a log's end holds what a supervisor needs that continues it."""
BLOCK_BYTES = 4096
HELD_BYTES = 1 << 20
"""How much of the end is kept in memory where the file system makes no holes."""
TRIES_PER_LIMIT = 16
"""If a hole fails for a reason that may pass, the next try comes after the log has grown by this part of its limit."""
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS)
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE (linux/falloc.h)


class LogRoom:
    """The part of a log that is gone.

    Args:
        limit: bytes; None = no limit.
        note: makes a line, without its end, that says that so many bytes are gone.

    Attributes:
        kept: where the log's beginning ends; 0 = the log is no longer than its beginning yet.
        gone: where its end begins; 0 = nothing is gone.
    """

    def __init__(self, limit: int | None, note: Callable[[int], bytes]) -> None:
        self._limit = None if limit is None else max(limit, LEAST_BYTES)
        self._note = note
        self.kept = self.gone = 0
        self._held: bytearray | None = None
        self._lost = self._next = 0

    @property
    def is_holding(self) -> bool:
        """Return whether lines are not written any more but held."""
        return self._held is not None

    def made(self, size: int, open_file: Callable[[], int]) -> None:
        """Make room after the file has grown to `size`, which is the end of a line.

        Args:
            open_file: opens the file to read and write at any offset.

        Raises:
            OSError: the file cannot be written.
        """
        if self._limit is None or size < self._limit // 2 or size < self._next:
            return
        self.kept = self.kept or size
        begin = -(-(self.kept + BLOCK_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
        if size - max(0, self.gone - begin) <= self._limit:
            return
        end = (size - self._limit // 4) // BLOCK_BYTES * BLOCK_BYTES
        if end <= max(begin, self.gone):
            return
        descriptor = open_file()
        try:
            try:
                _make_hole(descriptor, begin, end)
            except OSError as error:
                if error.errno in _NO_HOLES:
                    self._held = bytearray()
                else:  # such as a full disk: it may pass, and until then the log is written
                    self._next = size + self._limit // TRIES_PER_LIMIT
                return
            whole = _to_line(descriptor, end, size)
            note = _filled(self._note(whole - self.kept), begin - self.kept)
            durable.write_all(descriptor, note, self.kept)
            self.gone = end
        finally:
            os.close(descriptor)

    def hold(self, data: bytes) -> None:
        """Keep lines for `rest`, as many as `HELD_BYTES` are."""
        assert self._held is not None
        self._held += data
        if len(self._held) > 2 * HELD_BYTES:
            cut = self._held.find(b"\n", len(self._held) - HELD_BYTES) + 1 or len(self._held)
            del self._held[:cut]
            self._lost += cut

    def rest(self) -> bytes:
        """Return the lines that were held, with a line about those that are gone. The next call returns nothing."""
        held, self._held = self._held, None
        if not held:
            return b""
        return (self._note(self._lost) + b"\n" if self._lost else b"") + bytes(held)


def _make_hole(descriptor: int, begin: int, end: int) -> None:
    """Give back the blocks of a part of the file. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin)) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _to_line(descriptor: int, offset: int, size: int) -> int:
    """Replace the rest of the line at `offset` by empty lines; return where the next line begins."""
    at = offset
    while at < size:
        piece = os.pread(descriptor, 1 << 16, at)
        cut = piece.find(b"\n")
        used = cut + 1 if cut >= 0 else len(piece)
        durable.write_all(descriptor, b"\n" * used, at)
        at += used
        if cut >= 0 or not piece:
            break
    return at


def _filled(line: bytes, length: int) -> bytes:
    """Return the line with empty lines up to `length`."""
    return line[: length - 1] + b"\n" * (length - min(len(line), length - 1))
