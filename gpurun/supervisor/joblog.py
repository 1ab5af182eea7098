"""A job's log on the head: every line of the launcher's container, once, in order, across supervisors.

A line of the file is ``TIME STREAM TEXT``: Docker's own timestamp (RFC 3339 with nanoseconds), ``o`` or ``e``
for stdout or stderr, and the line. Docker keeps the log on the host, so that a new supervisor can ask for what
came after the last line here: lines with exactly that timestamp are counted and passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpurun import faults
from gpurun.jobs import durable
from gpurun.launch import output

_TAIL_BYTES = 1 << 20


class LoggedLine(NamedTuple):
    """One line of a job's log."""

    time: str
    line: output.Line


class JobLog:
    """Appends to a job's log. One writer at a time: the supervisor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial: dict[str, str] = {"o": "", "e": ""}
        self._last, self._same = self._end()
        self._passing = self._same
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

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
            self._partial[stream[3]] = whole
            return
        self._partial[stream[3]] = ""
        self._write(time, stream[3], whole)

    def close(self) -> None:
        """Write what is left of unfinished lines and close."""
        for stream, text in self._partial.items():
            if text and self._last:
                self._write(self._last, stream, text + "\n")
        os.close(self._descriptor)

    def _write(self, time: str, stream: str, text: str) -> None:
        os.write(self._descriptor, f"{time} {stream} {text}".encode("utf-8", "replace"))
        faults.point()
        self._same = self._same + 1 if time == self._last else 1
        self._last, self._passing = time, 0

    def _end(self) -> tuple[str, int]:
        """The last timestamp in the file and how many lines have it; a torn last line is cut off."""
        try:
            with self.path.open("r+b") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
                start = stream.tell()
                tail = stream.read()
                whole = tail[: tail.rfind(b"\n") + 1]
                stream.truncate(start + len(whole))
        except FileNotFoundError:
            return "", 0
        times = [line.partition(b" ")[0].decode() for line in whole.splitlines()]
        return (times[-1], times.count(times[-1])) if times else ("", 0)


def read_lines(path: Path, offset: int = 0) -> tuple[list[LoggedLine], int]:
    """Whole lines of a log from byte `offset` on, and the offset after them. No file yet: no lines."""
    try:
        with durable.opened(path) as stream:
            stream.seek(offset)
            data = stream.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return list(_parsed(whole)), offset + len(whole)


def _parsed(data: bytes) -> Iterator[LoggedLine]:
    for raw in data.split(b"\n")[:-1]:
        time, _, rest = raw.decode("utf-8", "replace").partition(" ")
        stream, _, text = rest.partition(" ")
        yield LoggedLine(time, output.parse(text, "stderr" if stream == "e" else "stdout"))


def _unix(time: str) -> str:
    """``2026-01-02T03:04:05.123456789Z`` as ``seconds.nanoseconds`` (docker logs API, ``since``)."""
    from datetime import datetime, timezone  # noqa: PLC0415 (only when a log is resumed)

    whole, _, rest = time.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp())
    return f"{seconds}.{(rest or '0').ljust(9, '0')}"
