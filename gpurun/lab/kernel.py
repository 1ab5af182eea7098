"""The few system calls a lab needs that Python's ``os`` does not have: mount, umount, pivot_root, prctl."""

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
    """mount(2).

    Raises:
        OSError: with the target as its file name.
    """
    result = _LIBC.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(int(flags)), data.encode()
    )
    _check(result, target)


def bind(source: str | Path, target: str | Path, *, recursive: bool = False) -> None:
    """Make the tree at `source` appear at `target` too."""
    mount(source, target, flags=MountFlag.BIND | (MountFlag.REC if recursive else MountFlag.NONE))


def unmount_lazily(target: str | Path) -> None:
    """umount2(2) with MNT_DETACH: gone from the tree now, freed when the last user leaves."""
    _check(_LIBC.umount2(os.fsencode(target), _MNT_DETACH), target)


def make_root(new_root: Path) -> None:
    """Make the mount point `new_root` this process's ``/`` and let go of the old one.

    pivot_root(".", ".") stacks the old root on the new one, so one lazy unmount lets go of it: pivot_root(2),
    "pivot_root(., .)". The mount namespace must be private to the caller.
    """
    os.chdir(new_root)
    _check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), new_root)
    unmount_lazily(".")
    os.chdir("/")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends: prctl(2), PR_SET_PDEATHSIG."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _check(result: int, target: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
