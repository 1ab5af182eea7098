"""A log that is larger than its limit: its beginning and its end stay, and what is missing is said."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from itertools import pairwise

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.state import durable
from gpurun.state.paths import StatePath
from gpurun.supervisor import log as joblog
from gpurun.supervisor import log as logroom
from gpurun.supervisor.lines import LogTail, last_lines
from gpurun.supervisor.log import JobLog

LIMIT = 1 << 18


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(logroom, "LEAST_BYTES", LIMIT)
    monkeypatch.setattr(joblog, "CHECKPOINT_BYTES", LIMIT // 64)


def at(path):
    return StatePath(path.parent) / path.name


def opened(path, **options):
    return JobLog(at(path), attempt=1, now=lambda: 1795222923.5, **{"limit": LIMIT, **options})


def feed(log, lines, *, begin=0, piece=4096):
    """Output of rank 0, in pieces that end anywhere. Returns the offset after it."""
    text = b"".join(b"%s\n" % line for line in lines)
    for cut in range(0, len(text), piece):
        part = text[cut : cut + piece]
        log.take_output("h/1.2.3", 0, "o", begin + cut + len(part), part)
    return begin + len(text)


def numbers(path):
    """The numbers of the lines that the log has, in order; and what it says about the others."""
    texts = [logged.line.text for logged in LogTail(at(path)).new()]
    said = [text for text in texts if text.startswith("gpurun: ")]
    return [int(text.split()[1]) for text in texts if text.startswith("line ")], said


def many(count, first=0):
    return [b"line %d %s" % (number, b"x" * (number % 90)) for number in range(first, first + count)]


def test_the_beginning_and_the_end_stay_and_what_is_missing_is_said(tmp_path):
    path = tmp_path / "log"
    log = opened(path)
    feed(log, many(20_000))
    log.close()
    found, said = numbers(path)
    hole = next(number for number, after in pairwise(found) if after != number + 1)
    assert found == [*range(hole + 1), *range(found[hole + 1], 20_000)]
    assert path.stat().st_blocks * 512 <= LIMIT + (64 << 10)
    assert hole > 500 and 20_000 - found[hole + 1] > 500
    gone_mib = -(-(path.stat().st_size - LIMIT // 2) >> 20)
    assert said == [f"gpurun: {gone_mib} MiB of the log are gone here: log_limit keeps the log's beginning and end"]


def test_a_log_within_its_limit_is_whole(tmp_path):
    log = opened(tmp_path / "log")
    feed(log, many(1500))
    log.close()
    assert numbers(tmp_path / "log") == ([*range(1500)], [])
    assert (tmp_path / "log").stat().st_size <= LIMIT


def test_a_log_without_a_limit_is_whole(tmp_path):
    log = opened(tmp_path / "log", limit=None)
    feed(log, many(20_000))
    log.close()
    assert numbers(tmp_path / "log") == ([*range(20_000)], [])


@examples("logs that another supervisor continues")
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=6), st.integers(1, 5000))
def test_another_supervisor_continues_without_a_gap_or_a_duplicate(tmp_path_factory, parts, piece):
    path, begin, first = tmp_path_factory.mktemp("log") / "log", 0, 0
    for count in parts:
        log = opened(path)
        assert log.have("h") == ({"1.2.3": [begin, 0, 0]} if begin else {})
        begin, first = feed(log, many(count, first), begin=begin, piece=piece), first + count
        os.close(log.descriptor)  # it is killed: nothing is closed
    found, said = numbers(path)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, first - 1)
    assert len(said) == (found != [*range(first)])
    assert path.stat().st_blocks * 512 <= LIMIT + (64 << 10)


def test_a_reader_that_follows_gets_each_line_that_stays(tmp_path):
    path, seen = tmp_path / "log", []
    log, tail, begin = opened(path), LogTail(at(path)), 0
    for turn in range(40):
        begin = feed(log, many(500, 500 * turn), begin=begin)
        seen += [logged.line.text for logged in tail.new()]
    log.close()
    assert [int(text.split()[1]) for text in seen if text.startswith("line ")] == [*range(20_000)]


def test_a_reader_that_stopped_long_ago_goes_on_behind_what_is_gone(tmp_path):
    path = tmp_path / "log"
    log, tail = opened(path), LogTail(at(path))
    begin = feed(log, many(1000))
    early = [int(logged.line.text.split()[1]) for logged in tail.new()]
    feed(log, many(30_000, 1000), begin=begin)
    log.close()
    late = [logged.line.text for logged in tail.new()]
    assert early == [*range(1000)]
    assert sum("are gone here" in text for text in late) == 1
    assert late[-1].startswith("line 30999 ")
    assert [line.line.text.split()[1] for line in last_lines(at(path), 3)] == ["30997", "30998", "30999"]


def test_what_is_gone_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = opened(path)
    feed(log, many(100_000), piece=1 << 16)
    log.close()
    monkeypatch.setattr(durable, "PIECE_BYTES", 1 << 14)
    read, real = [], durable.GrowingFile._piece
    monkeypatch.setattr(durable.GrowingFile, "_piece", lambda self: read.append(piece := real(self)) or piece)
    assert numbers(path)[0][-1] == 99_999
    assert sum(map(len, read)) < 2 * LIMIT < path.stat().st_size


class FailingHoles:
    """fallocate(2), of which the first calls fail."""

    def __init__(self, monkeypatch, number, *, times):
        self.calls, self._number, self._times = 0, number, times
        self._real = ctypes.CDLL(None, use_errno=True).fallocate
        monkeypatch.setattr(logroom.ctypes, "CDLL", lambda *_, **__: self)

    def fallocate(self, *arguments):
        self.calls += 1
        if self.calls > self._times:
            return self._real(*arguments)
        ctypes.set_errno(self._number)
        return -1


@pytest.mark.parametrize("name", ["EINTR", "ENOSPC", "EIO", "EDQUOT", "ENOMEM"])
def test_a_hole_that_fails_is_made_later_and_nothing_is_held_back(tmp_path, monkeypatch, name):
    holes = FailingHoles(monkeypatch, getattr(errno, name), times=2)
    path = tmp_path / "log"
    log = opened(path)
    begin = feed(log, many(20_000))
    os.close(log.descriptor)  # its supervisor is killed
    found, said = numbers(path)
    assert (found[0], found[-1], len(said)) == (0, 19_999, 1)
    assert path.stat().st_blocks * 512 <= LIMIT * 5 // 4
    assert holes.calls > 2
    assert opened(path).have("h") == {"1.2.3": [begin, 0, 0]}


def test_holes_that_keep_failing_are_tried_seldom(tmp_path, monkeypatch):
    holes = FailingHoles(monkeypatch, errno.ENOSPC, times=10**9)
    log = opened(path := tmp_path / "log")
    feed(log, many(20_000), piece=1 << 10)
    log.close()
    assert numbers(path)[0] == list(range(20_000))
    assert 2 < holes.calls <= path.stat().st_size // (LIMIT // logroom.TRIES_PER_LIMIT)


def test_where_no_holes_can_be_made_the_end_is_written_when_the_log_is_closed(tmp_path, monkeypatch):
    FailingHoles(monkeypatch, errno.EOPNOTSUPP, times=1)
    monkeypatch.setattr(logroom, "HELD_BYTES", 1 << 14)
    path = tmp_path / "log"
    log = opened(path)
    begin = feed(log, many(20_000))
    assert log.have("h") == {"1.2.3": [begin, 0, 0]}
    log.close()
    found, said = numbers(path)
    assert (found[0], found[-1], len(said)) == (0, 19_999, 1)
    assert path.stat().st_size <= LIMIT + (1 << 16)
    assert found == sorted(set(found)) and len(found) > 1000


def test_a_rank_whose_output_was_skipped_says_so(tmp_path):
    path = tmp_path / "log"
    log = opened(path)
    begin = feed(log, many(10))
    log.take_output("h/1.2.3", 0, "o", begin + (5 << 20) + 7, b"line 12")
    log.take_output("h/1.2.3", 0, "o", begin + (5 << 20) + 8, b"\n")
    os.close(log.descriptor)
    found, said = numbers(path)
    assert found == [*range(10), 12]
    assert said == [
        "gpurun: 5 MiB of this rank's output are missing here: it printed more than could be copied in time"
    ]
    assert opened(path).have("h") == {"1.2.3": [begin + (5 << 20) + 8, 0, 0]}


def test_a_gigabyte_of_short_lines_costs_little(tmp_path):
    """Of 98 bytes, as in the report that made this limit: at least 40 MB of them in a second of CPU."""
    piece = b"%s\n" % (b"x" * 97) * 668
    log = opened(tmp_path / "log", limit=16 << 20)
    begun_s, count = time.process_time(), 256
    for number in range(count):
        log.take_output("h/1.2.3", 0, "o", (number + 1) * len(piece), piece)
    spent_s = time.process_time() - begun_s
    log.close()
    print(f"{count * len(piece) / 1e6 / spent_s:.0f} MB in a second of CPU")  # noqa: T201
    assert count * len(piece) / 1e6 / spent_s > 10


@given(st.binary(max_size=300), st.integers(0, 300))
def test_the_rest_of_a_line_becomes_empty_lines(tmp_path_factory, content, offset):
    path = tmp_path_factory.mktemp("f") / "f"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    end = logroom._to_line(descriptor, offset, len(content))
    os.close(descriptor)
    after = path.read_bytes()
    assert len(after) == len(content)
    assert after[:offset] == content[:offset] and after[end:] == content[end:]
    assert set(after[offset:end]) <= {10}
