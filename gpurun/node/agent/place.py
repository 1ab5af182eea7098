"""The folder for gpurun's files on this host: below the user's home, or on a disk that no other host shares.

Home folders on NFS are the same on every host. One host's fence would remove another host's files, and an engine that
runs as root could not read them (root-squash).
"""

import os
import re
import stat
from typing import Iterable

_VARIABLE = "GPURUN_FOLDER"


def use(folder: str) -> None:
    """Keep jobs, outputs, the spool and the record of images in ``FOLDER/gpurun-UID``, created with mode 0700.

    Raises:
        OSError: it cannot be created. NotOwn: another user made it, or others may write there.
    """
    own = os.path.join(folder, "gpurun-%d" % os.getuid())
    try:
        os.mkdir(own, 0o700)
    except FileExistsError:
        found = os.lstat(own)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise NotOwn("%s is not a folder that only this user may enter" % own) from None
    os.environ[_VARIABLE] = own
    os.environ["XDG_CACHE_HOME"] = os.path.join(own, "cache")
    os.environ["XDG_STATE_HOME"] = os.path.join(own, "state")


def root() -> str:
    """Return the folder that holds ``jobs`` and ``outputs``."""
    return os.environ.get(_VARIABLE) or os.path.join(os.path.expanduser("~"), ".gpurun")


def filesystem(path: str, mountinfo: Iterable[str]) -> str:
    """Return the type of the file system that holds a path; empty if unknown.

    Args:
        mountinfo: the lines of ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)).
    """
    best, kind = "", ""
    for line in mountinfo:
        mount, _, rest = line.partition(" - ")
        fields = mount.split(" ")
        point = _unescaped(fields[4]) if len(fields) > 4 else ""
        if point and len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, rest.split(" ")[0]
    return kind


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


class NotOwn(Exception):
    """A folder that others may write to does not belong to this user."""
