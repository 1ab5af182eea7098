"""Write a file that a user owns: one writer at a time; a crash leaves the old file or the new file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpurun.errors import BadInput, StateUnavailable
from gpurun.state import durable, lock
from gpurun.state.syncing import sync_plain_folder

_STALE, _LOCK = ".gpurun-", ".gpurun.lock"
PATIENCE_S = 60.0
"""Another change may check many leases. Everybody who may write in the folder can hold the lock."""


@contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Hold the lock for changes of a file; yields the file behind any symbolic links.

    The lock is on a hidden file in the same folder, because the writer replaces the file itself. The hidden file is
    removed afterwards, and so are the files of a writer that crashed.

    Raises:
        BadInput: the folder does not exist, or is not writable.
        StateUnavailable: somebody has held the lock for longer than `PATIENCE_S`.
    """
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{real.name}{_LOCK}")
    with ExitStack() as stack:
        try:
            stack.enter_context(lock.alone(beside, mode=0o666, remove=True, patience_s=PATIENCE_S))
        except TimeoutError as error:
            raise StateUnavailable(
                f"gpurun cannot change the file: {error.strerror}", where=str(path),
                hint=f"run `fuser -v {beside}` as root to find the process that holds the lock. "
                "Kill the process, or resume the process if it is stopped (state T)",
            ) from error  # fmt: skip
        except OSError as error:
            raise BadInput(f"gpurun cannot change the file: {error.strerror}", where=str(path)) from error
        for left in real.parent.glob(f".{_escaped(real.name)}{_STALE}*"):
            with suppress(OSError):
                left.unlink()
        yield real


def replace(path: Path, data: bytes) -> None:
    """Replace a file's content: complete, durable, with the same permissions and owner.

    Raises BadInput if the file cannot be written; then it is unchanged.
    """
    temporary = path.with_name(f".{path.name}{_STALE}{secrets.token_hex(8)}")
    try:
        _write_new(temporary, data, path)
        temporary.replace(path)
        sync_plain_folder(path.parent)
    except OSError as error:
        raise BadInput(f"gpurun cannot write the file: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_new(temporary: Path, data: bytes, path: Path) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with suppress(FileNotFoundError):
            durable.make_like(descriptor, path.stat())
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
