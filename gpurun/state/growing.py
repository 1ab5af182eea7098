"""The lines of a file that somebody appends to, read piece by piece as it grows."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpurun.state.path import StatePath, told

PIECE_BYTES = 1 << 22


class GrowingFile:
    """Whole lines, each once.

    Attributes:
        offset: where the first line begins that was not read yet.
    """

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.offset = 0

    def lines(self) -> Iterator[bytes]:
        """Lines that came since, without their ends. A line that is not whole yet is left for later. No file: none."""
        while piece := self._piece():
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) < 2 * PIECE_BYTES:
                return
            if not end:  # no line is as long as that: a hole
                self.offset += len(piece)
            for line in piece[:end].split(b"\n")[:-1]:
                self.offset += len(line) + 1  # before the next: a reader that stops here continues there
                yield line

    def _piece(self) -> bytes:
        try:
            with self.path.reader() as stream:
                self.offset = _data_from(stream.fileno(), self.offset)
                stream.seek(self.offset)
                return stream.read(PIECE_BYTES) + stream.readline(PIECE_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise told(error, self.path, "read") from error


def _data_from(descriptor: int, offset: int) -> int:
    """Return the offset of the next data: a writer may have freed a part of the file by a hole (man lseek)."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # nothing follows, or the file system does not tell
        return offset
