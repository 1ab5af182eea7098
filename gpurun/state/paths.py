"""Names below the state directory, and the only way to open them.

Several users write below a shared state directory, so a member can put a link, a pipe or another user's file in the
place of a name. `StatePath` opens every folder on the way by its descriptor and follows no link. It refuses what is not
a regular file, and a file with a second hard link. It is not an `os.PathLike`, so `open` and `pathlib` do not accept it
by mistake.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpurun.errors import StateDiskError, StateError, StateUnavailable, is_short
from gpurun.moments import date_time

# Who does something: names of users and of commands, for people to read.


def user_name(uid: int) -> str:
    """The user's name; ``uid 1234`` for one without an entry. The environment has no say: it can be set to anything."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def has_account(uid: int) -> bool:
    """Return whether a user of this number exists on this machine."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def is_account(name: str) -> bool:
    """Return whether a user of this name exists on this machine."""
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):  # a name with a zero byte
        return False
    return True


def myself() -> str:
    """The name of the user that this process runs as."""
    return user_name(os.getuid())


def command_name(argv: Sequence[str]) -> str:
    """``gpurun submit``, ``gpurun supervisor j-0a1b2c3d``: which of our processes an argv is, in few words.

    Nothing after the first word that is not a flag is kept, so nothing secret can be.
    """
    program = Path(argv[0]) if argv else Path("gpurun")
    words = [word for word in argv[1:] if not word.startswith("-")]
    if program.name == "__main__.py" and program.parent.name == "supervisor":
        return " ".join(["gpurun supervisor", *words[:1]])
    if program.name == "waiter.py":
        return "gpurun waiter"
    return " ".join(["gpurun", *words[:1]])


# Check whether only root can change a file. Root acts only on such a file, even if another user named it.


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


# Where gpurun keeps its state.


SYSTEM_HOME = Path("/var/lib/gpurun")


def home(environ: Mapping[str, str], *, system_home: Path = SYSTEM_HOME) -> Path:
    """The state directory: ``$GPURUN_HOME``, else the system-wide one if it exists, else the user's own.

    The user's own follows the XDG base directory specification (``$XDG_STATE_HOME/gpurun``). The directory
    is not created here.
    """
    if explicit := environ.get("GPURUN_HOME"):
        return Path(explicit).absolute()
    if system_home.is_dir():
        return system_home
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local/state")
    return Path(state) / "gpurun"


_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OF_ALL = 2
"""In folders of the first level everybody has files. What lies further down belongs to the owner of its folder."""
_AWAY = (
    "the file system of the state directory does not answer",
    "check the file server, the network and the mount; `ls {home}` works again when the file system answers",
)
_OF_NETWORKS = (
    errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,
    errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EREMOTEIO,
    errno.ENODEV, errno.EKEYEXPIRED,
)  # fmt: skip
"""What NFS and FUSE say while their server is away. Not ENXIO: a pipe that somebody put there says it, too."""
_DISK = {
    errno.ENOSPC: (
        "the disk of the state directory is full",
        "free some space on the disk; `df -h {home}` shows how much is free",
    ),
    errno.EDQUOT: (
        "your quota on the disk of the state directory is used up", "free some space; `quota -s` shows your quota",
    ),
    errno.EROFS: (
        "the file system of the state directory is read-only",
        "mount the file system again; `dmesg | tail` may say why it is read-only",
    ),
    errno.EIO: (
        "the disk of the state directory failed",
        "`dmesg | tail` says more; check the disk before you continue",
    ),
    errno.EUCLEAN: (
        "the file system of the state directory is damaged",
        "repair the file system with fsck; `dmesg | tail` says more",
    ),
    **dict.fromkeys(_OF_NETWORKS, _AWAY),
}  # fmt: skip
DISK_ERRORS = frozenset(_DISK)
_PROCESS = {
    errno.EMFILE: ("this process has too many open files", "raise the limit: ulimit -n"),
    errno.ENFILE: ("this machine has too many open files", "raise the limit: sysctl fs.file-max"),
    errno.ENOLCK: ("this machine has no more locks", "try again in a moment; `cat /proc/locks` shows all locks"),
    errno.ENOMEM: ("this machine has no more memory", "try again in a moment"),
    errno.EINTR: ("the system call was interrupted", "try again"),
}
PROCESS_ERRORS = frozenset(_PROCESS) | {errno.EAGAIN}


@dataclass(frozen=True, slots=True)
class StatePath:
    """A name below the state directory.

    Every method raises FileNotFoundError if there is no such file, and StateError for all else that fails: a link on
    the way, another kind of file, missing rights. StateDiskError says that the disk is full or broken.

    Attributes:
        home: the state directory; it may itself be reached through links.
        parts: the names from there.
    """

    home: Path
    parts: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> StatePath:
        """A name further down. Raises ValueError for names that lead elsewhere, such as ``..``."""
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"{name!r} is not a name below the state directory")
        return StatePath(self.home, (*self.parts, *parts))

    def __str__(self) -> str:
        return str(self.plain)

    @property
    def plain(self) -> Path:
        """The same name as an ordinary path, for people and other programs. Who opens it follows links."""
        return self.home.joinpath(*self.parts)

    @property
    def name(self) -> str:
        """The last part."""
        return self.parts[-1]

    @property
    def parent(self) -> StatePath:
        """The folder that holds it."""
        return StatePath(self.home, self.parts[:-1])

    def sibling(self, name: str) -> StatePath:
        """Another name in the same folder."""
        return self.parent / name

    def open_file(self, flags: int, mode: int = 0o644, *, linked: bool = False) -> int:
        """A descriptor of the regular file, which has no other name. Never waits for a pipe.

        Args:
            linked: the file may have other names (hard links); the caller must know otherwise whose it is.

        Raises:
            FileNotFoundError, FileExistsError: as `os.open` does with these flags.
            StateError: it is not such a file, or may not be opened.
        """
        assert not flags & os.O_TRUNC, "what is cut must have been checked first"
        with self._in_folder("opened") as folder:
            descriptor = os.open(self.parts[-1], flags | _FILE, mode, dir_fd=folder)
            if flags & os.O_CREAT and os.geteuid() == 0 and len(self.parts) > _OF_ALL:
                os.fchown(descriptor, os.fstat(folder).st_uid, -1)
        try:
            self._check_file(examined(descriptor, self), linked=linked)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_file(self, found: os.stat_result, *, linked: bool) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise StateError(
                f"the path is not a regular file{blame(found)}", where=str(self), hint=_remove(found, self)
            )
        may_be_planted = len(self.parts) > 1  # on the first level only the owner of the directory makes names
        if found.st_nlink > 1 and may_be_planted and not linked:
            raise StateError(
                f"the file has {found.st_nlink} names (hard links), so another user may have put the file here",
                where=str(self), hint="copy the file, and replace the file by its copy",
            )  # fmt: skip

    def open_folder(self) -> int:
        """Return a descriptor of the folder, to list it, sync it or open entries below it."""
        with self._in_folder("opened") as folder:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(self.parts[-1] if self.parts else ".", flags, dir_fd=folder)

    def reader(self, *, linked: bool = False) -> BinaryIO:
        """The file, open for reading; `linked` as for `open_file`."""
        return os.fdopen(self.open_file(os.O_RDONLY, linked=linked), "rb")

    def read_bytes(self) -> bytes:
        """The whole file."""
        with self.reader() as stream:
            try:
                return stream.read()
            except OSError as error:
                raise state_error(error, self, "read") from error

    def read_text(self) -> str:
        """The whole file as text; bytes that are not UTF-8 are replaced."""
        return self.read_bytes().decode("utf-8", "replace")

    def names(self) -> list[str]:
        """What the folder holds, in no order."""
        descriptor = self.open_folder()
        try:
            return os.listdir(descriptor)
        except OSError as error:
            raise state_error(error, self, "listed") from error
        finally:
            os.close(descriptor)

    def stat(self) -> os.stat_result:
        """What lies there, not followed if it is a link."""
        with self._in_folder("examined") as folder:
            return os.stat(self.parts[-1] if self.parts else ".", dir_fd=folder, follow_symlinks=False)

    def exists(self) -> bool:
        """Return whether anything has this name, even a link to nothing."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether it is a folder, and not a link to one."""
        try:
            return stat.S_ISDIR(self.stat().st_mode)
        except FileNotFoundError:
            return False

    def mkdir(self, mode: int = 0o755) -> None:
        """Make the folder. Only its owner can write it, whatever the umask: gpurun trusts no folder that others can
        write. Raises FileExistsError if something has the name.
        """
        with self._in_folder("made") as folder:
            os.mkdir(self.parts[-1], mode, dir_fd=folder)

    def touch(self) -> None:
        """Make an empty file, unless there is one."""
        os.close(self.open_file(os.O_WRONLY | os.O_APPEND | os.O_CREAT))

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the name of a file."""
        with suppress(FileNotFoundError) if missing_ok else _nothing(), self._in_folder("removed") as folder:
            os.unlink(self.parts[-1], dir_fd=folder)

    def rename(self, to: StatePath) -> None:
        """Give it another name, in place of what had that one."""
        with self._in_folder("renamed") as folder, to._in_folder("written") as other:
            os.rename(self.parts[-1], to.parts[-1], src_dir_fd=folder, dst_dir_fd=other)

    def link(self, to: StatePath) -> None:
        """Give the file a second name; see `open_file` for how it is opened then."""
        with self._in_folder("linked") as folder, to._in_folder("written") as other:
            os.link(self.parts[-1], to.parts[-1], src_dir_fd=folder, dst_dir_fd=other, follow_symlinks=False)

    def rmdir(self) -> None:
        """Remove a folder that is empty."""
        with self._in_folder("removed") as folder:
            os.rmdir(self.parts[-1], dir_fd=folder)

    def rmtree(self) -> None:
        """Remove a folder with everything in it."""
        with self._in_folder("removed") as folder:
            shutil.rmtree(f"/proc/self/fd/{folder}/{self.parts[-1]}")

    @contextmanager
    def _in_folder(self, doing: str) -> Iterator[int]:
        """The descriptor of the folder that holds the name; failures become errors for people."""
        try:
            descriptor = os.open(self.home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in self.parts[:-1]:
                    below = os.open(part, _FOLDER, dir_fd=descriptor)
                    os.close(descriptor)
                    descriptor = below
                yield descriptor
            finally:
                os.close(descriptor)
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise state_error(error, self, doing) from error


def may_pass(error: Exception) -> bool:
    """Return whether an error says that the disk failed or this machine is short of something: it may pass."""
    if isinstance(error, OSError) and error.errno in DISK_ERRORS | PROCESS_ERRORS:
        return True
    return is_short(error) or isinstance(error, StateUnavailable)


def examined(descriptor: int, path: StatePath) -> os.stat_result:
    """Return the status of an open file or folder. Raises StateError, as the methods of `StatePath` do."""
    try:
        return os.fstat(descriptor)
    except OSError as error:
        raise state_error(error, path, "examined") from error


def state_error(error: OSError, path: StatePath, doing: str) -> StateError:
    """Return the error about a file of the state directory, for people: what, why, and what to do next.

    Args:
        doing: what failed, as in "cannot be *written*".
    """
    number = error.errno or 0
    if number in _DISK:
        why, hint = _DISK[number]
        return StateDiskError(
            f"the file or folder cannot be {doing}: {why}", where=str(path), hint=hint.format(home=path.home)
        )
    if number in _PROCESS:
        why, hint = _PROCESS[number]
        return StateUnavailable(f"the file or folder cannot be {doing}: {why}", where=str(path), hint=hint)
    found = _in_the_way(path)
    if number in (errno.ELOOP, errno.ENOTDIR) and found is not None:
        at, status = found
        what = (
            "a link, and gpurun follows no links in the state directory"
            if stat.S_ISLNK(status.st_mode)
            else "not a folder"
        )
        if at == path and not stat.S_ISLNK(status.st_mode):
            what = "not the file or folder that gpurun made"
        return StateError(
            f"the file or folder cannot be {doing}: {at} is {what}{blame(status)}",
            where=str(path),
            hint=_remove(status, at),
        )
    if number in (errno.EACCES, errno.EPERM):
        owner = f"; it belongs to {user_name(found[1].st_uid)}" if found else ""
        ask = (
            f"ask {user_name(found[1].st_uid)} or root for access" if found and found[1].st_uid != os.getuid() else None
        )
        return StateError(f"the file or folder cannot be {doing}: {error.strerror}{owner}", where=str(path), hint=ask)
    return StateError(f"the file or folder cannot be {doing}: {error.strerror}", where=str(path))


def _in_the_way(path: StatePath) -> tuple[StatePath, os.stat_result] | None:
    """The first part of a path that is not a folder, or its last part. Only for messages: it may have changed since."""
    found = None
    for count in range(1, len(path.parts) + 1):
        at = StatePath(path.home, path.parts[:count])
        try:
            found = at, at.plain.lstat()
        except OSError:
            return found
        if not stat.S_ISDIR(found[1].st_mode):
            return found
    return found


def blame(found: os.stat_result) -> str:
    """Return the owner and change time of a file that is in the way, unless it is this user's own."""
    if found.st_uid == os.getuid():
        return ""
    return f" (owned by {user_name(found.st_uid)}, changed {date_time(found.st_ctime)})"


def _remove(found: os.stat_result, path: StatePath) -> str:
    mine = found.st_uid == os.getuid()
    return f"move {path} away" if mine else f"ask {user_name(found.st_uid)} or root to move {path} away"


@contextmanager
def _nothing() -> Iterator[None]:
    yield
