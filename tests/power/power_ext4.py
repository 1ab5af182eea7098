"""A real file system whose power is cut: ext4 on a loop device, shut down by the kernel while processes use it.

``EXT4_IOC_SHUTDOWN`` without flushing the log (fs/ext4/ioctl.c) lets nothing more reach the device, as a power cut of a
disk without a cache would. Then the file system is mounted again, which replays its journal.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import power_work

SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
SIZE = "64M"
OPTIONS = ("defaults", "data=writeback,noauto_da_alloc,commit=300")
"""As most people mount it, and as promises least."""
DEADLINE_S = 10.0


NEEDS = "needs root, loop devices and mkfs.ext4: apt-get install e2fsprogs"


def available() -> bool:
    """Whether this machine can do it: root, ext4, a loop device."""
    return os.getuid() == 0 and shutil.which("mkfs.ext4") is not None and Path("/dev/loop-control").exists()


def cut(place: Path, seed: int, after_s: float, options: str) -> None:
    """Work on a new file system, cut it, and leave what is on it as ``place/state`` beside the world."""
    image, mount = place / "image", place / "disk"
    mount.mkdir()
    subprocess.run(["truncate", "-s", SIZE, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    home = mount / "state"
    with mounted(image, mount, options):
        environ = power_work.environ(home, place / "inventory.yaml")
        argv = power_work.argv(home, place / "world", seed, jobs=60)
        work = subprocess.Popen(argv, env=environ, start_new_session=True, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)  # fmt: skip
        _wait_for(place / "world" / "told")
        time.sleep(after_s)
        _shut_down(mount)
        _kill_session(work)
    with mounted(image, mount, "defaults"):
        if home.exists():  # else the cut came before the first command returned
            shutil.copytree(home, place / "state")


@contextmanager
def mounted(image: Path, mount: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-o", f"loop,{options}", str(image), str(mount)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _shut_down(mount: Path) -> None:
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def _kill_session(work: subprocess.Popen[bytes]) -> None:
    """Everybody who was at work, until none is left that has a file open."""
    deadline = time.monotonic() + DEADLINE_S
    work.kill()
    work.wait()
    while time.monotonic() < deadline:
        try:
            os.killpg(work.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise TimeoutError("processes do not end")


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not come")
        time.sleep(0.01)
