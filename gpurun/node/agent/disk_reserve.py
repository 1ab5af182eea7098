"""The reserve of a disk that gpurun leaves free, because on a full disk no job can record its end."""

import os
from typing import Tuple

RESERVE_SHARE = 20
RESERVE_LEAST_BYTES, RESERVE_MOST_BYTES = 1 << 30, 20 << 30
SMALL_DISK_SHARE = 4


def reserve_of(disk_bytes: int) -> int:
    """Return the reserve of a disk: 5 %, at least 1 GiB and at most 20 GiB; of a small disk at most a quarter."""
    usual = min(max(disk_bytes // RESERVE_SHARE, RESERVE_LEAST_BYTES), RESERVE_MOST_BYTES)
    return min(usual, disk_bytes // SMALL_DISK_SHARE)


def disk_of(top: int) -> Tuple[int, int]:
    """Return (bytes free for this user, total bytes) of the disk of an open folder."""
    found = os.fstatvfs(top)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
