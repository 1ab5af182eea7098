"""The folders of labs.

Disks, keys and logs are in the user's cache folder and survive a reboot. Records of kernel objects are below ``/run``,
because a reboot removes both the objects and the records.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpurun.errors import BadInput

_UNUSABLE = frozenset(',"\n\r')
RUNTIME = Path("/run/gpurun-lab")


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return gpurun's cache folder: ``$XDG_CACHE_HOME/gpurun``, otherwise ``~/.cache/gpurun``."""
    base = environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "gpurun"
    if _UNUSABLE & set(str(folder)):
        raise BadInput(
            f"Docker and OpenSSH cannot use a folder with a comma, a double quote or a line break: {str(folder)!r}",
            hint="set XDG_CACHE_HOME to another folder",
        )
    return folder


def engine_folder() -> Path:
    """Return the folder of the head's own Docker engine."""
    return cache() / "engine"


def lab_folder(name: str) -> Path:
    """Return the folder of one lab: inventory, ssh configuration, keys, and the hosts' disks."""
    return cache() / "lab" / name


@dataclass(frozen=True)
class HostFolder:
    """The folder of one host, ``LAB/hosts/HOST``: its disk and key stay when the host is off."""

    path: Path

    @property
    def disk(self) -> Path:
        """The host's disk, or the mount point of its image."""
        return self.path / "disk"

    @property
    def image(self) -> Path:
        """The host's disk as one file, if the disk has a size."""
        return self.path / "disk.img"

    @property
    def hardware(self) -> Path:
        """``/run/gpurun-lab`` of the host: GPUs, sysfs, kernel log."""
        return self.path / "hardware"

    @property
    def key(self) -> Path:
        """Private host key."""
        return self.path / "ssh_host_ed25519_key"

    @property
    def boot_file(self) -> Path:
        """The instructions for its process 1."""
        return self.path / "boot.json"

    @property
    def log(self) -> Path:
        """The output of its process 1; the services' logs are on its disk, in /var/log."""
        return self.path / "init.log"
