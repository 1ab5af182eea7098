"""A blob whose content is that of many files, one after the other: a data set.

So a data set needs no second copy: the head sends from the person's folder. A host writes into the files that jobs will
read, and passes them on from there.
"""

import bisect
import collections
import os
import threading
from itertools import accumulate
from typing import Iterable, List, Tuple

from gpurun.node.folder import below
from gpurun.node.transfer.spool import Blob

_OPEN_AT_ONCE = 32


class ManyFiles:
    """The content of files below a folder, as one. Thread-safe.

    Args:
        top: a descriptor of the folder; `close` closes it.
        files: path and size of each, in order.
    """

    def __init__(self, top: int, files: Iterable[Tuple[str, int]], writable: bool = False) -> None:
        listed = [(path, size) for path, size in files if size]
        self._top = top
        self._paths = [path for path, _ in listed]
        self._starts: List[int] = list(accumulate((size for _, size in listed), initial=0))
        self._writable = writable
        self._cursor = below.Cursor(top)
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
            descriptor = below.open_file(above, parts[-1])
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
