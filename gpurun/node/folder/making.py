"""Create files, folders and links below a directory descriptor, as copies of another folder's."""

import hashlib
import os
from typing import Any, Dict, List, Optional, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.folder import below
from gpurun.node.folder.beginnings import Begun
from gpurun.node.folder.contents import CHANGING, MOST, Incoming, Listed, write_all


class Sink:
    """Creates files for a `Receiver`, one after the other."""

    def begin(self, entry: Listed, marks: List[int]) -> Tuple[int, Optional[Begun]]:
        """Return a descriptor for the content of a file with these marks, and its beginning that is there already."""
        raise NotImplementedError

    def keep(self, entry: Listed, marks: List[int]) -> None:
        """Record that the begun file is complete."""
        raise NotImplementedError

    def drop(self) -> None:
        """Discard the begun file, if there is one."""
        raise NotImplementedError


class Maker(Sink):
    """Creates entries in a folder; removes what is in the way. A context manager.

    A file gets its name only when it is complete. Folders get their modes and times at the end, so that a restrictive
    mode does not disturb earlier steps.

    Args:
        top: a descriptor of the folder, which stays open.
        scratch: a descriptor of a folder on the same disk for incomplete files; `top` by default.
    """

    def __init__(self, top: int, scratch: Optional[int] = None) -> None:
        self.cursor = below.Cursor(top, below.CHANGE)
        self._scratch = top if scratch is None else scratch
        self._temporary = os.fsencode(".gpurun-%s" % os.urandom(8).hex())
        self._folders: List[Tuple[below.Parts, int, int]] = []
        self._file: Optional[int] = None

    def folder(self, entry: Listed) -> None:
        """Create a folder, or keep the existing one."""
        parts = below.parts_of(entry.path)
        above = self.cursor.at(parts[:-1])
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=above)
        except FileExistsError:
            if not _is_folder(above, parts[-1]):
                below.remove(above, parts[-1])
                os.mkdir(parts[-1], 0o700, dir_fd=above)
        self._folders.append((parts, entry.mode, entry.mtime_ns))

    def link(self, entry: Listed) -> None:
        """Create a symbolic link with any target."""
        parts = below.parts_of(entry.path)
        above, target = self.cursor.at(parts[:-1]), entry.target.encode("utf-8", "surrogateescape")
        try:
            os.symlink(target, parts[-1], dir_fd=above)
        except FileExistsError:
            below.remove(above, parts[-1])
            os.symlink(target, parts[-1], dir_fd=above)
        if entry.mtime_ns:
            os.utime(parts[-1], ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=above, follow_symlinks=False)

    def begin(self, entry: Listed, marks: List[int]) -> Tuple[int, Optional[Begun]]:  # noqa: ARG002
        """Return a descriptor of a new file without a name; `keep` names it, `drop` discards it."""
        self.drop()
        self._file = below.create(self._scratch, self._temporary)
        return self._file, None

    def keep(self, entry: Listed, marks: List[int]) -> None:
        """Give the begun file its name."""
        assert self._file is not None
        parts = below.parts_of(entry.path)
        above = self.cursor.at(parts[:-1])
        below.finish(self._file, entry.mode, marks[1])
        try:
            os.rename(self._temporary, parts[-1], src_dir_fd=self._scratch, dst_dir_fd=above)
        except IsADirectoryError:
            below.remove(above, parts[-1])
            os.rename(self._temporary, parts[-1], src_dir_fd=self._scratch, dst_dir_fd=above)
        os.close(self._file)
        self._file = None

    def drop(self) -> None:
        """Discard the begun file, if there is one."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            os.unlink(self._temporary, dir_fd=self._scratch)

    def close_folders(self) -> None:
        """Set the folders' modes and times, the deepest first."""
        for parts, mode, mtime_ns in sorted(self._folders, key=lambda folder: folder[0], reverse=True):
            inner = below.open_folder(self.cursor.at(parts[:-1]), parts[-1], below.CHANGE)
            try:
                below.finish(inner, mode, mtime_ns)
            finally:
                os.close(inner)

    def __enter__(self) -> "Maker":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self.cursor.__exit__()


def _is_folder(above: int, name: bytes) -> bool:
    try:
        os.close(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above))
    except OSError:
        return False
    return True


class Receiver:
    """Takes the frames of files' contents, one file after the other, and creates the files.

    Args:
        sink: creates the files.
    """

    def __init__(self, sink: "Sink") -> None:
        self._sink = sink
        self._incoming: Optional[Incoming] = None
        self._marks: List[int] = []

    def take(self, entry: Listed, header: Dict[str, Any], payload: frames.Bytes) -> Optional[str]:
        """Take the next frame of `entry`'s content.

        Returns:
            None: more frames follow; "": the file is complete; else why it failed.

        Raises:
            OpError: ``corrupt``: the data do not match the announcement.
        """
        if "from" in header and ("gone" in header or "whole" in header):
            raise OpError("corrupt", "the file continues, but its beginning did not arrive")
        if "gone" in header:
            self.forget()
            return str(header["gone"])[:200] or "the file is gone"
        if "marks" in header:
            self._begin(entry, header["marks"])
        if "whole" in header:
            return self._keep(entry, header, payload)
        incoming = self._incoming
        if incoming is None:
            raise OpError("corrupt", "the beginning of the file is missing")
        incoming.take(header, payload)
        if "sha" not in header:
            return None
        self._incoming = None
        if header.get("after") != self._marks:
            self._sink.drop()
            return CHANGING
        incoming.check(header["sha"])
        self._sink.keep(entry, self._marks)
        return ""

    def _keep(self, entry: Listed, header: Dict[str, Any], payload: frames.Bytes) -> str:
        """Create a small file, whose content is one frame. If the frame holds many files, it had their digest."""
        self._marks = marks = self._sound(header["whole"])
        if marks[0] != len(payload):
            raise OpError("corrupt", "%d of the file's %d bytes arrived" % (len(payload), marks[0]))
        if "sha" in header and header["sha"] != hashlib.sha256(payload).hexdigest():
            raise OpError("corrupt", "the file does not match its digest")
        descriptor, _ = self._sink.begin(entry, marks)
        if payload:
            write_all(descriptor, payload, 0)
        self._sink.keep(entry, marks)
        return ""

    def forget(self) -> None:
        """Discard the unfinished file, if there is one."""
        self._incoming = None
        self._sink.drop()

    @property
    def marks(self) -> List[int]:
        """Return the marks of the last begun file."""
        return self._marks

    def _begin(self, entry: Listed, marks: object) -> None:
        self._marks = self._sound(marks)
        descriptor, known = self._sink.begin(entry, self._marks)
        self._incoming = Incoming(descriptor, self._marks[0], known)

    def _sound(self, marks: Any) -> List[int]:
        sound = isinstance(marks, list) and len(marks) == 4 and set(map(type, marks)) == {int}
        if self._incoming is not None or not sound or not 0 <= marks[0] <= MOST or abs(marks[1]) > MOST:
            raise OpError("corrupt", "the file's size, times and mode are not valid: %.100r" % (marks,))
        return list(marks)
