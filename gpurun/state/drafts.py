"""New folders of the state directory, which appear whole or not at all.

A process fills a draft, a folder ``.new-XXXXXXXX``, and then renames it. It holds the lock of ``.new-XXXXXXXX.lock``
from before the draft exists until the draft is gone. So a draft whose lock is free was left by a dead process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpurun import faults
from gpurun.errors import StateError
from gpurun.state import lock
from gpurun.state.own_lock import OWN
from gpurun.state.path import StatePath

PREFIX, LOCK = ".new-", ".lock"


@contextmanager
def new_folder(parent: StatePath) -> Iterator[StatePath]:
    """Give an empty folder in `parent`, to fill and to rename; remove it if it is still there afterwards.

    First removes drafts that this user's dead processes left there.

    Raises:
        StateError: it cannot be made, for example because the disk is full.
    """
    _remove_abandoned(parent)
    path, descriptor = _locked_name(parent)
    draft = path.sibling(path.name.removesuffix(LOCK))
    try:
        faults.point()
        draft.mkdir(0o755)
        yield draft
    finally:
        with suppress(StateError):  # the next process that makes a draft removes what stays
            _remove(draft, path)
        os.close(descriptor)


def _locked_name(parent: StatePath) -> tuple[StatePath, int]:
    """Make a lock file of a new name; return it, and the descriptor that holds its lock."""
    while True:
        path = parent / f"{PREFIX}{secrets.token_hex(4)}{LOCK}"
        descriptor = path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN)
        try:
            if lock.try_take(descriptor) and _is_still(path, descriptor):
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process took this file for an abandoned one, before its lock was held


def _is_still(path: StatePath, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_abandoned(parent: StatePath) -> None:
    for name in {name.removesuffix(LOCK) for name in parent.names() if name.startswith(PREFIX)}:
        with suppress(OSError, StateError):  # not what gpurun made, or gone meanwhile
            _remove_if_abandoned(parent / name, parent / f"{name}{LOCK}")


def _remove_if_abandoned(draft: StatePath, path: StatePath) -> None:
    if not _is_mine(draft) or not _is_mine(path):
        return
    try:
        descriptor = path.open_file(os.O_WRONLY)
    except FileNotFoundError:
        _remove(draft, path)
        return
    try:
        if lock.try_take(descriptor):
            _remove(draft, path)
    finally:
        os.close(descriptor)


def _is_mine(path: StatePath) -> bool:
    """Return whether the name is free or this user's own."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return True


def _remove(draft: StatePath, path: StatePath) -> None:
    with suppress(FileNotFoundError):
        draft.rmtree()
    path.unlink(missing_ok=True)
