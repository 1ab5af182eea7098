"""The beginning of a file that an interrupted copy has left: it is compared, so that the next copy sends only the rest.

Both sides digest it in the same way, which depends on the bytes alone.
"""

import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

_ZEROS = bytes(1 << 16)
"""A block of a beginning."""


class Begun(NamedTuple):
    """The beginning of a file that its reader already has from an interrupted copy.

    Attributes:
        marks: the file's marks at that time.
        size: how many bytes of it are there.
        sha: SHA-256 of them, as `counted_beginning` gives them.
    """

    marks: List[int]
    size: int
    sha: str

    def counted(self) -> bytes:
        """Return the contribution of these bytes to the digest of the whole."""
        return b"from:%d:%s;" % (self.size, self.sha.encode("ascii", "replace"))


def begun(header: Dict[str, Any]) -> Optional[Begun]:
    """Return the beginning that a file's reader says it has; None if it has none, or the header is not valid."""
    marks, size, sha = header.get("marks"), header.get("at"), header.get("sha")
    if not isinstance(marks, list) or type(size) is not int or size <= 0 or not isinstance(sha, str):
        return None
    return Begun(marks, size, sha)


def counted_beginning(descriptor: int, size: int) -> Iterator[bytes]:
    """Yield what counts for the digest of the first `size` bytes of a file.

    Blocks of zeros count as ``hole:LENGTH;``, whether they are stored or not: of two copies with the same bytes, each
    file system makes other holes. A hole costs no time, however long it is.
    """
    zeros = 0
    for hole, piece in _blocks(descriptor, size):
        zeros += hole
        if piece:
            if zeros:
                yield b"hole:%d;" % zeros
                zeros = 0
            yield piece
    if zeros:
        yield b"hole:%d;" % zeros


def _blocks(descriptor: int, size: int) -> Iterator[Tuple[int, bytes]]:
    """Yield (length of whole blocks of zeros, b"") or (0, a block), from the beginning up to `size`."""
    position = 0
    while position < size:
        block = os.pread(descriptor, min(len(_ZEROS), size - position), position)
        if not block:
            return  # it was cut: its marks tell
        position += len(block)
        if block != _ZEROS[: len(block)]:
            yield 0, block
            continue
        data = seek(descriptor, position, os.SEEK_DATA, size) if position < size else size
        skipped = size if data == size else max(position, data - data % len(_ZEROS))
        yield len(block) + skipped - position, b""
        position = skipped


def seek(descriptor: int, position: int, what: int, size: int) -> int:
    """Return where the next data or hole begins, at most `size`."""
    try:
        return min(os.lseek(descriptor, position, what), size)
    except OSError:
        return size  # no data comes after this
