"""Small files on the host. Paths are absolute."""

import os
import stat as modes
import tempfile
from typing import Any, Dict, Iterable, List, Optional

from gpurun.node.agent.call import Call, OpReply
from gpurun.node.folder.below import absolute, forget, open_file, parts_of, remove_path


def write(call: Call, path: str, mode: int = 0o600, fsync: bool = False) -> Dict[str, Any]:
    """Write the payload to `path`, completely or not at all. Creates missing parents with mode 0700.

    A reader sees the old or the new content, never a mixture. Replaces an existing symbolic link instead of following
    it.
    """
    return {"bytes": replace(path, call.chunks(), mode, fsync)}


def replace(path: str, pieces: Iterable[bytes], mode: int, fsync: bool = False) -> int:
    """Do the same as `write`; return the file's size in bytes."""
    folder, name = os.path.split(absolute(path))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".%s." % name[:64], dir=folder)
    size = 0
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
                size += len(piece)
            os.fchmod(file.fileno(), mode)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        forget(temporary)
        raise
    return size


def read(call: Call, path: str, max_bytes: int = 1 << 20, offset: int = 0) -> OpReply:
    """Return up to `max_bytes` of a regular file from `offset` on; ``value["size"]`` is the whole file's size.

    Does not follow a link.
    """
    folder, name = os.path.split(absolute(path))
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        handle = open_file(above, parts_of(name)[0])
    finally:
        os.close(above)
    with os.fdopen(handle, "rb") as file:
        size = os.fstat(handle).st_size
        file.seek(offset)
        return OpReply({"size": size}, file.read(max_bytes))


def mkdir(call: Call, path: str, mode: int = 0o700) -> None:
    """Make a folder and its parents. Idempotent; an existing folder gets `mode`."""
    os.makedirs(absolute(path), mode=0o700, exist_ok=True)
    os.chmod(path, mode)


def rmtree(call: Call, path: str) -> Dict[str, Any]:
    """Remove a file, link or folder with everything in it, without following links. Idempotent.

    Returns:
        ``{"removed": bool}``: False if there was nothing.
    """
    if not os.path.lexists(absolute(path)):
        return {"removed": False}
    remove_path(path)
    return {"removed": True}


def stat(call: Call, path: str) -> Optional[Dict[str, Any]]:
    """Return size, mode, owner and kind of a path, without following links; None if there is nothing."""
    try:
        status = os.lstat(absolute(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = (("file", modes.S_ISREG), ("dir", modes.S_ISDIR), ("link", modes.S_ISLNK))
    kind = next((name for name, test in kinds if test(status.st_mode)), "other")
    return {
        "kind": kind,
        "size": status.st_size,
        "mode": modes.S_IMODE(status.st_mode),
        "uid": status.st_uid,
        "gid": status.st_gid,
        "mtime_s": status.st_mtime,
    }


def listdir(call: Call, path: str) -> List[str]:
    """Names in a folder, sorted."""
    return sorted(os.listdir(absolute(path)))


def df(call: Call, path: str) -> Dict[str, Any]:
    """Return the space on the file system of `path` or of its nearest existing parent.

    Returns:
        ``{"free_bytes", "total_bytes", "free_inodes"}``, as available to an ordinary user.
    """
    place = absolute(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    status = os.statvfs(place)
    return {
        "free_bytes": status.f_bavail * status.f_frsize,
        "total_bytes": status.f_blocks * status.f_frsize,
        "free_inodes": status.f_favail,
    }


OPS = {
    "write": write,
    "read": read,
    "mkdir": mkdir,
    "rmtree": rmtree,
    "stat": stat,
    "listdir": listdir,
    "df": df,
}
