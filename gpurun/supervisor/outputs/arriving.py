"""Ask hosts for digests of outputs, so that equal content of several hosts need not travel to be compared."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from json.encoder import encode_basestring_ascii
from typing import Any

from gpurun.errors import HostFailure
from gpurun.node.agent import frames
from gpurun.node.agent.frames import OpError
from gpurun.node.folder import below, contents
from gpurun.node.folder.below import Begun, ContentDigest, blocks
from gpurun.node.folder.contents import Listed, Receiver, Sink
from gpurun.quantities import count
from gpurun.remote.agent import Agent, Stream
from gpurun.state.clock import boot_id
from gpurun.state.durable import EarlySync
from gpurun.state.paths import may_pass
from gpurun.supervisor.outputs.listing import SILENCE_S, Origin, Sums, Unbrought, Versions
from gpurun.supervisor.outputs.plan import CopyPlan, OutputsRoom

# Files on their way to the head's copy of a job's outputs. After an interruption they stay, and the next copy
# continues.


NAME = b"outputs.arriving"
NEW, BEFORE, INDEX = b"new", b"before", b"index"
LEAST_BEGUN = 1 << 20
"""A smaller beginning is not worth a question."""
MOST_INDEX_BYTES = 512 << 20


class Arriving(Sink):
    """Arriving files, in a separate folder tree. A context manager; leaving it keeps the files.

    Args:
        home: a descriptor of the job's folder, which stays open.
    """

    def __init__(self, home: int) -> None:
        self._stack = ExitStack()
        self._home = home
        with suppress(FileExistsError):
            os.mkdir(NAME, 0o700, dir_fd=home)
        self._folder = self._opened(home, NAME)
        self._early = EarlySync(self._folder)
        self._known = _read_index(self._folder)
        self._old = self._stack.enter_context(below.Cursor(self._put_aside(), below.READ))
        self.cursor = self._stack.enter_context(below.Cursor(self._opened(self._folder, NEW), below.CHANGE))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        index = os.open(INDEX, flags, 0o600, dir_fd=self._folder)
        self._index = self._stack.enter_context(os.fdopen(index, "w"))
        self._index.write(json.dumps({"boot": boot_id()}) + "\n")
        self._folders: set[below.Parts] = set()
        self._at: tuple[str, below.Parts] = ("", ())
        self._begun: dict[str, Begun] = {}
        self._hosts: dict[str, str] = {}
        self._host = ""
        self._file: tuple[int, str] | None = None

    def _opened(self, above: int, name: bytes) -> int:
        descriptor = below.open_folder(above, name)
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _put_aside(self) -> int:
        """Return a descriptor of what the copy before left; `NEW` is then empty."""
        below.remove_entry(self._folder, BEFORE)
        try:
            os.rename(NEW, BEFORE, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileNotFoundError:
            os.mkdir(BEFORE, 0o700, dir_fd=self._folder)
        os.mkdir(NEW, 0o700, dir_fd=self._folder)
        return self._opened(self._folder, BEFORE)

    def resume(self, host: str, entry: Listed, *, check: Callable[[], object]) -> bool | Begun:
        """Return what an earlier copy left of a host's file: True for all of it, False for nothing.

        Args:
            check: called repeatedly; it may raise.
        """
        known = self._known.get((host, entry.path))
        if known is None or known["m"] != entry.marks:
            return False
        parts = below.parts_of(entry.path)
        try:
            above = self._old.at(parts[:-1])
            descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
        except OSError:
            return False
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_size > entry.size:
                return False
            is_whole = bool(known.get("w")) and (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns)
            if not is_whole and status.st_size < LEAST_BEGUN:
                return False
            begun = None if is_whole else Begun(entry.marks, status.st_size, _digest(descriptor, status.st_size, check))
        finally:
            os.close(descriptor)
        os.rename(parts[-1], parts[-1], src_dir_fd=above, dst_dir_fd=self._place(entry.path)[0])
        self._hosts[entry.path] = host
        self._say(host, entry.path, entry.marks, is_whole)
        if begun is None:
            return True
        self._begun[entry.path] = begun
        return begun

    def link_all(self, top: int, names: Mapping[str, str]) -> None:
        """Link files of the present copy here, each under a new name.

        Args:
            top: a descriptor of the present copy.
            names: new names, and the present ones.
        """
        with below.Cursor(top, below.READ) as source:
            for new, present in names.items():
                above, name = self._place(new)
                parts = below.parts_of(present)
                below.link_file(source.at(parts[:-1]), parts[-1], above, name)

    def of(self, host: str) -> None:
        """Set the host from which the next files come."""
        self._host = host

    def begin(self, entry: Listed, marks: list[int]) -> tuple[int, Begun | None]:
        """Return a descriptor for a file's content, and the existing beginning if it is of the same state."""
        begun = self._begun.get(entry.path)
        if begun is not None and begun.marks != marks:
            self._remove(entry.path)
            begun = None
        above, name = self._place(entry.path)
        if begun is None:
            descriptor = below.create_file(above, name)
        else:
            descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        self._begun.pop(entry.path, None)
        self._file = (descriptor, entry.path)
        self._hosts[entry.path] = self._host
        if marks[0] > LEAST_BEGUN:
            self._say(self._host, entry.path, marks, False)
            self._index.flush()
        return descriptor, begun

    def keep(self, entry: Listed, marks: list[int]) -> None:
        """Record that the begun file is complete."""
        assert self._file is not None
        below.finish(self._file[0], entry.mode, marks[1])
        self._close()
        self._say(self._host, entry.path, marks, True)
        self._early.wrote(marks[0])

    def drop(self) -> None:
        """Discard the begun file, if there is one."""
        if self._file is not None:
            path = self._file[1]
            self._close()
            self._remove(path)

    def forget(self, path: str) -> None:
        """Discard the beginning of a file whose rest does not arrive."""
        if self._begun.pop(path, None) is not None:
            self._remove(path)

    def held(self, path: str) -> int:
        """Return the bytes on disk of an arrived file."""
        above, name = self._place(path)
        return os.stat(name, dir_fd=above, follow_symlinks=False).st_blocks * 512

    def remove(self, path: str) -> None:
        """Discard an arrived file."""
        self._begun.pop(path, None)
        self._remove(path)

    def distrust(self, host: str) -> None:
        """Discard everything that came from a host whose data did not match its list."""
        self._close()
        for path in [path for path, whose in self._hosts.items() if whose == host]:
            self.remove(path)

    def break_off(self) -> bool:
        """Interrupt the copy; return whether anything has arrived that helps the next copy."""
        if self._file is not None and os.fstat(self._file[0]).st_size < LEAST_BEGUN:
            self.drop()
        try:
            self.end()
        except OSError:
            return False  # what was written may not be there
        return bool(self._hosts)

    def _remove(self, path: str) -> None:
        above, name = self._place(path)
        os.unlink(name, dir_fd=above)
        del self._hosts[path]

    def _place(self, path: str) -> tuple[int, bytes]:
        """Return a descriptor of the folder for a file, created if necessary, and the file's name."""
        folder, _, name = path.rpartition("/")
        if folder != self._at[0]:
            self._at = (folder, self._made(below.parts_of(folder) if folder else ()))
        return self.cursor.at(self._at[1]), name.encode("utf-8", "surrogateescape")

    def _made(self, parts: below.Parts) -> below.Parts:
        for depth in range(1, len(parts) + 1):
            if parts[:depth] not in self._folders:
                os.mkdir(parts[depth - 1], 0o700, dir_fd=self.cursor.at(parts[: depth - 1]))
                self._folders.add(parts[:depth])
        return parts

    def _close(self) -> None:
        if self._file is not None:
            descriptor, self._file = self._file[0], None
            os.close(descriptor)

    def _say(self, host: str, path: str, marks: list[int], is_whole: bool) -> None:
        named, at = encode_basestring_ascii(host), encode_basestring_ascii(path)
        self._index.write(f'{{"h": {named}, "p": {at}, "m": {marks}, "w": {is_whole:d}}}\n')

    def forget_others(self) -> None:
        """Remove files of an earlier copy that this copy does not need."""
        below.remove_entry(self._folder, BEFORE)

    def end(self) -> None:
        """Finish: everything has arrived. Raises OSError if the disk failed."""
        self._early.end()

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        with suppress(OSError):  # a copy that succeeds has called `end`
            self._early.end()
        self._stack.close()


def discard(home: int) -> None:
    """Remove everything that has arrived. Idempotent."""
    below.remove_entry(home, NAME)


def _read_index(folder: int) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Return the index of existing files, by host and path; nothing if the head has rebooted since."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for number, line in enumerate(_lines(folder)):
        if number == 0:
            if not boot_id() or line.get("boot") != boot_id():
                return {}
        elif isinstance(line.get("h"), str) and isinstance(line.get("p"), str):
            found[(line["h"], line["p"])] = {"m": line.get("m"), "w": line.get("w")}
    return found


def _lines(folder: int) -> Iterator[Mapping[str, Any]]:
    """Yield the index's lines; the last one may be incomplete."""
    try:
        descriptor = below.open_file(folder, INDEX)
    except OSError:
        return
    with open(descriptor, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
        if os.fstat(descriptor).st_size > MOST_INDEX_BYTES:
            return
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                return
            if isinstance(said, dict):
                yield said


def _digest(descriptor: int, size: int, check: Callable[[], object]) -> str:
    digest = ContentDigest()
    for number, (zeros, piece) in enumerate(blocks(descriptor, size)):
        digest.add(zeros, piece)
        if number % 64 == 0:
            check()
    return str(digest)


# Fetch the files that the next copy of a job's outputs needs from their hosts. They arrive beside the present copy.


class Arrival:
    """Fetches the files that the next copy needs."""

    def __init__(
        self,
        arriving: Arriving,
        room: OutputsRoom,
        versions: Versions,
        *,
        job: str,
        force: bool,
        cancelled: Callable[[], bool],
    ) -> None:
        self._arriving = arriving
        self._versions = versions
        self._room = room
        self._came = 0
        self._job = job
        self._force = force
        self._cancelled = cancelled
        self.unbrought: list[Unbrought] = []
        self.origins: dict[str, Origin] = {}

    def fetch_all(self, plan: CopyPlan, agents: Mapping[str, Agent]) -> None:
        """Fetch every planned file, from an earlier copy's files or from its host."""
        left = {host: self._resume(host, wanted) for host, wanted in plan.fetched.items()}
        self._arriving.forget_others()
        for host, (lacking, begun) in left.items():
            if lacking:
                self._arriving.of(host)
                self._fetch(agents[host], lacking, begun)
        for path, first in plan.twins.items():
            if first in self.origins:
                self.origins[path] = self.origins[first]

    def refused(self, refused: Sequence[tuple[str, OSError]]) -> None:
        """Report what the head's file system refuses, with everything below it."""
        for path, error in refused:
            lost = [path, *(name for name in self.origins if name.startswith(f"{path}/"))]
            for name in lost:
                host, _ = self.origins.pop(name, ("", []))
                self.unbrought.append(Unbrought(host, name, f"cannot be kept on the head ({error.strerror})"))

    def _resume(self, host: str, wanted: Sequence[Listed]) -> tuple[list[Listed], Mapping[str, Begun]]:
        """Return the files that a host must still send, and their beginnings that are here."""
        lacking, begun = [], {}
        for entry in wanted:
            left = self._arriving.resume(host, entry, check=lambda: self._check(host))
            if left is True:
                held = self._arriving.held(entry.path)
                if refused := self._room.refuses(entry, held, 0):
                    self._arriving.remove(entry.path)
                    self.unbrought.append(Unbrought(host, entry.path, refused, no_room=True))
                    continue
                self._room.end(entry, held)
                self.origins[entry.path] = (host, entry.marks)
                continue
            lacking.append(entry)
            if left:
                begun[entry.path] = left
        return lacking, begun

    def _check(self, host: str) -> None:
        if self._cancelled():
            raise HostFailure("the copy was cancelled", host=host)

    def _fetch(self, agent: Agent, wanted: Sequence[Listed], begun: Mapping[str, Begun]) -> None:
        """Fetch files from one host."""
        asked = contents.packed((self._question(entry, begun.get(entry.path)), b"") for entry in wanted)
        stream = agent.stream("outputs.read", job=self._job, force=self._force, payload_in=asked, silence_s=SILENCE_S)
        receiver, number, is_refused = Receiver(self._arriving), 0, False

        def pieces() -> Iterator[bytes]:
            for reply in stream:
                self._check(agent.host)
                yield reply.payload

        try:
            for frame in contents.unpacked(pieces()):
                if number == len(wanted) or frame.header.get("n") != number:
                    raise OpError("corrupt", "the host sent files that the head did not ask for")
                ended, is_refused = self._take(agent.host, wanted[number], receiver, frame, is_refused)
                number += ended
        except OpError as error:
            self._arriving.distrust(agent.host)
            name = f"{wanted[number].path!r:.200}: " if number < len(wanted) else ""
            raise HostFailure(
                f"the files that the host sent are not the job's outputs: {name}{error.message}", host=agent.host
            ) from error
        except _NoRoomError as error:
            for entry in wanted[number:]:
                self.unbrought.append(Unbrought(agent.host, entry.path, f"{error}", no_room=True))
                self._arriving.forget(entry.path)
            return
        finally:
            stream.close()
        if number < len(wanted):
            raise HostFailure(f"the host sent only {number} of {count(len(wanted), 'file')}", host=agent.host)

    def _question(self, entry: Listed, begun: Begun | None) -> dict[str, Any]:
        version = self._versions.get(entry.path)
        asked: dict[str, Any] = {"p": entry.path if version is None else version.path}
        return asked if begun is None else {**asked, "marks": begun.marks, "at": begun.size, "sha": begun.sha}

    def _take(
        self, host: str, entry: Listed, receiver: Receiver, frame: frames.Frame, is_refused: bool
    ) -> tuple[bool, bool]:
        """Take one frame; return whether the file's content has ended, and whether to skip the rest of it."""
        header, payload = frame
        ends = "whole" in header or "sha" in header or "gone" in header
        if is_refused:
            return ends, not ends
        self._came += len(payload)
        if refused := self._room.refuses(entry, self._came, len(payload)):
            receiver.forget()
            self._came = 0
            raise _NoRoomError(refused)
        try:
            why = receiver.take(entry, header, payload)
        except OSError as error:
            if may_pass(error):
                raise  # it ends everything; what else the head's file system refuses is one name
            self.unbrought.append(Unbrought(host, entry.path, f"cannot be kept on the head ({error.strerror})"))
            receiver.forget()
            self._arriving.forget(entry.path)
            self._came = 0
            return ends, not ends
        self._came += header.get("from", 0)  # the receiver knows that so much is there
        if why is None:
            return False, False
        if why:
            self.unbrought.append(Unbrought(host, entry.path, why))
            self._arriving.forget(entry.path)
        else:
            self._room.end(entry, self._came)
            self.origins[entry.path] = (host, receiver.marks)
        self._came = 0
        return True, False


class _NoRoomError(Exception):
    """What arrives does not fit, so no more of this host is taken."""


def ask_sums(agents: Mapping[str, Agent], doubtful: Mapping[str, Sequence[str]], job: str, *, force: bool) -> Sums:
    """Return digests of files by host and path. All hosts read at the same time. A file that changes has none.

    Args:
        doubtful: paths by host.
        force: as for `outputs.read`.

    Raises:
        HostFailure: a host fails, hangs or lies.
    """
    streams: dict[str, Stream] = {}
    try:
        for host, paths in doubtful.items():
            asked = contents.packed(({"p": path}, b"") for path in paths)
            streams[host] = agents[host].stream(
                "outputs.sums", job=job, force=force, payload_in=asked, silence_s=SILENCE_S
            )
        return {
            (host, path): found
            for host, stream in streams.items()
            for path, found in _sums(host, doubtful[host], stream).items()
        }
    finally:
        for stream in streams.values():
            stream.close()


def _sums(host: str, paths: Sequence[str], stream: Stream) -> Mapping[str, tuple[list[int], str]]:
    found, number = {}, 0
    try:
        for frame in contents.unpacked(reply.payload for reply in stream):
            said = frame.header
            if number == len(paths) or said.get("n") != number:
                raise OpError("corrupt", "the host sent digests of files that the head did not ask for")
            if "marks" in said:
                marks, sha = said["marks"], said.get("sha")
                if isinstance(marks, list) and isinstance(sha, str):
                    found[paths[number]] = (marks, sha)
                number += 1
    except OpError as error:
        raise HostFailure(f"the host's digests of outputs are damaged: {error.message}", host=host) from error
    if number < len(paths):
        raise HostFailure(f"the host sent only {number} of {len(paths)} digests", host=host)
    return found
