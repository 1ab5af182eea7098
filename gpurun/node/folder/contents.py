"""What a folder holds and the content of its files, as frames; both sides check what they receive.

A list of a folder has one header for each entry (`Listed.header`). A file's content has one or more, with payloads.
Small ones share a frame (`gpurun.node.folder.contents`). The headers of a content:

========== =================================================================================================
``n``      the number of the file in the request
``whole``  the frame is a small file's content: the marks, ``[size, mtime_ns, ctime_ns, inode]``, before and after it
``marks``  the first frame: the marks before the file was read
``from``   the reader requested the rest: the content before this position is as the reader has it (`Begun`)
payload    the next bytes
``skip``   the next bytes are a hole of that length
``sha``    the last frame: SHA-256 of the content, in which a hole counts as ``hole:LENGTH;``, and what was there before
           ``from`` as ``from:POSITION:SHA;``. A ``whole`` one has it too, unless it shares a frame that has a digest
``after``  the last frame: the marks once the file was read; others than before: it changed meanwhile
``gone``   instead of all that: why there is no content
========== =================================================================================================
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import stat
import stat as modes
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

from gpurun.node.agent import frames
from gpurun.node.agent.frames import Call, OpError, OpReply
from gpurun.node.folder import below
from gpurun.node.folder.below import (
    Begun,
    ContentDigest,
    Entry,
    absolute,
    blocks,
    changes_are_seen,
    forget,
    open_file,
    parts_of,
    remove_path,
    seek,
    walk_folder,
)

# Send the items of a stream, each a header and bytes, in batches: small items share a frame and its digest.


Item = Tuple[Dict[str, Any], frames.Bytes]

SMALL = 16 << 10
"""Smaller items share a frame: each frame costs both sides some microseconds."""
TOGETHER_BYTES, MOST_TOGETHER = 64 << 10, 256
"""Items share a frame until they have so many bytes, or are so many."""
LONGEST = 1 << 20
FLUSH_S = 5.0
"""What a batch holds is sent after this long: silence means that the host hangs."""


def packed(items: Iterable[Item]) -> Iterator[frames.Bytes]:
    """Yield items as frames, as payloads of a stream."""
    batch, since_s = bytearray(), time.monotonic()
    heads: List[Tuple[Dict[str, Any], int]] = []
    small = bytearray()
    for header, payload in items:
        size = len(payload)
        if size >= SMALL:
            batch += _together(heads, small)
            heads, small = [], bytearray()
            batch += frames.prefix_of(header, size)
            batch += payload
        else:
            heads.append((header, size))
            small += payload
            if len(small) >= TOGETHER_BYTES or len(heads) == MOST_TOGETHER:
                batch += _together(heads, small)
                heads, small = [], bytearray()
        now_s = time.monotonic()
        if len(batch) >= frames.PIECE or now_s - since_s > FLUSH_S:
            batch += _together(heads, small)
            heads, small = [], bytearray()
            yield from _sent(batch)
            batch, since_s = bytearray(), now_s
    batch += _together(heads, small)
    yield from _sent(batch)


def _sent(batch: bytearray) -> Iterator[frames.Bytes]:
    if 0 < len(batch) <= LONGEST:
        yield batch
    else:
        yield from frames.pieces(batch, LONGEST)  # long names make long frames


def _together(heads: List[Tuple[Dict[str, Any], int]], payload: bytearray) -> bytes:
    if not heads:
        return b""
    together: Dict[str, Any] = {"all": heads}
    if payload:
        together["sha"] = hashlib.sha256(payload).hexdigest()
    try:
        return frames.encode(together, payload)
    except frames.FrameError:
        if len(heads) == 1:
            raise
    half = len(heads) // 2  # names may be very long
    first = sum(size for _, size in heads[:half])
    return _together(heads[:half], payload[:first]) + _together(heads[half:], payload[first:])


def unpacked(pieces: Iterable[frames.Bytes]) -> Iterator[frames.Frame]:
    """Yield the items that `packed` packed.

    Raises:
        OpError: ``corrupt``: these are not such frames, or the last one is incomplete.
    """
    decoder = frames.Decoder()
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                if "all" in frame.header:
                    yield from _apart(frame)
                else:
                    yield frame
    except frames.FrameError as error:
        raise OpError("corrupt", "%s" % error) from None
    if decoder.waits:
        raise OpError("corrupt", "the last frame is incomplete")


def _apart(together: frames.Frame) -> Iterator[frames.Frame]:
    heads, payload = together.header["all"], together.payload
    if payload and together.header.get("sha") != hashlib.sha256(payload).hexdigest():
        raise OpError("corrupt", "a frame does not match its digest")
    position = 0
    for head in heads if isinstance(heads, list) else [heads]:
        if not (isinstance(head, list) and len(head) == 2 and isinstance(head[0], dict) and type(head[1]) is int):
            raise OpError("corrupt", "a frame of several files is damaged")
        header, size = head
        if not 0 <= size <= len(payload) - position:
            raise OpError("corrupt", "a frame has a wrong size, %d bytes" % len(payload))
        yield frames.Frame(header, payload[position : position + size])
        position += size
    if position != len(payload):
        raise OpError("corrupt", "a frame has a wrong size, %d bytes" % len(payload))


WHOLE = frames.PIECE // 2
"""A file up to this size is one frame."""
CHANGING = "changed while it was read"
SETTLE_S = 0.03
"""No file system that the hosts have gives two changes that are this far apart the same time (a tick is 10 ms)."""
MOST = (1 << 63) - 1
"""No size, time or inode is larger. Times are cut there (the year 2262), of inodes the highest bit is left out."""


class Listed(NamedTuple):
    """One entry of a folder.

    Attributes:
        kind: ``file``, ``dir``, ``link``; anything else cannot be copied, and `why` has the reason.
        mode: permission bits.
        mark: shows a change of a file, besides size and time: ``(ctime_ns, inode)``.
        target: a link's target.
        stored: for a file with holes, how many bytes of it are stored; -1 = all.
    """

    path: str
    kind: str
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    mark: Tuple[int, ...] = ()
    target: str = ""
    why: str = ""
    stored: int = -1

    @property
    def data(self) -> int:
        """Return the number of bytes outside holes."""
        return min(self.size, self.stored) if self.stored >= 0 else self.size

    @property
    def marks(self) -> List[int]:
        """Return the marks as in the frames of its content."""
        return [self.size, self.mtime_ns, *self.mark]

    def header(self) -> Dict[str, Any]:
        """The entry as the header of a frame."""
        shown: Dict[str, Any] = {"p": self.path, "k": self.kind}
        if self.kind in ("dir", "file"):
            shown["m"] = self.mode
        if self.kind in ("dir", "file", "link"):
            shown["t"] = self.mtime_ns
        if self.kind == "file":
            shown["s"], shown["i"] = self.size, self.mark
        if self.stored >= 0:
            shown["b"] = self.stored
        if self.kind == "link":
            shown["to"] = self.target
        if self.why:
            shown["why"] = self.why
        return shown


Named = Union[Listed, Entry]
"""What can be created in a folder: of outputs, of code or of a data set."""


def listed(header: Dict[str, Any]) -> Listed:
    """Return the entry in the header of a frame.

    Raises:
        OpError: ``refused``: no folder can have such an entry.
    """
    path, kind = header.get("p"), header.get("k")
    parts = below.parts_of(path)
    target = header.get("to", "")
    if kind == "link" and not _is_target(target):
        raise OpError("refused", "the link %.200r has an impossible target, %.200r" % (path, target))
    mark = header.get("i", [])
    stored = header.get("b", -1)
    marks: List[Any] = list(mark) if isinstance(mark, (list, tuple)) else [""]
    numbers = [header.get("m", 0), header.get("t", 0), header.get("s", 0), *marks, stored]
    if set(map(type, numbers)) != {int} or max(numbers) > MOST or min(numbers) < -MOST or numbers[2] < 0:
        raise OpError("refused", "%.200r has an impossible size, time or owner" % (path,))
    why = "" if kind in ("file", "dir", "link") else str(header.get("why") or "cannot be copied")[:200]
    return Listed(
        below.text_of_path(parts), str(kind)[:20], numbers[0] & 0o777, numbers[1], numbers[2], tuple(marks),
        target if kind == "link" else "", why, stored if kind == "file" else -1,
    )  # fmt: skip


def _is_target(target: object) -> bool:
    try:
        raw = target.encode("utf-8", "surrogateescape") if isinstance(target, str) else b""
    except UnicodeEncodeError:
        return False
    return 0 < len(raw) < 4096 and b"\0" not in raw


def entries(top: int, force: bool = False) -> Iterator[Listed]:
    """Yield everything below a folder, each folder before its content.

    Args:
        force: look into folders of ours whose modes keep us out.
    """
    for seen in walk_folder(top, below.READ if force else 0):
        folder = below.text_of_path((*seen.parts, b""))
        for name, status, why in seen.found:
            entry = entry_of(folder + below.text_of_path((name,)), seen.above, status, why)
            if entry is not None:
                yield entry


def names(top: int) -> Iterator[Listed]:
    """Do the same as `entries` with `force`, but with neither marks nor modes of files, and without reading their
    status.
    """
    with below.Cursor(top, below.READ) as cursor:
        waiting: List[below.Parts] = [()]
        while waiting:
            parts = waiting.pop()
            try:
                above, folder = cursor.at(parts), below.text_of_path((*parts, b""))
            except FileNotFoundError:
                continue
            others = []
            with os.scandir(above) as found:
                for each in found:
                    name = os.fsencode(each.name)
                    if each.is_file(follow_symlinks=False):
                        path = folder + below.text_of_path((name,))
                        yield Listed(path, "file")
                    else:
                        others.append(name)
            for name in others:
                try:
                    status = os.stat(name, dir_fd=above, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                entry = entry_of(folder + below.text_of_path((name,)), above, status, "")
                if entry is not None:
                    yield entry
                    waiting += [(*parts, name)] if entry.kind == "dir" else []


def entry_of(path: str, above: int, status: Optional[os.stat_result], why: str) -> Optional[Listed]:
    """Return an entry found below the open folder `above`; None if it is a link that was replaced meanwhile."""
    if status is None:
        return Listed(path, "unreadable", why=why)
    kind = below.kind_of(status.st_mode)
    if kind == "file":
        size, mtime_ns, *mark = marks_of(status)
        return Listed(path, kind, status.st_mode & 0o777, mtime_ns, size, tuple(mark), stored=stored_of(status))
    target = ""
    if kind == "link":
        name = path.rpartition("/")[2].encode("utf-8", "surrogateescape")
        try:
            target = os.readlink(name, dir_fd=above).decode("utf-8", "surrogateescape")
        except OSError:
            return None  # it was replaced meanwhile; the next listing shows by what
    why = "" if kind in ("dir", "link") else "is a %s" % kind
    size, mtime_ns = marks_of(status)[:2]
    return Listed(path, kind, status.st_mode & 0o777, mtime_ns, size, (), target, why)


def stored_of(status: os.stat_result) -> int:
    """Return how many bytes are stored of a file with holes; -1 for a file without."""
    held = status.st_blocks * 512
    return held if held < status.st_size else -1


def content(
    number: int, descriptor: int, status: os.stat_result, known: Optional[Begun] = None, is_live: bool = False
) -> Iterator[Item]:
    """Yield a regular file's content. Its marks before and after are equal only if the file did not change meanwhile.

    Args:
        status: of the file, before anything was read.
        known: what the reader has. If the file has not changed and begins with exactly that, only the rest is sent.
        is_live: programs may have mapped the file; its marks show a later change.
    """
    before = _settled(descriptor, status)
    if before.st_size <= WHOLE:
        yield _whole(number, descriptor, before, is_live)
    else:
        yield from _large(number, descriptor, before, known, is_live)


def _whole(number: int, descriptor: int, before: os.stat_result, is_live: bool) -> Item:
    """Return the content of a small file."""
    size = before.st_size
    if is_live:
        collections.deque(changes_are_seen(descriptor, size), 0)
    piece = os.pread(descriptor, size, 0) if size else b""
    after = os.fstat(descriptor)
    is_same = after.st_ctime_ns == before.st_ctime_ns and after.st_mtime_ns == before.st_mtime_ns
    if not is_same or not len(piece) == size == after.st_size:
        return {"n": number, "gone": CHANGING}, b""
    if size < SMALL:
        return {"n": number, "whole": marks_of(before)}, piece
    return {"n": number, "whole": marks_of(before), "sha": hashlib.sha256(piece).hexdigest()}, piece


def _large(
    number: int, descriptor: int, before: os.stat_result, known: Optional[Begun], is_live: bool
) -> Iterator[Item]:
    """Yield the content of a large file in pieces."""
    marks, size = marks_of(before), before.st_size
    whole = hashlib.sha256()
    yield {"n": number, "marks": marks}, b""
    if is_live:
        for _ in changes_are_seen(descriptor, size):
            yield {"n": number}, b""  # a sign of life
    position = 0
    if known is not None and known.marks == marks and known.size <= size:
        beginning = ContentDigest()
        for zeros, piece in blocks(descriptor, known.size):
            beginning.add(zeros, piece)
            yield {"n": number}, b""  # a sign of life
        if str(beginning) == known.sha:
            position = known.size
            whole.update(known.counted())
            yield {"n": number, "from": position}, b""
    sparse = before.st_blocks * 512 < size
    for skip, piece in extents(descriptor, position, size, sparse):
        if skip:
            whole.update(b"hole:%d;" % skip)
            yield {"n": number, "skip": skip}, b""
        else:
            whole.update(piece)
            yield {"n": number}, piece
    yield {"n": number, "sha": whole.hexdigest(), "after": marks_of(os.fstat(descriptor))}, b""


def marks_of(status: os.stat_result) -> List[int]:
    """Return the values that show a change of a file."""
    mtime_ns, ctime_ns = status.st_mtime_ns, status.st_ctime_ns
    if not (-MOST <= mtime_ns <= MOST and -MOST <= ctime_ns <= MOST):
        mtime_ns, ctime_ns = (max(-MOST, min(MOST, time_ns)) for time_ns in (mtime_ns, ctime_ns))
    return [status.st_size, mtime_ns, ctime_ns, status.st_ino & MOST]


def _settled(descriptor: int, status: os.stat_result) -> os.stat_result:
    """Return the status of a file after waiting until a later change would get another time."""
    if 0 <= time.time_ns() - status.st_ctime_ns < SETTLE_S * 1e9:
        time.sleep(SETTLE_S)
        status = os.fstat(descriptor)
    return status


def extents(descriptor: int, position: int, size: int, sparse: bool) -> Iterator[Tuple[int, bytes]]:
    """Yield (length of a hole, b"") or (0, bytes), from `position` up to `size`."""
    while position < size:
        end = size
        if sparse:
            data = seek(descriptor, position, os.SEEK_DATA, size)
            if data > position:
                yield data - position, b""
                position = data
            end = seek(descriptor, position, os.SEEK_HOLE, size)
        while position < end:
            piece = os.pread(descriptor, min(frames.PIECE, end - position), position)
            if not piece:
                return  # it was cut: its marks tell
            position += len(piece)
            yield 0, piece


def write_all(descriptor: int, payload: frames.Bytes, position: int) -> None:
    """Write bytes at a position of a file."""
    written = os.pwrite(descriptor, payload, position)
    while written < len(payload):
        written += os.pwrite(descriptor, memoryview(payload)[written:], position + written)


class Incoming:
    """Writes the arriving content of one file.

    Args:
        descriptor: the file, open for writing. It is empty, or has the beginning that is `known`.
        size: the file's full size.
        known: the sender may continue after this beginning, if it was asked to.
    """

    def __init__(self, descriptor: int, size: int, known: Optional[Begun] = None) -> None:
        self._descriptor = descriptor
        self._size = size
        self._known = known
        self._position = 0
        self._ends_with_hole = False
        self._whole = hashlib.sha256()

    def take(self, header: Dict[str, Any], payload: frames.Bytes) -> None:
        """Write the next frame.

        Raises:
            OpError: ``corrupt``: it exceeds the file's size, or continues after a beginning that is not there.
        """
        if "from" in header:
            self._go_on(header["from"])
        skip = header.get("skip", 0)
        if type(skip) is not int or skip < 0 or self._position + skip + len(payload) > self._size:
            raise OpError("corrupt", "the file has more than the announced %d bytes" % self._size)
        if self._known is not None and (skip or payload):
            os.ftruncate(self._descriptor, 0)  # it comes from its beginning
            self._known = None
        if skip:
            self._whole.update(b"hole:%d;" % skip)
            self._position += skip
            self._ends_with_hole = True
        if payload:
            self._ends_with_hole = False
        self._whole.update(payload)
        write_all(self._descriptor, payload, self._position)
        self._position += len(payload)

    def _go_on(self, position: object) -> None:
        if self._known is None or position != self._known.size or self._known.size > self._size:
            raise OpError("corrupt", "the file continues at %.40r, which was not requested" % (position,))
        self._whole.update(self._known.counted())
        self._position, self._known = self._known.size, None

    def check(self, sha: object) -> None:
        """Finish: everything has arrived.

        Raises:
            OpError: ``corrupt``: less arrived than announced, or the digest differs.
        """
        if self._position != self._size or sha != self._whole.hexdigest():
            raise OpError(
                "corrupt", "the file is incomplete or damaged: %d of %d bytes arrived" % (self._position, self._size)
            )
        if self._known is not None or self._ends_with_hole:
            os.ftruncate(self._descriptor, self._size)


# Stream the content of a folder: regular files in rows, many at once; all other entries one by one.


Rows = Tuple[str, int]
"""Names rows: their folder, and the number of the first name."""
LeavesOut = Callable[[below.Parts, int, Optional[os.stat_result]], bool]
"""Is asked with an entry's path, its open folder, and its status, if that could be read."""


def known_rows(said: Iterable[frames.Frame]) -> Dict[Rows, str]:
    """Return the rows that the reader has, with their SHA-256."""
    return {(str(header.get("in")), int(header.get("at", 0))): str(header.get("sha")) for header, _ in said}


def list_below(
    top: int, force: bool, known: Dict[Rows, str], above: str = "", leaves_out: LeavesOut = lambda *_: False
) -> Iterator[Item]:
    """Yield everything below a folder, each folder before its content.

    Args:
        force: look into folders of ours whose modes keep us out.
        known: rows that the reader has.
        above: the folder's own path in the list; "" = it is the list's top.
        leaves_out: returns whether an entry is no part of the list. It is asked for what is in a folder, too.
    """
    prefix = (os.fsencode(above),) if above else ()
    for seen in walk_folder(top, below.READ if force else 0):
        folder = below.text_of_path(prefix + seen.parts)
        rows: List[Any] = []
        for raw, status, why in seen.found:
            if leaves_out((*seen.parts, raw), seen.above, status):
                continue
            name = raw.decode("utf-8", "surrogateescape")
            if status is not None and stat.S_ISREG(status.st_mode):
                size, mtime_ns, ctime_ns, inode = marks_of(status)
                stored = stored_of(status)
                rows.append((name, status.st_mode & 0o777, mtime_ns, size, ctime_ns, inode, stored))
                continue
            entry = entry_of(folder + "/" + name if folder else name, seen.above, status, why)
            if entry is not None:
                yield entry.header(), b""
        if rows:
            yield _item(folder, seen.at, rows, known)


def _item(folder: str, at: int, rows: List[Any], known: Dict[Rows, str]) -> Item:
    payload = json.dumps(rows, separators=(",", ":")).encode("ascii")
    if known.get((folder, at)) == hashlib.sha256(payload).hexdigest():
        return {"in": folder, "at": at, "same": 1}, b""
    return {"in": folder, "at": at}, payload


# Create files, folders and links below a directory descriptor, as copies of another folder's.


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

    def folder(self, entry: Named) -> None:
        """Create a folder, or keep the existing one."""
        parts = below.parts_of(entry.path)
        above = self.cursor.at(parts[:-1])
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=above)
        except FileExistsError:
            if not _is_folder(above, parts[-1]):
                below.remove_entry(above, parts[-1])
                os.mkdir(parts[-1], 0o700, dir_fd=above)
        self._folders.append((parts, entry.mode, entry.mtime_ns))

    def link(self, entry: Named) -> None:
        """Create a symbolic link with any target."""
        parts = below.parts_of(entry.path)
        above, target = self.cursor.at(parts[:-1]), entry.target.encode("utf-8", "surrogateescape")
        try:
            os.symlink(target, parts[-1], dir_fd=above)
        except FileExistsError:
            below.remove_entry(above, parts[-1])
            os.symlink(target, parts[-1], dir_fd=above)
        if entry.mtime_ns:
            os.utime(parts[-1], ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=above, follow_symlinks=False)

    def begin(self, entry: Named, marks: List[int]) -> Tuple[int, Optional[Begun]]:  # noqa: ARG002
        """Return a descriptor of a new file without a name; `keep` names it, `drop` discards it."""
        self.drop()
        self._file = below.create_file(self._scratch, self._temporary)
        return self._file, None

    def keep(self, entry: Named, marks: List[int]) -> None:
        """Give the begun file its name."""
        assert self._file is not None
        parts = below.parts_of(entry.path)
        above = self.cursor.at(parts[:-1])
        below.finish(self._file, entry.mode, marks[1])
        try:
            os.rename(self._temporary, parts[-1], src_dir_fd=self._scratch, dst_dir_fd=above)
        except IsADirectoryError:
            below.remove_entry(above, parts[-1])
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


# Small files on the host. Paths are absolute.


def write_file(call: Call, path: str, mode: int = 0o600, fsync: bool = False) -> Dict[str, Any]:
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


def read_file(call: Call, path: str, max_bytes: int = 1 << 20, offset: int = 0) -> OpReply:
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


def stat_file(call: Call, path: str) -> Optional[Dict[str, Any]]:
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
    "write": write_file,
    "read": read_file,
    "mkdir": mkdir,
    "rmtree": rmtree,
    "stat": stat_file,
    "listdir": listdir,
    "df": df,
}
