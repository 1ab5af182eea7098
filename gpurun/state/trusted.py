"""Check whether only root can change a file. Root acts only on such a file, even if another user named it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def not_only_root_s(path: Path) -> Path | None:
    """Return the first part of a path that users other than root can change or replace; None if there is none.

    Links are followed, and each folder above the file is checked. In a sticky folder, such as ``/tmp``, only the owner
    of a file can replace it. A part that cannot be examined is not root's alone.
    """
    try:
        real = path.resolve(strict=True)
        for part in (*reversed(real.parents), real):
            found = part.stat()
            shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_uid != 0 or (shared and not sticky):
                return part
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a loop of links
        return path
    return None


def only_root_s(paths: str) -> str:
    """The entries of a search path, such as ``PYTHONPATH``, that only root can change."""
    parts = (Path(part) for part in paths.split(os.pathsep))
    return os.pathsep.join(str(part) for part in parts if part.is_absolute() and not_only_root_s(part) is None)
