"""Signs by which hosts see that they have one folder, whatever its file system calls itself.

Each probe makes an empty file whose name nobody can guess, then lists such files. If hosts with one folder do so at the
same moment, the last one to make its file sees those of all others.
"""

import os
from typing import List, Tuple

FOLDER = "signs"
STALE_S = 3600.0
"""Hosts that are probed together make their signs within a minute."""


def show(folder: str) -> Tuple[str, List[str]]:
    """Make a new sign in gpurun's folder; return it, and all that are there.

    Removes old ones, by the file system's clock: those of hosts may differ.
    """
    place = os.path.join(folder, FOLDER)
    os.makedirs(place, mode=0o700, exist_ok=True)
    mine = os.urandom(16).hex()
    path = os.path.join(place, mine)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    made_s = os.stat(path).st_mtime
    for name in set(seen(folder)) - {mine}:
        other = os.path.join(place, name)
        try:
            if made_s - os.lstat(other).st_mtime > STALE_S:
                os.unlink(other)
        except OSError:  # another host has removed it, or it is no sign
            continue
    return mine, seen(folder)


def seen(folder: str) -> List[str]:
    """Return the signs in gpurun's folder, sorted."""
    try:
        return sorted(os.listdir(os.path.join(folder, FOLDER)))
    except FileNotFoundError:
        return []
