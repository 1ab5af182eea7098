"""Where labs keep what they keep.

Disks, keys and logs live in the user's cache and survive a reboot; what is true only while the machine is
up (records of what was made in the kernel) lives under ``/run``, which a reboot empties with the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

RUNTIME = Path("/run/gpurun-lab")


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """gpurun's cache folder: ``$XDG_CACHE_HOME/gpurun``, else ``~/.cache/gpurun``."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "gpurun"


def engine_folder() -> Path:
    """Folder of the head's own Docker engine."""
    return cache() / "engine"


def lab_folder(name: str) -> Path:
    """Folder of one lab: inventory, ssh config, keys, and the hosts' disks."""
    return cache() / "lab" / name
