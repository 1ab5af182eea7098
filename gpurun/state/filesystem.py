"""Check that locks work on the state directory's file system.

Every promise about GPUs depends on locks of files (`gpurun.state.locks`): between processes, and between machines if
several see the directory. So gpurun tests them once per file system and boot, with a second process, and records the
result in ``locks.json``. It also rejects mount options that keep locks on one machine (nfs(5), mount.cifs(8), fuse(4)).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.errors import StateError, StateUnavailable, UnsafeState
from gpurun.msgspec_types import ready
from gpurun.state import durable, locks
from gpurun.state.clock import boot_id
from gpurun.state.paths import StatePath, may_pass
from gpurun.state.sharing import MARK

HINT = (
    "set GPURUN_HOME to a folder on a local disk (ext4, xfs, btrfs, tmpfs …), "
    "or mount the state directory with working locks"
)
PROBE_TIMEOUT_S = 20.0
MAX_STAMP_BYTES = 4096
PROBE = """
import fcntl, struct, sys
with open(sys.argv[1], "r+b") as file:
    def lock(kind):
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, 0, 0, 0))
    for _ in sys.stdin:
        try:
            lock(fcntl.F_WRLCK)
            print("granted", flush=True)
            lock(fcntl.F_UNLCK)
        except (BlockingIOError, PermissionError):
            print("refused", flush=True)
        except OSError as error:
            print(error.strerror, flush=True)
"""
LOCAL_OPTIONS = {
    "nfs": ("nolock", "local_lock=posix", "local_lock=all"),
    "cifs": ("nobrl",),
    "lustre": ("localflock",),
}
"""MountEntry options with which locks never leave this machine, by the family of file system."""
LOCAL_TYPES = ("fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.goofys", "fuse.mountpoint-s3")
"""User-space network file systems that hand no lock on to their server."""
SHARED_FAMILIES = frozenset(
    {"9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvfs", "cxfs", "daos", "fhgfs", "fuse", "gfs", "gfs2",
     "glusterfs", "gpfs", "ibrix", "juicefs", "lustre", "nfs", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2",
     "quobyte", "snfs", "vboxsf", "virtiofs", "vmhgfs", "vxfs", "wekafs"}
)  # fmt: skip
"""File systems that several machines may have mounted at once, as mount(8) names them."""


_FAMILIES = {"nfs4": "nfs", "smb3": "cifs", "smbfs": "cifs", "beegfs_nodev": "beegfs"}


@dataclass(frozen=True)
class MountEntry:
    """The mount that a path lies on, as ``/proc/self/mountinfo`` has it.

    Attributes:
        options: of the mount and of its file system.
    """

    point: str
    kind: str
    source: str
    options: tuple[str, ...]

    @property
    def family(self) -> str:
        """``nfs4`` → ``nfs``, ``smb3`` → ``cifs``, ``fuse.sshfs`` → ``fuse``."""
        kind = self.kind.partition(".")[0]
        return _FAMILIES.get(kind, kind)


def is_shared(kind: str) -> bool:
    """Return whether several machines may share a file system of this kind."""
    return MountEntry("", kind, "", ()).family in SHARED_FAMILIES


@dataclass(frozen=True)
class _Stamp:
    """Where locks were found to work."""

    device: int
    boot: str


def check_locks(home: Path) -> None:
    """Refuse a state directory without working locks. Reads one small file if the test was successful before.

    Raises:
        UnsafeState: names the path, the file system and what to do.
        StateUnavailable: no second process can try it now, which says nothing about the file system.
    """
    try:
        now = _Stamp(home.stat().st_dev, boot_id())
    except OSError:
        return  # no directory yet
    if not now.boot:
        return  # no Linux: nothing to compare with
    stamp = StatePath(home) / "locks.json"
    if _read_stamp(stamp) == now:
        return
    mount = mount_of(home, Path("/proc/self/mountinfo").read_text())
    if why := local_only(mount):
        raise _refusal(home, mount, why)
    try:
        why = try_locks(home)
    except FileNotFoundError:
        return
    except _Untried:
        raise
    except StateError:
        return  # a user with read-only access takes no locks
    if why:
        raise _refusal(home, mount, why)
    if is_shared(mount.kind):
        _warn(home, mount)
    with suppress(OSError, StateError):  # else it is tried again next time
        descriptor = stamp.open_file(os.O_WRONLY | os.O_CREAT, 0o664)
        try:
            os.ftruncate(descriptor, 0)
            durable.write_all(descriptor, msgspec.json.encode(now))
        finally:
            os.close(descriptor)


def _read_stamp(path: StatePath) -> _Stamp | None:
    """Where locks were found to work, if that can be read: else they are tried again."""
    try:
        with path.reader() as stream:
            return msgspec.json.decode(stream.read(MAX_STAMP_BYTES), type=ready(_Stamp))
    except (OSError, StateError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def mount_of(path: Path, mountinfo: str) -> MountEntry:
    """The mount that holds `path`: the longest mount point above it, the last one of equals."""
    real = os.path.realpath(path)
    best = MountEntry("/", "unknown", "", ())
    for line in mountinfo.splitlines():
        mount = _parse(line)
        inside = mount is not None and (real + "/").startswith(mount.point.rstrip("/") + "/")
        if mount is not None and inside and len(mount.point) >= len(best.point):
            best = mount
    return best


def mounts_below(path: Path, mountinfo: str) -> tuple[str, ...]:
    """The mount points that lie at or below `path`: what is there belongs to somebody else."""
    real = os.path.realpath(path)
    mounts = (_parse(line) for line in mountinfo.splitlines())
    return tuple(mount.point for mount in mounts if mount and (mount.point + "/").startswith(real + "/"))


def local_only(mount: MountEntry) -> str | None:
    """Why locks of this mount are seen on this machine only, if they are."""
    if mount.kind in LOCAL_TYPES:
        return f"{mount.kind} does not show the locks of this machine to other machines"
    for option in LOCAL_OPTIONS.get(mount.family, ()):
        if option in mount.options:
            return f"with the mount option {option}, other machines do not see the locks of this machine"
    return None


def try_locks(home: Path) -> str | None:
    """Lock a file, have another process try it, unlock, let it try again; what was wrong, None if nothing.

    Raises:
        FileNotFoundError, StateError: there is no folder to try it in, or no process can be started.
    """
    name = f".probe.{os.getpid()}.{secrets.token_hex(4)}"
    path = StatePath(home) / (name if os.access(home, os.W_OK) else f"{MARK}/{name}")
    descriptor = path.open_file(os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if not locks.try_take(descriptor):
            return "the file system refuses a lock on a new file"
        with _tried(home):
            answers = _ask_another(path.plain, descriptor)
        return _judged(answers)
    except OSError as error:
        return f"locking fails: {error.strerror}"
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


class _Untried(StateUnavailable):
    """Nobody could try the locks."""


@contextmanager
def _tried(home: Path) -> Iterator[None]:
    """Tell errors of the process that tries the locks from those of the locks."""
    try:
        yield
    except OSError as error:
        if not may_pass(error) and not isinstance(error, BrokenPipeError):
            raise
        raise _Untried(
            f"gpurun cannot test the locks of the state directory now: {error.strerror}", where=str(home),
            hint="the test needs a second process; `ulimit -u` and `free` show limits and free memory",
        ) from error  # fmt: skip


def _ask_another(path: Path, descriptor: int) -> list[str]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROBE, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as other:  # fmt: skip
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            answers = []
            for unlock in (False, True):
                if unlock:
                    locks.release_lock(descriptor)
                other.stdin.write("try\n")
                other.stdin.flush()
                answers.append(other.stdout.readline().strip())
        finally:
            other.stdin.close()
    if not any(answers):  # it was killed, as for lack of memory
        raise BrokenPipeError(errno.EPIPE, "the process that tests file locks ended too early")
    return answers


def _judged(answers: list[str]) -> str | None:
    match answers:
        case ["refused", "granted"]:
            return None
        case ["granted", _]:
            return "one lock was granted to two processes at the same time"
        case ["refused", "refused"]:
            return "a lock stays held after its release"
        case _:
            return f"a second process could not lock the file: {', '.join(answers).strip(', ') or 'it gave no answer'}"


def _parse(line: str) -> MountEntry | None:
    before, dash, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(rest) < 3:
        return None
    return MountEntry(_unescape(fields[4]), rest[0], _unescape(rest[1]), (*fields[5].split(","), *rest[2].split(",")))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _refusal(home: Path, mount: MountEntry, why: str) -> UnsafeState:
    at = f"{mount.source} at {mount.point}" if mount.source else mount.point
    return UnsafeState(f"the state directory is on {mount.kind} ({at}): {why}", where=str(home), hint=HINT)


def _warn(home: Path, mount: MountEntry) -> None:
    text = "locks work on this machine, but gpurun cannot test locks between machines: run gpurun on one head only"
    print(f"gpurun: {home} is on {mount.kind}: {text}", file=sys.stderr)  # noqa: T201
