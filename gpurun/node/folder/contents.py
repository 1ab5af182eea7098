"""What a folder holds and the content of its files, as frames; both sides check what they receive.

A list of a folder has one header for each entry (`Listed.header`). A file's content has one or more, with payloads.
Small ones share a frame (`gpurun.node.folder.batches`). The headers of a content:

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

import collections
import hashlib
import os
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.folder import below, mapped
from gpurun.node.folder.batches import SMALL, Item
from gpurun.node.folder.beginnings import Begun
from gpurun.node.folder.holes import ContentDigest, blocks, seek
from gpurun.node.folder.walk import look

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
    for seen in look(top, below.READ if force else 0):
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
        collections.deque(mapped.changes_are_seen(descriptor, size), 0)
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
        for _ in mapped.changes_are_seen(descriptor, size):
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
