"""Lock files that no other user can hold.

Everybody who may read a file can hold a read lock on it, and a read lock keeps its owner from the lock. So only the
owner may read such a file.
"""

from __future__ import annotations

import os
import stat

from gpurun.state.path import StatePath, told

OWN = 0o600


def open_own_lock(path: StatePath) -> int:
    """Open a lock file of this user for reading and writing; create it if missing. Idempotent.

    Closes a file of an older version to other users.

    Raises:
        StateError: it cannot be opened.
    """
    descriptor = path.open_file(os.O_RDWR | os.O_CREAT, OWN)
    try:
        if os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.fchmod(descriptor, OWN)
    except OSError as error:
        os.close(descriptor)
        raise told(error, path, "closed to other users") from error
    return descriptor
