"""Read and digest a file at the cost of what it stores: blocks of zeros cost nothing if the file system stores none.

Of two files with the same bytes, each file system makes other holes. So everything here depends on the bytes alone.
"""

import hashlib
import os
from typing import Iterator, Tuple

BLOCK = 1 << 16
_ZEROS = bytes(BLOCK)


def blocks(descriptor: int, size: int) -> Iterator[Tuple[int, bytes]]:
    """Yield (length of whole blocks of zeros, b"") or (0, the next block), from the beginning of a file up to `size`.

    Blocks lie at multiples of `BLOCK`. Zeros after the last whole block are bytes.
    """
    position = 0
    while position < size:
        block = os.pread(descriptor, min(BLOCK, size - position), position)
        if not block:
            return  # it was cut: its marks tell
        position += len(block)
        if block != _ZEROS:
            yield 0, block
            continue
        data = seek(descriptor, position, os.SEEK_DATA, size) if position < size else size
        skipped = max(position, data - data % BLOCK)
        yield BLOCK + skipped - position, b""
        position = skipped


def seek(descriptor: int, position: int, what: int, size: int) -> int:
    """Return where the next data or hole begins, at most `size`."""
    try:
        return min(os.lseek(descriptor, position, what), size)
    except OSError:
        return size  # no data comes after this


class ContentDigest:
    """The digest of a content that comes as `blocks` yields it.

    It is ``sha256:`` and the content's SHA-256 if no whole block is zeros. Else it is ``sha256-holes:`` and the SHA-256
    of what is left without those blocks, of where they were, and of the size: nobody hashes zeros.

    Args:
        like: the digest to compare with. An older gpurun hashed zeros: if it is a SHA-256, so will this be.
    """

    def __init__(self, like: str = "") -> None:
        self._hashes_zeros = like.startswith("sha256:")
        self._bytes, self._holes = hashlib.sha256(), hashlib.sha256()
        self._zeros = 0
        self._has_holes = False
        self.size = 0

    def add(self, zeros: int, piece: bytes) -> None:
        """Add `zeros` zeros, or a piece."""
        if zeros and self._hashes_zeros:
            for _ in range(zeros // BLOCK):
                self._bytes.update(_ZEROS)
        elif zeros:
            self._zeros += zeros
        else:
            self._end_hole()
            self._bytes.update(piece)
        self.size += zeros + len(piece)

    def _end_hole(self) -> None:
        if self._zeros:
            self._holes.update(b"%d+%d;" % (self.size - self._zeros, self._zeros))
            self._zeros, self._has_holes = 0, True

    def __str__(self) -> str:
        self._end_hole()
        if not self._has_holes:
            return "sha256:" + self._bytes.hexdigest()
        parts = "%s %s %d" % (self._bytes.hexdigest(), self._holes.hexdigest(), self.size)
        return "sha256-holes:" + hashlib.sha256(parts.encode("ascii")).hexdigest()
