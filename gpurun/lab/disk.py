"""A host's disk: a folder in the machine's file system, or an ext4 image if the disk has a size."""

from __future__ import annotations

import time
from pathlib import Path

from gpurun.lab.commands import run
from gpurun.lab.errors import LabFailed
from gpurun.lab.paths import HostFolder

_UNMOUNT_TIMEOUT_S = 10.0


def make(place: HostFolder, size_mib: int | None) -> None:
    """Create the disk if there is none. Its content survives everything except ``down --purge``."""
    place.disk.mkdir(parents=True, exist_ok=True)
    if size_mib and not place.image.exists():
        draft = place.image.with_suffix(".draft")
        run(["mkfs.ext4", "-q", "-F", str(draft), f"{size_mib}M"])
        draft.rename(place.image)


def wait_unmounted(place: HostFolder) -> None:
    """Wait until the kernel releases the image. It unmounts the image shortly after the last process has ended.

    Raises:
        LabFailed: the image is still mounted; then the caller must not mount it again.
    """
    deadline = time.monotonic() + _UNMOUNT_TIMEOUT_S
    while _is_attached(place.image):
        if time.monotonic() > deadline:
            raise LabFailed(
                f"the kernel has not released the disk image {place.image} yet", hint="try again in a moment"
            )
        time.sleep(0.02)


def _is_attached(image: Path) -> bool:
    """Return True if a loop device uses this file (sysfs: ``block/loopN/loop/backing_file``)."""
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if entry.read_text().rstrip("\n") == str(image):
                return True
        except OSError:
            continue
    return False
