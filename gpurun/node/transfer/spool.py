"""Content-addressed blobs while they arrive: each chunk is verified before anything can read it.

A blob is announced with its size and the SHA-256 of every chunk. Chunks may arrive in any order and from any source; a
chunk with another hash is refused. Readers wait for the chunk that they need, so a host can forward and load a blob
while it is still arriving. The files are sparse; the next transfer verifies and uses what an interrupted one left.
"""

from __future__ import annotations

import bisect
import collections
import fcntl
import hashlib
import hmac
import os
import re
import stat
import threading
import time
import zlib
from collections import OrderedDict
from contextlib import contextmanager
from itertools import accumulate
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.frames import OpError
from gpurun.node.folder import below
from gpurun.node.folder.below import forget

# Limit the sending rate.


class Pace:
    """Limits the rate to this many bytes per second; None = unlimited."""

    def __init__(self, bytes_per_s: Optional[float]) -> None:
        self._rate = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def spend(self, amount: int) -> None:
        """Wait until `amount` more bytes may be sent."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.1) + amount / self._rate
            pause = self._free_at - now
        if pause > 0:
            time.sleep(pause)


# A host forwards a chunk when it has all of it: sixteen hosts in a row then add sixteen chunks' time to a transfer.
CHUNK = 256 << 10
HASH_BYTES = 32
ZEROS_HASH = hashlib.sha256(bytes(CHUNK)).digest()
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
# Files of a transfer that was never resumed are removed after a day.
STALE_S = 24 * 3600.0
# Closing a blob waits this long for threads that read or write its file.
CLOSE_WAIT_S = 2.0


class Corrupt(OpError):
    """A chunk does not match its announced hash."""

    def __init__(self, digest: str, index: int) -> None:
        message = "chunk %d of %s does not match its hash" % (index, digest)
        super().__init__("corrupt", message, digest=digest, index=index)


class ChunkHashes:
    """The hashes of a blob's chunks, while its bytes come one after the other.

    Attributes:
        size: how many bytes came.
    """

    def __init__(self) -> None:
        self.size = 0
        self._done = bytearray()
        self._chunk = hashlib.sha256()

    def add(self, piece: "bytes | memoryview") -> None:
        """Add the next piece, of any size."""
        view = memoryview(piece)
        while view:
            part = view[: CHUNK - self.size % CHUNK]
            self._chunk.update(part)
            self.size, view = self.size + len(part), view[len(part) :]
            if self.size % CHUNK == 0:
                self._done += self._chunk.digest()
                self._chunk = hashlib.sha256()

    def skip(self, zeros: int) -> None:
        """Add that many zeros. Whole chunks of them cost nothing."""
        first = min(zeros, -self.size % CHUNK)
        self.add(bytes(first))
        whole = (zeros - first) // CHUNK
        self._done += ZEROS_HASH * whole
        self.size += whole * CHUNK
        self.add(bytes(zeros - first - whole * CHUNK))

    def hashes(self) -> bytes:
        """Return the hashes of all chunks, one after the other."""
        return bytes(self._done) + (self._chunk.digest() if self.size % CHUNK else b"")


def runs_of_zeros(hashes: bytes) -> Iterator[Tuple[int, int]]:
    """Yield (number of the first, how many) of the chunks that are zeros, by their hashes."""
    many = ZEROS_HASH * 1024
    at = hashes.find(ZEROS_HASH)
    while at >= 0:
        end = at
        if at % HASH_BYTES == 0:
            while hashes.startswith(many, end):
                end += len(many)
            while hashes.startswith(ZEROS_HASH, end):
                end += HASH_BYTES
            yield at // HASH_BYTES, (end - at) // HASH_BYTES
        at = hashes.find(ZEROS_HASH, max(end, at + 1))


def stored_of(hashes: bytes, size: int) -> int:
    """Return how many of a blob's bytes a host must store: those outside of chunks of zeros."""
    return max(0, size - CHUNK * sum(count for _, count in runs_of_zeros(hashes)))


def checked_digest(digest: str) -> str:
    """Return the digest if it is valid, because it becomes a file's name.

    Raises:
        OpError: ``bad-request``.
    """
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise OpError("bad-request", "%r is not a sha256 digest" % (digest,))
    return digest


class Blob:
    """One blob, complete or arriving. Thread-safe.

    Args:
        hashes: of all chunks, 32 bytes each.
        descriptor: the file, open for reading and (unless `complete`) writing; the blob owns it.
        complete: the file's content is known to be right.
    """

    def __init__(self, digest: str, size: int, hashes: bytes, descriptor: int, complete: bool = False) -> None:
        count = (size + CHUNK - 1) // CHUNK
        if size < 0 or len(hashes) != count * HASH_BYTES:
            raise OpError(
                "bad-request", "%s has %d bytes, but a wrong number of hashes (%d bytes)" % (digest, size, len(hashes))
            )
        self.digest = digest
        self.size = size
        self.count = count
        self._descriptor = descriptor
        self._users = 0
        self._hashes = hashes
        self._have = bytearray((b"\1" if complete else b"\0") * count)
        self._missing = 0 if complete else count
        self._arrived = threading.Condition()
        self._closed = False

    @property
    def complete(self) -> bool:
        """True when every chunk is there."""
        return self._missing == 0

    @property
    def have_bytes(self) -> int:
        """Return how many bytes have arrived."""
        if self.complete:
            return self.size
        whole = (self.count - self._missing) * CHUNK
        last_is_here = self.count > 0 and self._have[-1]
        return whole - (self.count * CHUNK - self.size) if last_is_here else whole

    def length(self, index: int) -> int:
        """Return the size of one chunk: `CHUNK`, less for the last."""
        return min(CHUNK, self.size - index * CHUNK)

    @contextmanager
    def file(self) -> Iterator[int]:
        """Yield the file's descriptor and keep it open meanwhile, because a closed descriptor's number may be reused.

        Raises:
            OpError: ``closed``.
        """
        with self._arrived:
            if self._closed:
                raise OpError("closed", "the transfer of %s has ended" % self.digest)
            self._users += 1
        try:
            yield self._descriptor
        finally:
            with self._arrived:
                self._users -= 1
                self._arrived.notify_all()
                is_last = self._closed and not self._users and self._descriptor >= 0
            if is_last:
                self._let_go()

    def take_up(self) -> None:
        """Verify and use what the file already holds from an interrupted transfer."""
        with self.file() as descriptor:
            end = os.fstat(descriptor).st_size
            position = 0
            while position < end:
                try:
                    position = os.lseek(descriptor, position, os.SEEK_DATA)
                except OSError:
                    break  # only a hole is left
                index = position // CHUNK
                if index >= self.count:
                    break
                piece = os.pread(descriptor, self.length(index), index * CHUNK)
                if self._is(index, piece):
                    self._mark(index)
                position = (index + 1) * CHUNK

    def take_holes(self) -> None:
        """Count the whole chunks of zeros as arrived: the file is new, and one hole."""
        for first, found in runs_of_zeros(self._hashes):
            self.take(first, min(found, self.size // CHUNK - first))

    def take(self, first: int, count: int) -> None:
        """Count chunks as arrived: their content is in the file, and is right."""
        if count > 0:
            with self._arrived:
                self._missing -= self._have.count(0, first, first + count)
                self._have[first : first + count] = b"\1" * count
                self._arrived.notify_all()

    def _is(self, index: int, piece: "bytes | memoryview") -> bool:
        expected = self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        return len(piece) == self.length(index) and hmac.compare_digest(hashlib.sha256(piece).digest(), expected)

    def _mark(self, index: int) -> None:
        with self._arrived:
            if not self._have[index]:
                self._have[index] = 1
                self._missing -= 1
            self._arrived.notify_all()

    def write(self, index: int, piece: "bytes | memoryview") -> bool:
        """Store a chunk; return False if it was there already.

        Raises:
            Corrupt: it does not match the announced hash.
            OpError: ``closed``.
            OSError: the disk is full or broken.
        """
        if not 0 <= index < self.count:
            raise OpError("bad-request", "%s has no chunk %d" % (self.digest, index))
        if self._have[index]:
            return False
        if not self._is(index, piece):
            raise Corrupt(self.digest, index)
        view, position = memoryview(piece), index * CHUNK
        with self.file() as descriptor:
            while view:
                written = self._write_at(descriptor, view, position)
                view, position = view[written:], position + written
        self._mark(index)
        return True

    def _write_at(self, descriptor: int, view: memoryview, position: int) -> int:
        """Write the beginning of `view`; return how many bytes."""
        return os.pwrite(descriptor, view, position)

    def _read_at(self, descriptor: int, view: memoryview, position: int) -> int:
        """Fill the beginning of `view`; return how many bytes, 0 at the end of the content."""
        return os.preadv(descriptor, [view], position)

    def wait(self, index: int, timeout_s: float) -> bool:
        """Wait until a chunk is there; return False if it is not within `timeout_s`.

        Raises:
            OpError: ``closed``: it will never be there.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._have[index] or self._closed, timeout_s)
            if self._closed:
                raise OpError("closed", "the transfer of %s has ended" % self.digest)
            return bool(self._have[index])

    def wait_complete(self, timeout_s: float) -> bool:
        """Wait until the whole blob is there; return False if it is not within `timeout_s`."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._missing == 0 or self._closed, timeout_s)
            if self._closed:
                raise OpError("closed", "the transfer of %s has ended" % self.digest)
            return self._missing == 0

    def read_into(self, index: int, buffer: memoryview) -> memoryview:
        """Return a chunk that is there, as the part of `buffer` it fills.

        Raises:
            OpError: ``closed``.
            OSError: the file cannot be read, or has been shortened.
        """
        view = buffer[: self.length(index)]
        done = 0
        with self.file() as descriptor:
            while done < len(view):
                count = self._read_at(descriptor, view[done:], index * CHUNK + done)
                if count == 0:
                    raise OSError("the file of %s has been truncated" % self.digest)
                done += count
        return view

    def holds(self, index: int) -> bool:
        """Read and hash a chunk; return whether the file has the announced one."""
        try:
            return self._is(index, self.read_into(index, memoryview(bytearray(CHUNK))))
        except (OSError, OpError):
            return False

    def lacks(self, first: int, last: int) -> bool:
        """Return whether one of these chunks is missing."""
        return self._have.find(b"\0", first, last + 1) >= 0

    def missing(self) -> List[Tuple[int, int]]:
        """Return the missing chunks, as ranges (first, last)."""
        ranges: List[Tuple[int, int]] = []
        with self._arrived:
            have = bytes(self._have)
        index = have.find(b"\0")
        while index >= 0:
            end = have.find(b"\1", index)
            last = (end if end >= 0 else len(have)) - 1
            ranges.append((index, last))
            index = have.find(b"\0", last + 1)
        return ranges

    def close(self) -> None:
        """Wake all waiting readers, and close the file once nothing reads or writes it. Idempotent."""
        with self._arrived:
            if self._closed:
                return
            self._closed = True
            self._arrived.notify_all()
            is_unused = self._arrived.wait_for(lambda: not self._users, CLOSE_WAIT_S)
        if is_unused:
            self._let_go()

    def _let_go(self) -> None:
        with self._arrived:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Spool:
    """One host's folder where blobs arrive; one object for each transfer, all on the same files.

    Two transfers never write to one file: the second gets a separate file, which is removed with it.
    """

    def __init__(self, folder: str, transfer: str) -> None:
        self.folder = folder
        self._transfer = transfer
        self._paths: Dict[str, str] = {}
        os.makedirs(folder, mode=0o700, exist_ok=True)
        sweep(folder)

    def open(self, digest: str, size: int, hashes: bytes) -> Blob:
        """Return a blob to receive, with whatever an earlier transfer left of it."""
        path = os.path.join(self.folder, checked_digest(digest)[len("sha256:") :] + ".part")
        descriptor = _locked(path)
        if descriptor is None:
            path = "%s.%s" % (path, self._transfer)
            descriptor = _locked(path)
            if descriptor is None:
                raise OpError("conflict", "another transfer uses %s" % path)
        self._paths[digest] = path
        os.ftruncate(descriptor, min(size, os.fstat(descriptor).st_size))
        blob = Blob(digest, size, hashes, descriptor)
        blob.take_up()
        return blob

    def forget(self, digest: str) -> None:
        """Remove a blob's file. Processes that have it open can still read it."""
        path = self._paths.pop(digest, None)
        if path is not None:
            forget(path)

    def drop_private(self) -> None:
        """Remove the files that only this transfer could have used again."""
        for digest, path in list(self._paths.items()):
            if path.endswith("." + self._transfer):
                self.forget(digest)


def sweep(folder: str, unused_s: float = STALE_S) -> int:
    """Remove leftovers of transfers that were unused for this long; return the freed bytes."""
    freed = 0
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or time.time() - status.st_mtime < unused_s:
                continue
            descriptor = _locked(path, os.O_RDWR)
        except FileNotFoundError:  # its transfer has just ended
            continue
        except OSError as error:
            if error.errno not in below.NO_LOCKS:
                raise
            descriptor = -1  # no transfer receives such a file without a lock
        if descriptor is not None:
            forget(path)
            freed += status.st_blocks * 512
            if descriptor >= 0:
                os.close(descriptor)
    return freed


def _locked(path: str, flags: int = os.O_RDWR | os.O_CREAT) -> Optional[int]:
    """Return the file, created if missing, open and locked; None if another process has it.

    Raises:
        FileNotFoundError: it is missing and must not be created.
    """
    while True:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed while we waited for it: take the new one


# Compressed chunks: the head compresses a chunk once, hosts pass on the compressed bytes and decompress for themselves.


# Packed chunks a host remembers for those it passes them on to; who is further behind gets them unpacked.
MEMORY_BYTES = 8 << 20


class Remembered:
    """The last compressed chunks that this process has received or made. Thread-safe."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._packs: "OrderedDict[Tuple[str, int], bytes]" = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, digest: str, index: int, packed: bytes) -> None:
        """Add one."""
        with self._lock:
            if (digest, index) not in self._packs:
                self._packs[digest, index] = packed
                self._bytes += len(packed)
            while self._bytes > self._limit_bytes:
                self._bytes -= len(self._packs.popitem(last=False)[1])

    def get(self, blob: Blob, index: int, piece: frames.Bytes) -> Optional[bytes]:  # noqa: ARG002 - for the head's
        """Return the compressed form of `piece`, which is chunk `index` of `blob`; None = send it uncompressed."""
        with self._lock:
            return self._packs.get((blob.digest, index))


def unpack_bytes(packed: frames.Bytes) -> bytes:
    """Return the chunk; never more than a chunk, whatever the compressed bytes say.

    Raises:
        OpError: ``corrupt``: it is not a compressed chunk.
    """
    unpacker = zlib.decompressobj()
    try:
        piece = unpacker.decompress(packed, CHUNK)
    except zlib.error as error:
        raise OpError("corrupt", "a chunk cannot be unpacked: %s" % error) from None
    if not unpacker.eof:
        raise OpError("corrupt", "a chunk is too long after unpacking")
    return piece


# A blob whose content is that of many files, one after the other: a data set.


_OPEN_AT_ONCE = 32


class ManyFiles:
    """The content of files below a folder, as one. Thread-safe.

    Args:
        top: a descriptor of the folder; `close` closes it.
        files: path and size of each, in order.
        force: also read what the modes of our own files and folders keep from us.
    """

    def __init__(self, top: int, files: Iterable[Tuple[str, int]], writable: bool = False, force: bool = False) -> None:
        listed = [(path, size) for path, size in files if size]
        self._top = top
        self._paths = [path for path, _ in listed]
        self._starts: List[int] = list(accumulate((size for _, size in listed), initial=0))
        self._writable, self._force = writable, force
        self._cursor = below.Cursor(top, below.READ if force else 0)
        self._descriptors: "collections.OrderedDict[int, int]" = collections.OrderedDict()
        self._lock = threading.Lock()  # also held while a file is read, so that no thread closes its descriptor

    @property
    def size(self) -> int:
        """Return the total size in bytes."""
        return self._starts[-1]

    def read_at(self, view: memoryview, position: int) -> int:
        """Fill the beginning of `view` from one file; return how many bytes: 0 if the file is shorter than before."""
        with self._lock:
            descriptor, offset, most = self._file_at(position, len(view))
            return os.preadv(descriptor, [view[:most]], offset)

    def write_at(self, view: memoryview, position: int) -> int:
        """Write the beginning of `view` to one file; return how many bytes."""
        with self._lock:
            descriptor, offset, most = self._file_at(position, len(view))
            return os.pwrite(descriptor, view[:most], offset)

    def close(self) -> None:
        """Close all files. Idempotent."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            self._cursor.__exit__()
            if self._top >= 0:
                os.close(self._top)
            self._top = -1

    def _file_at(self, position: int, size: int) -> Tuple[int, int, int]:
        """Return the file at a position, the position in it, and how many of `size` bytes belong to it."""
        number = bisect.bisect_right(self._starts, position) - 1
        offset = position - self._starts[number]
        return self._opened(number), offset, min(size, self._starts[number + 1] - position)

    def _opened(self, number: int) -> int:
        if number in self._descriptors:
            self._descriptors.move_to_end(number)
            return self._descriptors[number]
        parts = below.parts_of(self._paths[number])
        above = self._cursor.at(parts[:-1])
        if self._writable:
            descriptor = os.open(parts[-1], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        else:
            descriptor = below.open_file(above, parts[-1], self._force)
        self._descriptors[number] = descriptor
        if len(self._descriptors) > _OPEN_AT_ONCE:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor


class FilesBlob(Blob):
    """A blob of many files.

    Args:
        content: the blob closes it.
        descriptor: closed with the blob, for example a lock of the files.
    """

    def __init__(
        self, digest: str, hashes: bytes, content: ManyFiles, descriptor: int = -1, complete: bool = False
    ) -> None:
        super().__init__(digest, content.size, hashes, descriptor, complete)
        self._content = content

    def _write_at(self, descriptor: int, view: memoryview, position: int) -> int:  # noqa: ARG002
        return self._content.write_at(view, position)

    def _read_at(self, descriptor: int, view: memoryview, position: int) -> int:  # noqa: ARG002
        return self._content.read_at(view, position)

    def _let_go(self) -> None:
        self._content.close()
        super()._let_go()
