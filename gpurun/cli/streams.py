"""The standard streams of a command, where they are closed, full, or read no further."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import typer

from gpurun.errors import StateDiskError, StateError, StateUnavailable, words_of

OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EUCLEAN, errno.ESTALE)
"""What only files say. Connections say the rest of `DISK_ERRORS`, too; they name no file."""
STDOUT_LOST = (*OF_FILES, errno.EFBIG)
UNREAD = 1


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed, as by `<&-` or a service manager.

    Stdout of a locale without Unicode prints other characters as escapes, as stderr always does: a job's name is no
    reason to fail. Call this before opening any other file: that file would get the stream's number, and child
    processes would use it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def disk_problem(error: Exception) -> StateDiskError | None:
    """Return the error for people if a disk is full, read-only, broken or away, but not stdout's; else None."""
    from gpurun.state.path import DISK_ERRORS

    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return None
    if error.filename is None and (error.errno not in OF_FILES or _is_on_disk(sys.stdout)):
        return None
    return StateDiskError(
        f"{'a' if error.filename is None else 'the'} file cannot be read or written: {error.strerror}",
        where=None if error.filename is None else str(error.filename),
        hint="`df -h` shows which disk is full: gpurun also writes caches and temporary files. "
        "`dmesg | tail` may show disk errors",
    )  # fmt: skip


def shortage(error: Exception) -> StateUnavailable | None:
    """Return the error for people if this machine is short of descriptors, locks, memory or processes; else None."""
    from gpurun.state.path import DISK_ERRORS, may_pass

    if not may_pass(error) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
        return None
    what = error.strerror if isinstance(error, OSError) else words_of(error)
    where = error.filename if isinstance(error, OSError) else None
    return StateUnavailable(
        f"this machine has too little of a resource: {what}", where=None if where is None else str(where),
        hint="try again; `ulimit -a` shows your limits",
    )  # fmt: skip


def _is_on_disk(stream: TextIO | None) -> bool:
    """Return whether a write to a stream may fail because of a disk."""
    if stream is None:
        return False
    try:
        kind = os.fstat(stream.fileno()).st_mode
        return stat.S_ISREG(kind) or (stat.S_ISCHR(kind) and not stream.isatty())
    except (OSError, ValueError):
        return True


@contextmanager
def output_written() -> Iterator[None]:
    """On leaving, write what stdout still buffers. Exit with 1 if nobody reads it, with 5 if its disk is full.

    Without this, Python writes the buffer as it exits: a failure there is a warning, and exit code 120.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has exited, so nobody reads a message
        sys.stdout = None
        sys.exit(UNREAD)
    except OSError as error:
        if error.filename is not None or error.errno not in STDOUT_LOST:
            raise
        sys.stdout = None
        typer.echo(f"gpurun: cannot write to stdout: {error.strerror}", err=True)
        sys.exit(StateError.exit_code)
