"""The folder for gpurun's files on this host: below the user's home, or on a disk that no other host shares.

Home folders on NFS are the same on every host. One host's fence would remove another host's files, and an engine that
runs as root could not read them (root-squash).
"""

import errno
import os
import pwd
import re
import stat
from typing import Iterable, List, Optional, Tuple

_VARIABLE = "GPURUN_FOLDER"
_FAULTS = {
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "read-only",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
}


def use(folder: str) -> None:
    """Keep jobs, outputs, the spool and the record of images in ``FOLDER/gpurun-UID``, created with mode 0700.

    Raises:
        NotOwn: another user made it, or others may write there. NotUsable: it cannot be created.
    """
    own = os.path.join(folder, "gpurun-%d" % os.getuid())
    try:
        os.mkdir(own, 0o700)
    except FileExistsError:
        found = os.lstat(own)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise NotOwn("%s is not a folder that only this user may enter" % own) from None
    except OSError as error:
        raise NotUsable(fault_of(error, own, mounts())[1]) from None
    os.environ[_VARIABLE] = own
    os.environ["XDG_CACHE_HOME"] = os.path.join(own, "cache")
    os.environ["XDG_STATE_HOME"] = os.path.join(own, "state")


def root() -> str:
    """Return the folder that holds ``jobs`` and ``outputs``."""
    return os.environ.get(_VARIABLE) or os.path.join(os.path.expanduser("~"), ".gpurun")


def mounts(proc: str = "/proc") -> List[str]:
    """Return the lines of ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)); none if it cannot be read."""
    try:
        with open(os.path.join(proc, "self/mountinfo"), errors="surrogateescape") as stream:
            return list(stream)
    except OSError:
        return []


def filesystem(path: str, mountinfo: Iterable[str]) -> str:
    """Return the type of the file system that holds a path; empty if unknown.

    Args:
        mountinfo: see `mounts`.
    """
    return _mount(path, mountinfo)[1]


def fault_of(error: OSError, path: str, mountinfo: Iterable[str]) -> Tuple[str, str]:
    """Return why nothing could be written to a path: ``denied``, ``read-only``, ``full`` or ``broken``; and in words,
    with the owner, the mount or the free space that explains it.
    """
    return _FAULTS.get(error.errno or 0, "broken"), _words(error, path, mountinfo)


def _words(error: OSError, path: str, mountinfo: Iterable[str]) -> str:
    nearest = _nearest(path)
    if error.errno == errno.EROFS:
        point, kind, options = _mount(os.path.realpath(nearest), mountinfo)
        mount = " (%s on %s: %s)" % (kind, point, options) if point else ""
        return "%s is on a read-only file system%s" % (path, mount)
    if error.errno in (errno.EACCES, errno.EPERM):
        return "%s may not write to %s: %s" % (_name(os.getuid()), path, _owned(nearest))
    if error.errno == errno.EDQUOT:
        return "%s has used up its disk quota at %s" % (_name(os.getuid()), path)
    if error.errno == errno.ENOSPC:
        free_bytes, free_inodes = free(nearest)
        inodes = "" if free_inodes is None else " and %d inodes" % free_inodes
        return "no space is left for %s: %d KiB%s are free" % (path, (free_bytes or 0) >> 10, inodes)
    return "nothing can be written to %s: %s" % (path, error.strerror or error)


def _owned(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError as error:
        return "%s: %s" % (path, error.strerror)
    return "%s belongs to %s and has mode %04o" % (path, _name(found.st_uid), stat.S_IMODE(found.st_mode))


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid


def _nearest(path: str) -> str:
    """Return the path, or its nearest ancestor that exists."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def free(path: str) -> Tuple[Optional[int], Optional[int]]:
    """Return the bytes and inodes that this user can still use on the file system of a path, or of its nearest
    ancestor.

    None = not known, or without limit: btrfs counts no inodes.
    """
    try:
        found = os.statvfs(_nearest(path))
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _mount(path: str, mountinfo: Iterable[str]) -> Tuple[str, str, str]:
    """Return the mount point of a path, the type of its file system and its options, those of the mount first."""
    best, kind, options = "", "", ""
    for line in mountinfo:
        mount, _, rest = line.partition(" - ")
        fields, disk = mount.split(" "), rest.split()
        point = _unescaped(fields[4]) if len(fields) > 5 else ""
        if point and len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind, options = point, "".join(disk[:1]), ",".join([fields[5], *disk[2:3]])
    return best, kind, options


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


class NotOwn(Exception):
    """A folder that others may write to does not belong to this user."""


class NotUsable(Exception):
    """The folder cannot be created; the message says why."""
