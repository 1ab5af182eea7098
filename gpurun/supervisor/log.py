"""Write a job's log: every line of the launcher and of every rank, once, in order, across supervisors.

The file itself records the position: a new supervisor asks each source for everything after the source's last line in
the file. For the launcher the position is Docker's timestamp; lines with exactly the last timestamp are counted and
skipped. For a rank it is the offset in its line. Keep a line with a damaged timestamp, but do not resume from it, nor
from lines after a gap: a duplicate line is better than a lost one. A line without an end is split into lines of 1 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone

from gpurun import faults
from gpurun.node.agent.serve import disk_of, reserve_of
from gpurun.node.job.rank_processes import STREAMS
from gpurun.quantities import count
from gpurun.state import durable
from gpurun.state.paths import StatePath
from gpurun.supervisor.lines import CHECKPOINT, METRICS, RawLine, has_hole, last, split

# Keep a job's log within its ``log_limit``: its beginning and its end stay, and what is between is said to be gone.


LEAST_BYTES = 64 << 20
"""No limit is smaller: a log's end holds what a supervisor needs that continues it."""
BLOCK_BYTES = 4096
HELD_BYTES = 1 << 20
"""How much of the end is kept in memory where the file system makes no holes."""
TRIES_PER_LIMIT = 16
"""If a hole fails for a reason that may pass, the next try comes after the log has grown by this part of its limit."""
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS)
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE (linux/falloc.h)


class LogRoom:
    """The part of a log that is gone.

    Args:
        limit: bytes; None = no limit.
        note: makes a line, without its end, that says that so many bytes are gone.

    Attributes:
        kept: where the log's beginning ends; 0 = the log is no longer than its beginning yet.
        gone: where its end begins; 0 = nothing is gone.
    """

    def __init__(self, limit: int | None, note: Callable[[int], bytes]) -> None:
        self._limit = None if limit is None else max(limit, LEAST_BYTES)
        self._note = note
        self.kept = self.gone = 0
        self._held: bytearray | None = None
        self._lost = self._next = 0

    @property
    def is_holding(self) -> bool:
        """Return whether lines are not written any more but held."""
        return self._held is not None

    def made(self, size: int, open_file: Callable[[], int]) -> None:
        """Make room after the file has grown to `size`, which is the end of a line.

        Args:
            open_file: opens the file to read and write at any offset.

        Raises:
            OSError: the file cannot be written.
        """
        if self._limit is None or size < self._limit // 2 or size < self._next:
            return
        self.kept = self.kept or size
        begin = -(-(self.kept + BLOCK_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
        if size - max(0, self.gone - begin) <= self._limit:
            return
        end = (size - self._limit // 4) // BLOCK_BYTES * BLOCK_BYTES
        if end <= max(begin, self.gone):
            return
        descriptor = open_file()
        try:
            try:
                _make_hole(descriptor, begin, end)
            except OSError as error:
                if error.errno in _NO_HOLES:
                    self._held = bytearray()
                else:  # such as a full disk: it may pass, and until then the log is written
                    self._next = size + self._limit // TRIES_PER_LIMIT
                return
            whole = _to_line(descriptor, end, size)
            note = _filled(self._note(whole - self.kept), begin - self.kept)
            durable.write_all(descriptor, note, self.kept)
            self.gone = end
        finally:
            os.close(descriptor)

    def hold(self, data: bytes) -> None:
        """Keep lines for `rest`, as many as `HELD_BYTES` are."""
        assert self._held is not None
        self._held += data
        if len(self._held) > 2 * HELD_BYTES:
            cut = self._held.find(b"\n", len(self._held) - HELD_BYTES) + 1 or len(self._held)
            del self._held[:cut]
            self._lost += cut

    def rest(self) -> bytes:
        """Return the lines that were held, with a line about those that are gone. The next call returns nothing."""
        held, self._held = self._held, None
        if not held:
            return b""
        return (self._note(self._lost) + b"\n" if self._lost else b"") + bytes(held)


def _make_hole(descriptor: int, begin: int, end: int) -> None:
    """Give back the blocks of a part of the file. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin)) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _to_line(descriptor: int, offset: int, size: int) -> int:
    """Replace the rest of the line at `offset` by empty lines; return where the next line begins."""
    at = offset
    while at < size:
        piece = os.pread(descriptor, 1 << 16, at)
        cut = piece.find(b"\n")
        used = cut + 1 if cut >= 0 else len(piece)
        durable.write_all(descriptor, b"\n" * used, at)
        at += used
        if cut >= 0 or not piece:
            break
    return at


def _filled(line: bytes, length: int) -> bytes:
    """Return the line with empty lines up to `length`."""
    return line[: length - 1] + b"\n" * (length - min(len(line), length - 1))


LINE_BYTES = 1 << 20
RESERVE_PART = 8
"""Logs leave this part of the disk free of what outputs do: all jobs keep their state there."""
CHECKPOINT_BYTES = 1 << 22
"""The most bytes between two checkpoints."""
BAR_BYTES = 1 << 12
"""A progress bar prints carriage returns and no newline. This many bytes count as a line, so that it appears soon."""
_CHECKPOINT_HEAD = f"- {CHECKPOINT} {{".encode()
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z", re.ASCII)
_NAMES = {"o": b"stdout", "e": b"stderr", "m": b"metrics"}
_Key = tuple[str, str]
"""``ATTEMPT/HOST/ID`` of a rank, and one of `STREAMS`."""


class JobLog:
    """Appends to a job's log. One writer at a time: the supervisor, and in it one thread at a time.

    Args:
        attempt: the attempt whose ranks are logged; lines of earlier attempts stay as they are.
        now: the time for ranks' lines, in seconds since the epoch.
        limit: the most bytes of the file, by `gpurun.supervisor.log`; None = no limit.
        on_damage: receives a sentence about damage in a log that was begun before.
    """

    def __init__(
        self, path: StatePath, *, attempt: int, now: Callable[[], float],
        on_damage: Callable[[str], None] = lambda _: None, limit: int | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._attempt = f"{attempt}/"
        self._now = now
        self._on_damage = on_damage
        self._move_away()
        self._partial = {"o": b"", "e": b""}
        self._room = LogRoom(limit, self._gone)
        self._known = self._end()
        self._room.kept, self._room.gone = self._known.kept, self._known.gone
        self._passing = self._known.same
        self._open: dict[_Key, tuple[int, bytearray]] = {}
        self._begin = self._known.checkpoint() if self._known.needs_checkpoint else b""
        self._since_checkpoint = 0 if self._begin else self._known.since_checkpoint
        self._time = self._time_now()
        self.descriptor = path.open_file(os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @property
    def since(self) -> str | None:
        """Return the timestamp from which Docker should resume, as seconds.nanoseconds; None = all."""
        return _unix(self._known.last) if self._known.last else None

    def have(self, host: str) -> Mapping[str, list[int]]:
        """Return, for the ranks of a host, ID → the offset after the last logged byte of each of its `STREAMS`."""
        found: dict[str, list[int]] = {}
        begin = f"{self._attempt}{host}/"
        for (source, stream), end in self._known.ends.items():
            if source.startswith(begin):
                found.setdefault(source[len(begin) :], [0] * len(STREAMS))[STREAMS.index(stream)] = end
        return found

    def resume(self) -> None:
        """Prepare for another stream from `since`, which repeats lines that are already here."""
        self._partial = {"o": b"", "e": b""}
        self._passing = self._known.same

    def take(self, stream: str, message: bytes) -> None:
        """Take one message of Docker's log stream, which begins with its timestamp.

        Docker splits long lines anywhere, also inside a character, so they are kept as bytes.
        """
        stamp, _, text = message.partition(b" ")
        time = stamp.decode("utf-8", "replace")
        if time == self._known.last and self._passing > 0 and not self._partial[stream[3]]:
            self._passing -= 1
            return
        whole = self._partial[stream[3]] + text
        if not whole.endswith(b"\n"):
            if len(whole) < LINE_BYTES:
                self._partial[stream[3]] = whole
                return
            whole += b"\n"
        self._partial[stream[3]] = b""
        self._write_launchers(time, stream[3], whole)

    def take_output(self, where: str, rank: int, stream: str, end: int, payload: bytes) -> None:
        """Take a piece of a rank's output. Skips what is already here.

        Args:
            where: ``HOST/ID``; without a space.
            stream: one of `STREAMS`.
            end: the offset after the piece in all output of the rank.
        """
        self._time = self._time_now()
        key = (self._attempt + where, stream)
        _, part = self._open.setdefault(key, (rank, bytearray()))
        begin, here = end - len(payload), self._known.ends.get(key, 0) + len(part)
        if begin > here:  # what was between is lost
            self._skip(key, rank, begin)
            here = begin
        part += payload[here - begin :]
        lines = self._lines(key, rank, part)
        if len(part) >= BAR_BYTES and (used := part.rfind(b"\r", 0, -1) + 1):
            lines.append(self._line(key, rank, part[:used], used))
            del part[:used]
        if lines:
            self._append(b"".join(lines))

    def sync(self) -> None:
        """Sync what was written. `have` then reports nothing beyond the synced part. Raises OSError."""
        os.fsync(self.descriptor)

    def end_lines(self, where: str) -> None:
        """Finish the last lines of an ended rank, even without a newline."""
        for stream in STREAMS:
            if (key := (self._attempt + where, stream)) in self._open:
                self._flush(key)

    def close(self) -> None:
        """Write unfinished lines and close.

        Raises:
            OSError: not everything could be written; the file is closed anyway.
        """
        try:
            for stream, text in self._partial.items():
                if text and self._known.last:
                    self._write_launchers(self._known.last, stream, text + b"\n")
            for key in self._open:
                self._flush(key)
            if rest := self._room.rest():
                self._write(rest)
        finally:
            os.close(self.descriptor)

    def _flush(self, key: _Key) -> None:
        rank, part = self._open[key]
        if part:
            self._append(self._line(key, rank, part, len(part)))
            part.clear()

    def _skip(self, key: _Key, rank: int, begin: int) -> None:
        """Say that output up to the offset `begin` is missing. Then a checkpoint: no line leads over the gap."""
        self._flush(key)
        missing = begin - self._known.ends.get(key, 0)
        said = b"gpurun: %d MiB of this rank's output are missing here: it printed more than could be copied in time"
        if key[1] != METRICS:
            self._append(self._line((key[0], "e"), rank, said % (-(-missing >> 20)), 0))
        self._known.ends[key] = begin
        self._write_checkpoint(self._known.checkpoint())

    def _lines(self, key: _Key, rank: int, part: bytearray) -> list[bytes]:
        """Take the whole lines out of `part`. Millions of short lines come here, so all of a piece are made at once."""
        whole = bytes(part[: part.rfind(b"\n") + 1])
        texts = whole.split(b"\n")[:-1]
        if len(part) < LINE_BYTES or max(map(len, [*texts, part[len(whole) :]])) < LINE_BYTES:
            del part[: len(whole)]
            return self._short_lines(key, rank, texts)
        lines = []
        while (cut := part.find(b"\n")) >= 0 or len(part) >= LINE_BYTES:
            text, used = (part[:cut], cut + 1) if 0 <= cut <= LINE_BYTES else (part[:LINE_BYTES], LINE_BYTES)
            lines.append(self._line(key, rank, text, used))
            del part[:used]
        return lines

    def _short_lines(self, key: _Key, rank: int, texts: list[bytes]) -> list[bytes]:
        source, stream = key
        begin = b"%s %s@%s:" % (self._time, stream.encode(), source.encode())
        tag = b" [%d]<%s>:" % (rank, _NAMES[stream])
        end = self._known.ends.get(key, 0)
        lines = []
        for text in texts:
            end += len(text) + 1
            lines.append(b"%s%d%s%s\n" % (begin, end, tag, text))
        self._known.ends[key] = end
        return lines

    def _gone(self, count: int) -> bytes:
        """Return the line of the log in the place of `count` bytes that its limit has cost."""
        said = f"gpurun: {-(-count >> 20)} MiB of the log are gone here: log_limit keeps the log's beginning and end"
        return self._time_now() + b" e " + said.encode()

    def _line(self, key: _Key, rank: int, text: bytes | bytearray, used: int) -> bytes:
        source, stream = key
        end = self._known.ends[key] = self._known.ends.get(key, 0) + used
        return b"%s %s@%s:%d [%d]<%s>:%s\n" % (
            self._time, stream.encode(), source.encode(), end, rank, _NAMES[stream], text,
        )  # fmt: skip

    def _time_now(self) -> bytes:
        """Return one time for all lines of a piece, because formatting a time takes longer than writing a line."""
        return datetime.fromtimestamp(self._now(), timezone.utc).isoformat("T", "microseconds")[:26].encode() + b"000Z"

    def _append(self, data: bytes) -> None:
        """Append lines. For a new attempt, writes a checkpoint first, so that a torn write leaves no line without
        it.
        """
        if self._room.is_holding:
            self._room.hold(data)
            return
        if self._begin:
            self._write_checkpoint(self._begin)
            self._begin = b""
        self._write(data)
        self._since_checkpoint += len(data)
        if self._since_checkpoint >= CHECKPOINT_BYTES:
            self._write_checkpoint(self._known.checkpoint())
            self._since_checkpoint = 0
        self._room.made(os.lseek(self.descriptor, 0, os.SEEK_END), lambda: self.path.open_file(os.O_RDWR))
        self._known.kept, self._known.gone = self._room.kept, self._room.gone

    def _write_checkpoint(self, checkpoint: bytes) -> None:
        """Write a checkpoint. Syncs first what it counts, because readers look for gaps only after it."""
        if self._room.is_holding:
            return
        os.fsync(self.descriptor)
        self._write(checkpoint)

    def _write(self, data: bytes) -> None:
        free, disk = disk_of(self.descriptor)
        if free - len(data) < reserve_of(disk) // RESERVE_PART:
            raise OSError(
                errno.ENOSPC,
                "the head's disk is almost full; the rest is reserved for the state of jobs",
                str(self.path),
            )
        left = memoryview(data)
        while left:  # a disk that fills up takes a part, and refuses the rest
            left = left[os.write(self.descriptor, left) :]
        faults.point()

    def _write_launchers(self, time: str, stream: str, text: bytes) -> None:
        if self._known.take_time(time):
            self._passing = 0
        self._append(f"{time} {stream} ".encode() + text)

    def _move_away(self) -> None:
        """Move something that is in the log's place and not a file: a pipe would block every writer for ever."""
        try:
            if stat.S_ISREG(self.path.stat().st_mode):
                return
        except FileNotFoundError:
            return
        aside = durable.set_aside(self.path)
        self._on_damage(f"the log {self.path} was not a file: gpurun renamed it to {aside.name} and began a new log")

    def _end(self) -> _Known:
        """Return the file's position, after cutting off a torn last line."""
        known, end, lines = _Known(self._attempt), 0, list[bytes]()
        with suppress(FileNotFoundError), os.fdopen(self.path.open_file(os.O_RDWR), "r+b") as stream:
            end, lines = last(stream, _has_checkpoint, most_bytes=4 * CHECKPOINT_BYTES)
            stream.truncate(end)
        if damaged := known.read(lines, end):
            self._on_damage(f"{self.path}: {count(damaged, 'line is', 'lines are')} damaged; lines may appear twice")
        return known


class _Known:
    """The position of a log.

    Attributes:
        last: the launcher's last timestamp.
        same: the number of its lines with this timestamp.
        ends: the offset after the last line of each of the attempt's ranks.
        since_checkpoint: bytes after the last checkpoint. Writers that die early add to it.
        kept, gone: as `gpurun.supervisor.log.LogRoom`.
        needs_checkpoint: the next writer begins with a checkpoint: for a new attempt, or after a gap.
    """

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._written_for = "1/"
        self.last = ""
        self.same = 0
        self.ends: dict[_Key, int] = {}
        self.since_checkpoint = 0
        self.kept = self.gone = 0
        self.needs_checkpoint = False

    def take_time(self, time: str) -> bool:
        """Take the launcher's next line; return False if its time is not Docker's. The line before then stays the
        last.
        """
        if _unix(time) is None:
            return False
        self.same = self.same + 1 if time == self.last else 1
        self.last = time
        return True

    def read(self, lines: list[bytes], end: int) -> int:
        """Read the lines of a log that end at the offset `end`; return how many are damaged."""
        damaged, sound = 0, True
        offset = end - sum(len(raw) + 1 for raw in lines)
        for raw in lines:
            is_whole = not has_hole(raw, offset)
            line = split(raw) if is_whole else None
            offset += len(raw) + 1
            self.since_checkpoint += len(raw) + 1
            if line is not None and line.stream == CHECKPOINT:
                sound = self._restore(line.text)
                damaged += not sound
            elif line is not None and line.source:
                self._take_rank(line)
            else:
                sound = sound and is_whole
                damaged += line is None or not sound or not self.take_time(line.time)
        is_new = self._written_for != self._attempt
        if is_new:  # another launcher, perhaps on a host whose clock is behind
            self.last, self.same = "", 0
        self.needs_checkpoint = is_new or not sound or self.since_checkpoint >= CHECKPOINT_BYTES
        return damaged

    def _take_rank(self, line: RawLine) -> None:
        """Count a line if it begins where the one before ended. After a gap, only repeated lines do."""
        key = (line.source, line.stream)
        length = len(line.text.partition(b":")[2])
        if line.source.startswith(self._attempt) and line.end - length - self.ends.get(key, 0) in (0, 1):
            self.ends[key] = line.end

    def checkpoint(self) -> bytes:
        """Return a line from which `read` can continue."""
        ends = [[*key, end] for key, end in self.ends.items()]
        said = {"attempt": self._attempt, "last": self.last, "same": self.same, "ends": ends}
        said |= {"kept": self.kept, "gone": self.gone} if self.kept else {}
        return f"- {CHECKPOINT} {json.dumps(said)}\n".encode()

    def _restore(self, text: bytes) -> bool:
        try:
            said = json.loads(text)
            last, same = str(said["last"]), int(said["same"])
            ends = {(str(source), str(stream)): int(end) for source, stream, end in said["ends"]}
            self.kept, self.gone = int(said.get("kept", 0)), int(said.get("gone", 0))
            self._written_for = str(said.get("attempt", self._attempt))
            self.since_checkpoint = 0
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        self.last, self.same = last, same
        self.ends = {key: end for key, end in ends.items() if key[0].startswith(self._attempt)}
        return True


def _has_checkpoint(lines: list[bytes]) -> bool:
    return any(raw.startswith(_CHECKPOINT_HEAD) for raw in lines)


def _unix(time: str) -> str | None:
    """Convert ``2026-01-02T03:04:05.123456789Z`` to ``seconds.nanoseconds`` (docker logs API, ``since``); None if
    invalid.
    """
    match = _STAMP.fullmatch(time)
    if match is None:
        return None
    try:
        whole = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc)
    except ValueError:  # the 13th month
        return None
    return f"{int(whole.timestamp())}.{(match[2] or '0').ljust(9, '0')}"
