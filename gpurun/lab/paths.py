"""Where labs keep what they keep.

Disks, keys and logs live in the user's cache and survive a reboot; what is true only while the machine is
up (records of what was made in the kernel) lives under ``/run``, which a reboot empties with the kernel.
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
    """gpurun's cache folder: ``$XDG_CACHE_HOME/gpurun``, else ``~/.cache/gpurun``."""
    base = environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "gpurun"
    if _UNUSABLE & set(str(folder)):
        raise BadInput(
            f"Docker and OpenSSH cannot use a folder with a comma, a double quote or a line break: {str(folder)!r}",
            hint="set XDG_CACHE_HOME to another folder",
        )
    return folder


def engine_folder() -> Path:
    """Folder of the head's own Docker engine."""
    return cache() / "engine"


def lab_folder(name: str) -> Path:
    """Folder of one lab: inventory, ssh config, keys, and the hosts' disks."""
    return cache() / "lab" / name


@dataclass(frozen=True)
class HostFolder:
    """What a lab keeps of one host, ``LAB/hosts/HOST``: its disk and key stay when it is switched off."""

    path: Path

    @property
    def disk(self) -> Path:
        """The host's disk, or where its image is mounted."""
        return self.path / "disk"

    @property
    def image(self) -> Path:
        """The host's disk as one file, where it has a size."""
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
        """What its process 1 is told."""
        return self.path / "boot.json"

    @property
    def log(self) -> Path:
        """What its process 1 says; the services' logs are on its disk, in /var/log."""
        return self.path / "init.log"
