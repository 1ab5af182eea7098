from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.state.path import StatePath
from gpurun.supervisor import joblog
from gpurun.supervisor.joblog import JobLog, LogTail, last_lines


def at(path):
    return StatePath(path.parent) / path.name


def texts(path):
    return [logged.line.text for logged in LogTail(at(path)).new()]


def message(nanos, text):
    return f"2026-11-21T01:02:03.{nanos:09d}Z {text}".encode()


def test_lines_are_kept_with_rank_and_time(tmp_path):
    log = JobLog(at(tmp_path / "log"))
    log.take("stdout", message(1, "[0]<stdout>:hello\n"))
    log.take("stderr", message(2, "launcher says ü\n"))
    log.close()
    tail = LogTail(at(tmp_path / "log"))
    first, second = tail.new()
    assert (first.time, first.line.rank, first.line.text) == ("2026-11-21T01:02:03.000000001Z", 0, "hello")
    assert (second.line.rank, second.line.stream) == (None, "stderr")
    assert list(tail.new()) == []


def test_long_lines_come_in_pieces_and_streams_do_not_mix(tmp_path):
    log = JobLog(at(tmp_path / "log"))
    log.take("stdout", message(1, "a" * 16384))
    log.take("stderr", message(2, "whole\n"))
    log.take("stdout", message(3, "b\n"))
    log.close()
    assert texts(tmp_path / "log") == ["whole", "a" * 16384 + "b"]


@given(
    stamps=st.lists(st.integers(0, 5), min_size=1, max_size=40).map(sorted),
    cut=st.integers(0, 40),
    torn=st.booleans(),
)
def test_a_new_supervisor_catches_up_without_gap_or_duplicate(tmp_path_factory, stamps, cut, torn):
    path = tmp_path_factory.mktemp("log") / "log"
    all_messages = [(stamp, f"line {number}\n") for number, stamp in enumerate(stamps)]
    first = JobLog(at(path))
    for stamp, text in all_messages[:cut]:
        first.take("stdout", message(stamp, text))
    if torn:
        with path.open("ab") as stream:
            stream.write(b"2026-11-21T01:02:03.000000")
    second = JobLog(at(path))
    since = second.since
    second.resume()
    nanos = -1 if since is None else int(since.split(".")[1])
    for stamp, text in all_messages:
        if stamp >= nanos:
            second.take("stdout", message(stamp, text))
    assert texts(path) == [text.strip() for _, text in all_messages]


def test_since_is_what_docker_wants(tmp_path):
    log = JobLog(at(tmp_path / "log"))
    assert log.since is None
    log.take("stdout", b"1970-01-02T00:00:01.5Z x\n")
    assert log.since == "86401.500000000"


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_are_a_traceback(tmp_path_factory, messages):
    path = tmp_path_factory.mktemp("log") / "log"
    log = JobLog(at(path))
    for data in messages:
        log.take("stdout", data)
    log.close()
    assert texts(path) == [one.line.text for one in last_lines(at(path), 100)]
    JobLog(at(path)).close()


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 40 + b"\n", b"\xff\xfe o x\n", b"2026-13-41T99:00:00Z o x\n", b"2026-11-21 o x\n", b"\n", b"no words\n"],
)
def test_a_damaged_time_is_named_and_not_gone_on_from(tmp_path, damage):
    path, told = tmp_path / "log", []
    log = JobLog(at(path))
    log.take("stdout", message(1, "kept\n"))
    log.close()
    with path.open("ab") as stream:
        stream.write(damage)
    again = JobLog(at(path), on_damage=told.append)
    assert again.since == "1795222923.000000001"
    assert len(told) == 1
    assert str(path) in told[0]
    again.resume()
    again.take("stdout", message(1, "kept\n"))
    again.take("stdout", message(2, "more\n"))
    assert [texts(path)[0], texts(path)[-1]] == ["kept", "more"]


def test_a_log_of_nothing_but_damage_is_asked_for_from_its_beginning(tmp_path):
    (tmp_path / "log").write_bytes(b"\0\0\0\n")
    assert JobLog(at(tmp_path / "log")).since is None


def test_a_message_without_a_time_is_kept_and_the_log_goes_on_from_the_one_before(tmp_path):
    log = JobLog(at(tmp_path / "log"))
    log.take("stdout", message(1, "sound\n"))
    log.take("stdout", b"\0\0 odd\n")
    assert log.since == "1795222923.000000001"
    assert texts(tmp_path / "log") == ["sound", "odd"]


def test_a_line_longer_than_what_is_looked_at_first_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(joblog, "_TAIL_BYTES", 64)
    log = JobLog(at(tmp_path / "log"))
    log.take("stdout", message(1, "short\n"))
    log.take("stdout", message(2, "x" * 3000 + "\n"))
    log.close()
    told = []
    assert JobLog(at(tmp_path / "log"), on_damage=told.append).since == "1795222923.000000002"
    assert told == []


@pytest.mark.parametrize("thing", ["pipe", "folder", "link to itself"])
def test_what_is_no_file_is_moved_out_of_the_logs_way(tmp_path, thing):
    path = tmp_path / "log"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link to itself": lambda path: path.symlink_to(path)}[thing](path)
    told = []
    log = JobLog(at(tmp_path / "log"), on_damage=told.append)
    log.take("stdout", message(1, "x\n"))
    assert texts(tmp_path / "log") == ["x"]
    (aside,) = [found.name for found in tmp_path.iterdir() if found.name != "log"]
    assert aside in told[0]


def test_a_line_that_never_ends_is_broken_and_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(joblog, "_LINE_BYTES", 100)
    messages = [message(nanos, "x" * 60) for nanos in range(1, 6)] + [message(6, "y\n"), message(7, "next\n")]
    log = JobLog(at(tmp_path / "log"))
    for each in messages[:4]:
        log.take("stdout", each)
    assert texts(tmp_path / "log") == ["x" * 120] * 2
    again = JobLog(at(tmp_path / "log"))
    assert again.since == "1795222923.000000004"
    again.resume()
    for each in messages[3:]:
        again.take("stdout", each)
    assert texts(tmp_path / "log") == ["x" * 120, "x" * 120, "x" * 60 + "y", "next"]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 40), st.booleans())
def test_pieces_and_ends_of_a_log_hold_whole_lines(tmp_path_factory, lengths, count, torn):
    path = tmp_path_factory.mktemp("log") / "log"
    log = JobLog(at(path))
    for number, length in enumerate(lengths, 1):
        log.take("stdout", message(number, "z" * length + "\n"))
    log.close()
    if torn:
        with path.open("ab") as stream:
            stream.write(b"2026-11-21T01:02:04.000000001Z o torn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joblog, "_PIECE_BYTES", 64)
        patch.setattr(joblog, "_TAIL_BYTES", 64)
        assert [len(text) for text in texts(path)] == lengths
        assert [len(one.line.text) for one in last_lines(at(path), count)] == lengths[-count:]


def test_lines_lost_in_a_hole_come_again_and_those_behind_it_are_seen(tmp_path):
    path, told = tmp_path / "log", []
    with path.open("wb") as stream:
        stream.write(b"2026-11-21T01:02:03.000000001Z o first\n2026-11-21T01:02:03.000000002Z o sec")
        stream.write(bytes(4096))
        stream.write(b"2026-11-21T01:02:03.000000009Z o ninth\n")
    assert texts(path)[0] == "first"
    assert texts(path)[-1].endswith("ninth")
    log = JobLog(at(path), on_damage=told.append)
    assert log.since == "1795222923.000000001"
    assert "come twice" in told[0]


def test_a_log_of_a_gigabyte_is_read_in_little_memory(tmp_path):
    line = b"2026-11-21T01:02:03.000000001Z o " + b"x" * (1 << 20) + b"\n"
    with (tmp_path / "log").open("wb") as stream:
        for _ in range(64):
            stream.write(line)
        stream.truncate(1 << 30)  # the rest is a hole, as after a power cut
    tracemalloc.start()
    try:
        assert sum(1 for _ in LogTail(at(tmp_path / "log")).new()) == 64
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 48 << 20
