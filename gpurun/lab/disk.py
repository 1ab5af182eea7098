"""A host's disk: a folder of the machine's file system, or an ext4 image where it has a size of its own."""

from __future__ import annotations

from gpurun.lab.commands import run
from gpurun.lab.paths import HostFolder


def make(place: HostFolder, size_mib: int | None) -> None:
    """Make the disk unless there is one: what is on it survives everything but ``down --purge``."""
    place.disk.mkdir(parents=True, exist_ok=True)
    if size_mib and not place.image.exists():
        draft = place.image.with_suffix(".draft")
        run(["mkfs.ext4", "-q", "-F", str(draft), f"{size_mib}M"])
        draft.rename(place.image)
