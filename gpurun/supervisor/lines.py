"""The format of a job's log on the head, and its readers. They never read a whole log into memory.

A line is ``TIME STREAM TEXT``: an RFC 3339 time with nanoseconds; ``o`` or ``e`` for stdout or stderr; and the printed
bytes. A rank's STREAM also has the line's origin, ``o@ATTEMPT/HOST/ID:END``: END is the offset after the line in that
rank's output. Its TEXT begins with ``[RANK]<stdout>:``, as horovodrun writes it. Lines of the stream ``m`` have the
metrics that ranks report. A line of the stream ``c`` is a checkpoint of the writer: a later writer need not read what
is before it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from gpurun.launch import output
from gpurun.state.durable import GrowingFile
from gpurun.state.paths import StatePath

TAIL_BYTES = 1 << 20
MOST_BYTES = 1 << 28
MOST_REPORT_BYTES = 1 << 14
MOST_STEP = 1 << 63
"""No record can keep a larger number."""
SECTOR_BYTES = 512
HOLE = bytes(SECTOR_BYTES)
"""Blocks that were not written when the power was cut are zeros."""
_ZEROS = re.compile(rb"\0+")
_HEAD = re.compile(rb"(\S+) ([oecm])(?:@(\S+):(\d{1,18}))?(?: (.*))?", re.DOTALL)
CHECKPOINT, METRICS = "c", "m"
_UNPRINTED = (CHECKPOINT.encode(), METRICS.encode())


class LoggedLine(NamedTuple):
    """One line of a job's log."""

    time: str
    line: output.Line

    @property
    def who(self) -> str:
        """Return who printed the line, as every view of a log shows it: ``[3]`` or ``[launcher]``."""
        return f"[{'launcher' if self.line.rank is None else self.line.rank}]"


class RankReport(NamedTuple):
    """A report of a rank (`gpurun.runtime`): metrics by name, for a step."""

    attempt: int
    rank: int
    step: int
    time_s: float
    metrics: dict[str, float]


class Speaker:
    """Decides whose reports of a metric count: in the newest attempt that reports it, the lowest rank that reports it.

    Until that rank speaks, the lowest rank so far counts.
    """

    def __init__(self) -> None:
        self._attempt, self._rank = -1, 0

    def counts(self, report: RankReport) -> bool:
        """Return whether the report counts now; if it does, what others said before counts no longer."""
        if (-report.attempt, report.rank) > (-self._attempt, self._rank):
            return False
        self._attempt, self._rank = report.attempt, report.rank
        return True


class RawLine(NamedTuple):
    """One line with its text not yet parsed.

    Attributes:
        source: ``ATTEMPT/HOST/ID`` of a rank; "" for the launcher's own line.
        end: the offset after the line in the rank's output.
    """

    time: str
    stream: str
    source: str
    end: int
    text: bytes


def split(raw: bytes) -> RawLine | None:
    """Split a line into its parts; None if it is not a line of a log."""
    found = _HEAD.fullmatch(raw)
    if found is None:
        return None
    time, stream, source, end, text = found.groups(b"")
    return RawLine(
        time.decode("ascii", "replace"), stream.decode(), source.decode("utf-8", "replace"), int(end or 0), text
    )


def has_hole(raw: bytes, offset: int) -> bool:
    """Return True if a power cut left a gap in a line, which begins at `offset` in the file.

    The disk writes whole sectors. So a gap may be short, and ends at the end of a sector.
    """
    if b"\0" not in raw:
        return False
    return HOLE in raw or any((offset + zeros.end()) % SECTOR_BYTES == 0 for zeros in _ZEROS.finditer(raw))


def parse_log_line(raw: bytes) -> LoggedLine | None:
    """Return a line as people read it, even if parts are damaged; None for a line that no process printed."""
    raw = raw.replace(HOLE, b"").lstrip(b"\0")
    time, _, rest = raw.partition(b" ")
    stream, _, text = rest.partition(b" ")
    if stream[:1] in _UNPRINTED:
        return None
    said = output.parse_line(text.decode("utf-8", "replace"), "stderr" if stream.startswith(b"e") else "stdout")
    return LoggedLine(time.decode("utf-8", "replace"), said)


def parse_report(raw: bytes) -> RankReport | None:
    """Return a rank's report in a line; None for any other line, and for one that the runtime did not write."""
    line = split(raw)
    if line is None or line.stream != METRICS or len(line.text) > MOST_REPORT_BYTES:
        return None
    tag, _, text = line.text.partition(b"<metrics>:")
    try:
        told = json.loads(text)
        metrics = {str(name): float(value) for name, value in told["metrics"].items()}
        attempt, rank = int(line.source.partition("/")[0]), int(tag.strip(b"[]"))
        step = int(told["step"])
        return RankReport(attempt, rank, step, float(told["time"]), metrics) if abs(step) < MOST_STEP else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


class LogTail:
    """Reads a job's log as it grows, from its beginning; remembers its position."""

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self._file = GrowingFile(path)

    def new(self) -> Iterator[LoggedLine]:
        """Yield whole lines printed since the last call, read in pieces. Yields nothing without a file."""
        yield from _parsed(self._file.lines())

    def skip_to_last(self, count: int, wanted: Callable[[LoggedLine], bool]) -> None:
        """Continue at the last `count` of the existing wanted lines. Does nothing without a file."""

        def matching(lines: list[bytes]) -> list[int]:
            return [at for at, logged in enumerate(map(parse_log_line, lines)) if logged is not None and wanted(logged)]

        try:
            with self.path.reader() as stream:
                end, lines = last(stream, lambda lines: len(matching(lines)) >= count)
        except FileNotFoundError:
            return
        found = matching(lines)
        skipped = lines[found[-count] :] if 0 < count <= len(found) else [] if not count else lines
        self._file.offset = end - sum(len(line) + 1 for line in skipped)

    def new_reports(self) -> Iterator[RankReport]:
        """Yield what ranks have reported since the last call."""
        yield from filter(None, map(parse_report, self._file.lines()))


def last_lines(path: StatePath, count: int, *, attempt: int | None = None) -> list[LoggedLine]:
    """Return the last whole printed lines, at most `count`; none without a file.

    Args:
        attempt: leave out lines of the attempts before it.
    """
    try:
        with path.reader() as stream:
            _, lines = last(stream, lambda lines: sum(map(_is_printed, lines)) > count)
    except FileNotFoundError:
        return []
    if attempt is not None and attempt > 1:
        lines = lines[_begin(lines, attempt) :]
    return list(_parsed([raw for raw in lines if _is_printed(raw)][-count - 1 :]))[-count:]


def _begin(lines: list[bytes], attempt: int) -> int:
    """Return after how many lines an attempt begins: with its first checkpoint, or after all that is of another."""
    begin = None
    for at in range(len(lines) - 1, -1, -1):
        if (line := split(lines[at])) is None or not (found := _attempt_of(line)):
            continue
        if found != f"{attempt}":
            return at + 1 if begin is None else begin
        if line.stream == CHECKPOINT:
            begin = at
    return 0


def _attempt_of(line: RawLine) -> str:
    """Return the attempt that a line names; "" for a launcher's line, which names none."""
    if line.stream != CHECKPOINT:
        return line.source.partition("/")[0]
    try:
        return str(json.loads(line.text)["attempt"]).partition("/")[0]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def last(
    stream: BinaryIO, enough: Callable[[list[bytes]], bool], *, most_bytes: int = MOST_BYTES
) -> tuple[int, list[bytes]]:
    """Return where a file's last whole line ends, and its last whole lines: enough of them, or all within
    `most_bytes`.
    """
    size = stream.seek(0, os.SEEK_END)
    looked = TAIL_BYTES
    while True:
        start = stream.seek(max(0, size - looked))
        tail = stream.read(size - start)
        begin = tail.find(b"\n") + 1 if start else 0  # the first may have begun before
        end = tail.rfind(b"\n") + 1
        lines = tail[begin:end].split(b"\n")[:-1]
        if not start or enough(lines) or looked >= most_bytes:
            return start + end if end or not start else size, lines
        looked *= 4


def _is_printed(raw: bytes) -> bool:
    return raw.partition(b" ")[2][:1] not in _UNPRINTED


def _parsed(lines: Iterable[bytes]) -> Iterator[LoggedLine]:
    for raw in lines:
        if raw and (line := parse_log_line(raw)) is not None:
            yield line
