"""Whether a job could keep its files on this host: try what a job does first, and say why it fails."""

import errno
import os
import threading
from typing import Any, Dict, List, Tuple

from gpurun.node.agent import place
from gpurun.node.folder.contents import write_all
from gpurun.node.probe import folder_signs

TRY_TIMEOUT_S = 25.0
"""A healthy disk answers in milliseconds. One to which a job writes a large checkpoint may need many seconds."""

PARTS = ("jobs", "outputs")
_SMALL = b"gpurun checks whether jobs can write here\n"


def facts(folder: str, mountinfo: List[str]) -> Dict[str, Any]:
    """Return the folder's keys of `gpurun.facts.hardware.Hardware`.

    Args:
        mountinfo: see `gpurun.node.agent.place.mounts`.
    """
    found = {}  # type: Dict[str, Any]
    thread = threading.Thread(target=_look, args=(found, folder, mountinfo), daemon=True)
    thread.start()
    thread.join(TRY_TIMEOUT_S)
    if thread.is_alive():
        problem = "the file system of %s does not answer within %g s" % (folder, TRY_TIMEOUT_S)
        return {"folder": folder, "folder_fault": "hangs", "folder_problem": problem}
    return {"folder": folder, **found}


def _look(found: Dict[str, Any], folder: str, mountinfo: List[str]) -> None:
    fault, problem = try_to_write(folder, mountinfo)
    sign, signs = "", []  # type: Tuple[str, List[str]]
    if not fault:
        try:
            sign, signs = folder_signs.show(folder)
        except OSError as error:
            fault, problem = place.fault_of(error, folder, mountinfo)
    free_bytes, free_inodes = place.free(folder)
    found.update(
        {
            "folder_kind": place.filesystem(os.path.realpath(folder), mountinfo),
            "folder_fault": fault,
            "folder_problem": problem,
            "folder_free_bytes": free_bytes,
            "folder_free_inodes": free_inodes,
            "folder_sign": sign,
            "folder_signs": signs,
        }
    )


def try_to_write(folder: str, mountinfo: List[str]) -> Tuple[str, str]:
    """Create, write, sync and remove a small file where jobs and their outputs are kept.

    Returns:
        The fault and the problem, see `gpurun.node.agent.place.fault_of`; two empty texts if all went well.
    """
    for part in PARTS:
        path = os.path.join(folder, part)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            _write_one(path)
        except OSError as error:
            return place.fault_of(error, path, mountinfo)
    return "", ""


def why_unwritable(folder: str) -> str:
    """Return why no small file can be written to a folder, in words; "" if one can, or if there is no folder."""
    try:
        _write_one(folder)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return place.fault_of(error, folder, place.mounts())[1]
    return ""


def _write_one(folder: str) -> None:
    path = os.path.join(folder, ".probe." + os.urandom(8).hex())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, _SMALL, 0)
        _sync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _sync(descriptor: int) -> None:
    """Write the file to the disk, except on a file system that cannot sync: jobs run there, too."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
