"""System calls that a lab needs and Python's ``os`` lacks: mount, umount, pivot_root, prctl."""

from __future__ import annotations

import ctypes
import os
import signal
from enum import IntFlag
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1


class MountFlag(IntFlag):
    """Flags of mount(2), by their names in ``<sys/mount.h>``."""

    NONE = 0
    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    REMOUNT = 32
    BIND = 4096
    REC = 16384
    PRIVATE = 1 << 18
    SLAVE = 1 << 19


def mount(
    source: str | Path, target: str | Path, kind: str = "", flags: MountFlag = MountFlag.NONE, data: str = ""
) -> None:
    """Call mount(2).

    Raises:
        OSError: its file name is the target.
    """
    result = _LIBC.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(int(flags)), data.encode()
    )
    _check(result, target)


def bind(source: str | Path, target: str | Path, *, recursive: bool = False) -> None:
    """Mount the tree at `source` also at `target`."""
    mount(source, target, flags=MountFlag.BIND | (MountFlag.REC if recursive else MountFlag.NONE))


def unmount_lazily(target: str | Path) -> None:
    """Call umount2(2) with MNT_DETACH: removes the mount immediately, and frees it when its last user ends."""
    _check(_LIBC.umount2(os.fsencode(target), _MNT_DETACH), target)


def make_root(new_root: Path) -> None:
    """Make the mount point `new_root` this process's ``/`` and release the old one.

    pivot_root(".", ".") stacks the old root on the new one, so that one lazy unmount releases it: pivot_root(2),
    "pivot_root(., .)". The mount namespace must be private to the caller.
    """
    os.chdir(new_root)
    _check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), new_root)
    unmount_lazily(".")
    os.chdir("/")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends: prctl(2), PR_SET_PDEATHSIG."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _check(result: int, target: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
