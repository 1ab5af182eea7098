"""Check and set the modes of a state directory that several users share.

Root, or another administrator, owns the directory and creates everything on its first level once; a member of the group
can add, rename and remove nothing there. So all locks that members share are on this level. Each folder below is of one
of two kinds. In a *sticky* folder everybody can create files, and only their owner (or root) may rename or remove them:
jobs, leases, the marks of live jobs, waiters' logs, requests, what users know of machines. In an *open* folder
everybody may replace everything: cordons and histories. The group can read all files; except for the locks, only their
owner writes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpurun.errors import BadInput, StateError, StateUnavailable, UnsafeState
from gpurun.state import durable
from gpurun.state.paths import StatePath, state_error, user_name

# The id of a state directory: it distinguishes its jobs on a host from those of other users and head nodes.


FILE = "identity.json"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Identity:
    """The content of ``identity.json``."""

    id: str


@dataclass(frozen=True)
class StateDirectory:
    """A state directory: its id, whether several users share it, and whether it is safe to use."""

    home: Path

    def id(self) -> str:
        """Return the id of a state directory; create it when it is first needed.

        Raises:
            StateError: the file is damaged, or this user may not create it.
        """
        found = self.known_id()
        if found is not None:
            return found
        path = StatePath(self.home) / FILE
        made = path.sibling(f".{FILE}.{secrets.token_hex(8)}")
        durable.make_home(self.home)
        try:
            durable.write_record(made, Identity(secrets.token_hex(8)))
        except StateError as error:
            if not isinstance(error, StateUnavailable):
                error.hint = "ask the owner of the shared state directory to run `gpurun share`"
            raise
        with suppress(FileExistsError):  # another process was quicker: its id counts
            made.link(path)
        made.unlink()
        durable.sync_folder(path.parent)
        found = self.known_id()
        if found is None:
            raise StateError(
                "the file is a link to a missing file", where=str(self.home / FILE), hint=f"remove {self.home / FILE}"
            )
        return found

    def known_id(self) -> str | None:
        """The id of a state directory; None if it has none yet.

        Raises:
            StateError: the file is damaged.
        """
        path = StatePath(self.home) / FILE
        try:
            found = durable.read_record(path, Identity).id
        except FileNotFoundError:
            return None
        except StateUnavailable:  # it says nothing about the file
            raise
        except StateError as error:
            error.hint = (
                f"remove {path}: gpurun then makes a new id, and hosts treat running jobs as jobs of another head"
            )
            raise
        if not _ID.fullmatch(found):
            raise StateError(
                f"{found[:40]!r} is not the id of a state directory", where=str(path), hint=f"remove {path}"
            )
        return found

    def is_shared(self) -> bool:
        """Return whether this state directory was made for several users."""
        return (StatePath(self.home) / MARK).is_dir()

    def enter(self) -> None:
        """Check who may write below `home`. Every process calls this before it writes there.

        In a shared directory, files that this process writes become readable only for the group. A directory
        that does not exist yet is fine.

        Raises:
            UnsafeState: modes or owners do not protect users from each other; names the command that repairs them.
            StateError: there can be no directory at this place, or its disk failed.
        """
        try:
            found = self.home.stat()
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise UnsafeState(
                "you have no access to the state directory", where=str(self.home), hint=self._ask()
            ) from error
        except OSError as error:
            raise state_error(error, StatePath(self.home), "examined") from error
        if found.st_mode & stat.S_IWOTH:
            raise UnsafeState(
                "every user of this machine can write to the state directory, so gpurun does not trust its files",
                where=str(self.home), hint=f"run chmod o-w {self.home}",
            )  # fmt: skip
        if not os.access(self.home, os.X_OK):
            raise UnsafeState("you have no access to the state directory", where=str(self.home), hint=self._ask())
        if self.is_shared():
            self._check_shared(found)
            os.umask(UMASK)
        elif os.getuid() not in (found.st_uid, 0):
            raise UnsafeState(
                f"the state directory belongs to {user_name(found.st_uid)} and is not shared", where=str(self.home),
                hint="set GPURUN_HOME to a folder of your own, or ask for a shared state directory (`gpurun share`)",
            )  # fmt: skip

    def make_shared(self, gid: int) -> bool:
        """Create a shared state directory, or repair one. Idempotent.

        Returns:
            Whether the audit log could be made append-only (by root, on a file system that supports it).

        Raises:
            BadInput: there is a state directory of one user with jobs.
            StateError: this user may not do it, or the disk is full.
        """
        if (
            self.home.is_dir()
            and not self.is_shared()
            and any(_has_entries(self.home / name) for name in ("jobs", "leases"))
        ):
            raise BadInput(
                "the folder is already a state directory of one user, and its jobs cannot change their owner",
                where=str(self.home), hint="choose another folder for the shared state directory",
            )  # fmt: skip
        durable.make_home(self.home)
        top = StatePath(self.home)
        _make(top / MARK)  # first: what is made in part must count as a shared directory, and is then refused
        _set(top, top.open_folder(), HOME_MODE, gid)
        self.id()
        for name, mode in FOLDERS.items():
            _make(top / name)
            _set(top / name, (top / name).open_folder(), mode, gid)
        for name, mode in FILES.items():
            (top / name).touch()
            _set(top / name, (top / name).open_file(os.O_RDONLY), mode, gid)
        durable.sync_folder(top)
        return append_only(top / "audit.jsonl", on=True)

    def cordons_folder(self) -> StatePath:
        """Return the folder of the cordons file. Every user may replace that file, so every user must have write
        access.
        """
        return StatePath(self.home) / "cordons" if self.is_shared() else StatePath(self.home)

    def _check_shared(self, found: os.stat_result) -> None:
        for name, mode in {".": HOME_MODE, **FOLDERS, **FILES}.items():
            path = self.home / name
            try:
                there = path.lstat()
            except FileNotFoundError:
                raise self._wrong(path, "is missing", found.st_gid) from None
            kind_is_right = stat.S_ISREG(there.st_mode) if name in FILES else stat.S_ISDIR(there.st_mode)
            if not kind_is_right:
                raise self._wrong(path, "is not the file or folder that gpurun made", found.st_gid)
            if stat.S_IMODE(there.st_mode) != mode:
                raise self._wrong(path, f"has mode {stat.S_IMODE(there.st_mode):04o}, not {mode:04o}", found.st_gid)
            if there.st_gid != found.st_gid:
                raise self._wrong(path, f"belongs to group {there.st_gid}, not {found.st_gid}", found.st_gid)
            if there.st_uid not in (found.st_uid, 0):
                raise self._wrong(path, f"belongs to {user_name(there.st_uid)}", found.st_gid)

    def _wrong(self, path: Path, what: str, gid: int) -> UnsafeState:
        return UnsafeState(
            "the shared state directory does not protect its users from each other: "
            f"{path.relative_to(self.home)} {what}",
            where=str(self.home), hint=f"run as the owner of the directory: gpurun share {self.home} --group {gid}",
        )  # fmt: skip

    def _ask(self) -> str:
        try:
            gid = self.home.stat().st_gid
        except OSError:
            return "ask the owner of the state directory for access"
        return f"ask root to add you to group {gid} (usermod -aG), and log in again"


HOME_MODE = 0o2750
STICKY, OPEN, LOCK = 0o3770, 0o2770, 0o660
FOLDERS: Mapping[str, int] = {
    "jobs": STICKY, "live": STICKY, "leases": STICKY, "waiters": STICKY, "requests": STICKY, "discarded": STICKY,
    "sweeps": STICKY, "scaling": STICKY, "history": STICKY, "machines": STICKY,
    "cordons": OPEN, "inventory": OPEN, "bench": OPEN,
}  # fmt: skip
FILES: Mapping[str, int] = {
    "allocator.lock": LOCK, "locks.json": LOCK, "audit.jsonl": LOCK, "cordons.lock": LOCK, "bench.lock": LOCK,
    FILE: 0o640,
}  # fmt: skip
UMASK = 0o027
MARK = "requests"
"""The folder that only a shared state directory has."""

_GETFLAGS, _SETFLAGS, _APPEND_ONLY = 0x80086601, 0x40086602, 0x20  # ioctl_iflags(2)


def _has_entries(folder: Path) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return any(folder.iterdir())
    return False


def _make(folder: StatePath) -> None:
    with suppress(FileExistsError):
        folder.mkdir()


def _set(path: StatePath, descriptor: int, mode: int, gid: int) -> None:
    """Give what was opened this mode, this group, and this user as its owner."""
    try:
        found = os.fstat(descriptor)
        if (found.st_gid, stat.S_IMODE(found.st_mode), found.st_uid) != (gid, mode, os.getuid()):
            _set_append_only(descriptor, on=False)
            os.fchown(descriptor, os.getuid(), gid)
            os.fchmod(descriptor, mode)
    except OSError as error:
        raise state_error(error, path, "given to the group") from error
    finally:
        os.close(descriptor)


def append_only(path: StatePath, *, on: bool) -> bool:
    """Set or clear the kernel's append-only attribute; False where that cannot be done."""
    with suppress(FileNotFoundError, StateError):
        descriptor = path.open_file(os.O_RDONLY)
        try:
            return _set_append_only(descriptor, on=on)
        finally:
            os.close(descriptor)
    return False


def _set_append_only(descriptor: int, *, on: bool) -> bool:
    with suppress(OSError):
        (flags,) = struct.unpack("l", fcntl.ioctl(descriptor, _GETFLAGS, struct.pack("l", 0)))
        wanted = flags | _APPEND_ONLY if on else flags & ~_APPEND_ONLY
        if wanted != flags:
            fcntl.ioctl(descriptor, _SETFLAGS, struct.pack("l", wanted))
        return True
    return False
