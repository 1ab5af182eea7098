"""A job's log on the head: every line of the launcher's container, once, in order, across supervisors.

A line of the file is ``TIME STREAM TEXT``: Docker's own timestamp (RFC 3339 with nanoseconds), ``o`` or ``e``
for stdout or stderr, and the line. Docker keeps the log on the host, so that a new supervisor can ask for what
came after the last line here: lines with exactly that timestamp are counted and passed over. A line whose timestamp is
damaged stays, and is none to go on from, and neither are lines behind a hole (zeros: blocks that were not written when
the power was cut): rather a line twice than one lost. A line that does not end is broken into lines of 1 MiB, and
nobody reads a whole log at once: it may be that of weeks.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import BinaryIO, NamedTuple

from gpurun import faults
from gpurun.launch import output
from gpurun.state import durable
from gpurun.state.path import StatePath

_TAIL_BYTES = 1 << 20
_MOST_BYTES = 1 << 28
_LINE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 22
_HOLE = bytes(512)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z", re.ASCII)


class LoggedLine(NamedTuple):
    """One line of a job's log."""

    time: str
    line: output.Line


class JobLog:
    """Appends to a job's log. One writer at a time: the supervisor.

    Args:
        on_damage: told, in a sentence, of what was found damaged in a log that was begun before.
    """

    def __init__(self, path: StatePath, *, on_damage: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self._on_damage = on_damage
        self._move_away()
        self._partial: dict[str, str] = {"o": "", "e": ""}
        self._last, self._same = self._end()
        self._passing = self._same
        self.descriptor = path.open_file(os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @property
    def since(self) -> str | None:
        """The timestamp to ask Docker to resume from, as it wants it: seconds.nanoseconds; None = all."""
        return _unix(self._last) if self._last else None

    def resume(self) -> None:
        """Another stream from `since` begins: the lines already here will come again."""
        self._partial = {"o": "", "e": ""}
        self._passing = self._same

    def take(self, stream: str, message: bytes) -> None:
        """One message of Docker's log stream, with its timestamp in front. Long lines come in several."""
        time, _, text = message.decode("utf-8", "replace").partition(" ")
        if time == self._last and self._passing > 0 and self._partial[stream[3]] == "":
            self._passing -= 1
            return
        whole = self._partial[stream[3]] + text
        if not whole.endswith("\n"):
            if len(whole) < _LINE_BYTES:
                self._partial[stream[3]] = whole
                return
            whole += "\n"
        self._partial[stream[3]] = ""
        self._write(time, stream[3], whole)

    def close(self) -> None:
        """Write what is left of unfinished lines and close."""
        for stream, text in self._partial.items():
            if text and self._last:
                self._write(self._last, stream, text + "\n")
        os.close(self.descriptor)

    def _write(self, time: str, stream: str, text: str) -> None:
        os.write(self.descriptor, f"{time} {stream} {text}".encode("utf-8", "replace"))
        faults.point()
        if _unix(time) is None:  # not Docker's: the lines before it are to be counted on
            return
        self._same = self._same + 1 if time == self._last else 1
        self._last, self._passing = time, 0

    def _move_away(self) -> None:
        """Keep what lies in the log's place and is no file: a pipe would block every writer for ever."""
        try:
            if stat.S_ISREG(self.path.stat().st_mode):
                return
        except FileNotFoundError:
            return
        aside = durable.set_aside(self.path)
        self._on_damage(f"{self.path} was not a file: it is kept as {aside.name}, and the log begins anew")

    def _end(self) -> tuple[str, int]:
        """The last timestamp in the file and how many lines have it; a torn last line is cut off."""
        try:
            with os.fdopen(self.path.open_file(os.O_RDWR), "r+b") as stream:
                end, lines = _last(stream, lambda lines: bool(_times_before_a_hole(lines)))
                stream.truncate(end)
        except FileNotFoundError:
            return "", 0
        sound = _times_before_a_hole(lines)
        if len(sound) < len(lines):
            self._on_damage(f"{self.path}: {len(lines) - len(sound)} lines are damaged; some may come twice")
        return (sound[-1], sound.count(sound[-1])) if sound else ("", 0)


class LogTail:
    """Reads a job's log as it grows, from its beginning; remembers how far it got."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> Iterator[LoggedLine]:
        """Whole lines written since those before, read piece by piece. No file yet: no lines."""
        while data := self._piece():
            yield from (_parsed(raw) for raw in data.split(b"\n")[:-1] if raw)

    def _piece(self) -> bytes:
        try:
            with self.path.reader() as stream:
                stream.seek(self._offset)
                data = stream.read(_PIECE_BYTES)
                data += stream.readline(_PIECE_BYTES)
        except FileNotFoundError:
            return b""
        end = data.rfind(b"\n") + 1
        if not end and len(data) == 2 * _PIECE_BYTES:  # no line is as long as that: a hole
            self._offset += len(data)
            return b"\n"
        self._offset += end
        return data[:end]


def last_lines(path: StatePath, count: int) -> list[LoggedLine]:
    """The last whole lines of a log, `count` at most. No file: none."""
    try:
        with path.reader() as stream:
            _, lines = _last(stream, lambda lines: len(lines) >= count)
    except FileNotFoundError:
        return []
    return [_parsed(raw) for raw in lines[-count:]]


def _last(stream: BinaryIO, enough: Callable[[list[bytes]], bool]) -> tuple[int, list[bytes]]:
    """Where a file's last whole line ends, and its last whole lines: enough of them, or all that is looked at."""
    size = stream.seek(0, os.SEEK_END)
    looked = _TAIL_BYTES
    while True:
        start = stream.seek(max(0, size - looked))
        tail = stream.read(size - start)
        begin = tail.find(b"\n") + 1 if start else 0  # the first may have begun before
        end = tail.rfind(b"\n") + 1
        lines = tail[begin:end].split(b"\n")[:-1]
        if not start or enough(lines) or looked >= _MOST_BYTES:
            return start + end if end or not start else size, lines
        looked *= 4


def _parsed(raw: bytes) -> LoggedLine:
    time, _, rest = raw.replace(_HOLE, b"").lstrip(b"\0").decode("utf-8", "replace").partition(" ")
    stream, _, text = rest.partition(" ")
    return LoggedLine(time, output.parse(text, "stderr" if stream == "e" else "stdout"))


def _times_before_a_hole(lines: list[bytes]) -> list[str]:
    """The time of each line that has one, up to the first that has a hole."""
    sound = itertools.takewhile(lambda line: _HOLE not in line, lines)
    times = (line.partition(b" ")[0].decode("ascii", "replace") for line in sound)
    return [time for time in times if _unix(time)]


def _unix(time: str) -> str | None:
    """``2026-01-02T03:04:05.123456789Z`` as ``seconds.nanoseconds`` (docker logs API, ``since``); None: it is none."""
    match = _STAMP.fullmatch(time)
    if match is None:
        return None
    try:
        whole = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc)
    except ValueError:  # the 13th month
        return None
    return f"{int(whole.timestamp())}.{(match[2] or '0').ljust(9, '0')}"
