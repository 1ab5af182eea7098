"""Make a folder equal to one on the head: content, modes, links. Only new contents are sent.

File contents are kept by digest in a store in the user's cache folder, so the folder of the next job or attempt is
mostly copied from there.
"""

import hashlib
import os
import shutil
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.folder import below
from gpurun.node.folder.below import Entry, digest_of_file, forget, walk
from gpurun.node.folder.contents import Maker, write_all
from gpurun.node.transfer import blobs
from gpurun.node.transfer.spool import CHUNK, checked_digest

# The store never takes more than this share of its disk, least recently used contents going first.
SHARE = 0.05
LIKE = "sha256:"
"""Digests of code hash zeros, too (`gpurun.node.folder.below.ContentDigest`)."""
NEEDED_S = 3600.0
"""What a job was told is there, or what came for it, stays so long beyond that share: until its folder is made."""


def _folder() -> str:
    return os.path.join(os.path.dirname(blobs.spool_folder()), "files")


def _place(digest: str) -> str:
    name = checked_digest(digest)[len("sha256:") :]
    return os.path.join(_folder(), name[:2], name)


def lacking(call: Call, digests: List[str]) -> List[str]:
    """Return those contents that the store does not have; the others stay until `make` is called."""
    return [digest for digest in digests if not _is_here(digest)]


def _is_here(digest: str) -> bool:
    """Return whether the store has a content, and mark it as used now."""
    try:
        os.utime(_place(digest))
    except FileNotFoundError:
        return False
    return True


def add(call: Call) -> Dict[str, Any]:
    """Put contents into the store: the payload is a sequence of frames ``{"d", "end"}`` with pieces of them.

    Raises:
        OpError: ``corrupt``: a content does not have its digest.
    """
    decoder, received = frames.Decoder(), 0
    making: "Dict[str, _Making]" = {}
    try:
        for piece in call.chunks():
            for frame in decoder.feed(piece):
                digest = str(frame.header["d"])
                if digest not in making:
                    making[digest] = _Making(digest)
                making[digest].write(frame.payload)
                received += len(frame.payload)
                if frame.header.get("end"):
                    making.pop(digest).keep()
    finally:
        for unfinished in making.values():
            unfinished.drop()
    return {"bytes": received}


def unpack(call: Call, transfer: str, pack: str, index: Sequence[Tuple[str, int, int]]) -> None:
    """Put contents into the store that arrived as one blob of a transfer, at (digest, offset, size)."""
    blob = blobs.find_transfer(transfer).blob(pack)
    while not blob.wait_complete(0.5):
        call.check()
    for digest, offset, size in index:
        if _is_here(digest):
            continue
        making = _Making(digest)
        try:
            for start in range(offset, offset + size, CHUNK):
                with blob.file() as descriptor:
                    making.write(os.pread(descriptor, min(CHUNK, offset + size - start), start))
            making.keep()
        finally:
            making.drop()


class _Making:
    """One content on its way into the store."""

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._place = _place(digest)
        os.makedirs(os.path.dirname(self._place), mode=0o700, exist_ok=True)
        self._hash = hashlib.sha256()
        self._size = 0
        handle, self._temporary = tempfile.mkstemp(dir=_folder(), prefix="making-")
        self._file = os.fdopen(handle, "wb", buffering=0)

    def write(self, piece: frames.Bytes) -> None:
        self._hash.update(piece)
        write_all(self._file.fileno(), piece, self._size)
        self._size += len(piece)

    def keep(self) -> None:
        self._file.close()
        if "sha256:" + self._hash.hexdigest() != self._digest:
            self.drop()
            raise OpError("corrupt", "the content that arrived for %s has another digest" % self._digest)
        os.replace(self._temporary, self._place)

    def drop(self) -> None:
        """Discard it; does nothing once it is kept."""
        self._file.close()
        forget(self._temporary)


def make(call: Call, dest: str, entries: List[Sequence[Any]]) -> Dict[str, Any]:
    """Make `dest` a folder that holds exactly these entries; all contents are in the store.

    Keeps files that are right already, and verifies every other byte while it copies.

    Returns:
        ``{"written", "bytes"}``: files and bytes that had to be written.

    Raises:
        OpError: ``refused``: a name that leads out of the folder; ``not-found``: a content is not in the store;
            ``corrupt``.
    """
    wanted, written = [Entry(*entry) for entry in entries], []
    top = below.open_top(dest, make=True)
    try:
        os.fchmod(top, 0o700)
        kinds = _kinds(wanted)
        _remove_others(top, kinds)
        with Maker(top) as maker:

            def make_file(entry: Entry) -> None:
                if not _has(maker, entry):
                    _copy(maker, entry)
                    written.append(entry.size)

            make_entries(call, maker, wanted, make_file)
            maker.close_folders()
    finally:
        os.close(top)
    _evict()
    return {"written": len(written), "bytes": sum(written)}


def make_entries(call: Call, maker: Maker, entries: Sequence[Entry], make_file: Callable[[Entry], None]) -> None:
    """Create folders and links of code or of a data set, and call `make_file` for each file.

    Raises:
        OpError: ``refused``: an entry is of another kind.
    """
    makers = {"dir": maker.folder, "link": maker.link, "file": make_file}
    for entry in entries:
        call.check()
        if entry.kind not in makers:
            raise OpError("refused", "%.200r is a %.20r" % (entry.path, entry.kind))
        makers[entry.kind](entry)


def _kinds(entries: Sequence[Entry]) -> Dict[str, str]:
    kinds = {below.text_of_path(below.parts_of(entry.path)): entry.kind for entry in entries}
    if len(kinds) != len(entries):
        raise OpError("refused", "a name comes twice")
    for path in kinds:
        if kinds.get(os.path.dirname(path), "dir") != "dir":
            raise OpError("refused", "a part of the path %.200r is not a folder" % path)
    return kinds


def _remove_others(top: int, kinds: Dict[str, str]) -> None:
    """Remove entries that are not wanted, or are of another kind."""
    for found in walk(top, below.CHANGE):
        kind = None if found.status is None else below.kind_of(found.status.st_mode)
        if kind is None or kind != kinds.get(below.text_of_path(found.parts)):
            if kind is None:
                raise OpError("denied", "%r: %s" % (below.text_of_path(found.parts), found.why))
            below.remove_entry(found.above, found.parts[-1])


def _has(maker: Maker, entry: Entry) -> bool:
    """Return whether a file is there with that content; if so, give it the entry's mode and time."""
    parts = below.parts_of(entry.path)
    try:
        descriptor = below.open_file(maker.cursor.at(parts[:-1]), parts[-1], force=True)
    except FileNotFoundError:
        return False
    try:
        status = os.fstat(descriptor)
        # A file with several names is not ours alone: somebody else may write to it.
        if status.st_size != entry.size or status.st_nlink != 1 or digest_of_file(descriptor, LIKE) != entry.digest:
            return False
        below.finish(descriptor, entry.mode, entry.mtime_ns)
    finally:
        os.close(descriptor)
    return True


def _copy(maker: Maker, entry: Entry) -> None:
    """Copy a file's content out of the store into a file that `maker` begins, and verify it."""
    source, copied, position = _place(entry.digest), hashlib.sha256(), 0
    begun, _ = maker.begin(entry, [])
    with open(source, "rb", buffering=0) as file:
        os.utime(source)
        for piece in iter(lambda: file.read(CHUNK), b""):
            copied.update(piece)
            write_all(begun, piece, position)
            position += len(piece)
    if "sha256:" + copied.hexdigest() != entry.digest:
        forget(source)
        raise OpError("corrupt", "the stored copy of %s had changed, so gpurun removed the copy" % entry.digest)
    maker.keep(entry, [entry.size, entry.mtime_ns])


def _contents() -> Iterator[Tuple[float, int, str]]:
    """Yield (last used, size, path) of everything in the store."""
    for folder, _names, files in os.walk(_folder()):
        for name in files:
            place = os.path.join(folder, name)
            try:
                status = os.stat(place)
            except FileNotFoundError:
                continue
            yield status.st_mtime, status.st_size, place


def _evict() -> None:
    """Keep the store within its share of the disk."""
    if not os.path.isdir(_folder()):
        return
    contents = sorted(_contents())
    used = sum(size for _, size, _ in contents)
    limit = shutil.disk_usage(_folder()).total * SHARE
    for _, size, place in contents:
        if used <= limit:
            return
        if not _is_needed(place):
            forget(place)
            used -= size


def _is_needed(place: str) -> bool:
    """Return whether a job may be about to use a content of the store."""
    try:
        return 0 <= time.time() - os.stat(place).st_mtime < NEEDED_S
    except FileNotFoundError:
        return False


OPS = {"lacking": lacking, "add": add, "unpack": unpack, "make": make}
