from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.supervisor import joblog
from gpurun.supervisor.joblog import JobLog, read_lines


def texts(path):
    return [logged.line.text for logged in read_lines(path)[0]]


def message(nanos, text):
    return f"2026-11-21T01:02:03.{nanos:09d}Z {text}".encode()


def test_lines_are_kept_with_rank_and_time(tmp_path):
    log = JobLog(tmp_path / "log")
    log.take("stdout", message(1, "[0]<stdout>:hello\n"))
    log.take("stderr", message(2, "launcher says ü\n"))
    log.close()
    (first, second), offset = read_lines(tmp_path / "log")
    assert (first.time, first.line.rank, first.line.text) == ("2026-11-21T01:02:03.000000001Z", 0, "hello")
    assert (second.line.rank, second.line.stream) == (None, "stderr")
    assert read_lines(tmp_path / "log", offset) == ([], offset)


def test_long_lines_come_in_pieces_and_streams_do_not_mix(tmp_path):
    log = JobLog(tmp_path / "log")
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
    first = JobLog(path)
    for stamp, text in all_messages[:cut]:
        first.take("stdout", message(stamp, text))
    if torn:
        with path.open("ab") as stream:
            stream.write(b"2026-11-21T01:02:03.000000")
    second = JobLog(path)
    since = second.since
    second.resume()
    nanos = -1 if since is None else int(since.split(".")[1])
    for stamp, text in all_messages:
        if stamp >= nanos:
            second.take("stdout", message(stamp, text))
    assert texts(path) == [text.strip() for _, text in all_messages]


def test_since_is_what_docker_wants(tmp_path):
    log = JobLog(tmp_path / "log")
    assert log.since is None
    log.take("stdout", b"1970-01-02T00:00:01.5Z x\n")
    assert log.since == "86401.500000000"


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_are_a_traceback(tmp_path_factory, messages):
    path = tmp_path_factory.mktemp("log") / "log"
    log = JobLog(path)
    for data in messages:
        log.take("stdout", data)
    log.close()
    read_lines(path)
    JobLog(path).close()


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 40 + b"\n", b"\xff\xfe o x\n", b"2026-13-41T99:00:00Z o x\n", b"2026-11-21 o x\n", b"\n", b"no words\n"],
)
def test_a_damaged_time_is_named_and_not_gone_on_from(tmp_path, damage):
    path, told = tmp_path / "log", []
    log = JobLog(path)
    log.take("stdout", message(1, "kept\n"))
    log.close()
    with path.open("ab") as stream:
        stream.write(damage)
    again = JobLog(path, on_damage=told.append)
    assert again.since == "1795222923.000000001"
    assert len(told) == 1
    assert str(path) in told[0]
    again.resume()
    again.take("stdout", message(1, "kept\n"))
    again.take("stdout", message(2, "more\n"))
    assert [texts(path)[0], texts(path)[-1]] == ["kept", "more"]


def test_a_log_of_nothing_but_damage_is_asked_for_from_its_beginning(tmp_path):
    (tmp_path / "log").write_bytes(b"\0\0\0\n")
    assert JobLog(tmp_path / "log").since is None


def test_a_message_without_a_time_is_kept_and_the_log_goes_on_from_the_one_before(tmp_path):
    log = JobLog(tmp_path / "log")
    log.take("stdout", message(1, "sound\n"))
    log.take("stdout", b"\0\0 odd\n")
    assert log.since == "1795222923.000000001"
    assert texts(tmp_path / "log") == ["sound", "odd"]


def test_a_line_longer_than_what_is_looked_at_first_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(joblog, "_TAIL_BYTES", 64)
    log = JobLog(tmp_path / "log")
    log.take("stdout", message(1, "short\n"))
    log.take("stdout", message(2, "x" * 3000 + "\n"))
    log.close()
    told = []
    assert JobLog(tmp_path / "log", on_damage=told.append).since == "1795222923.000000002"
    assert told == []


@pytest.mark.parametrize("thing", ["pipe", "folder", "link to itself"])
def test_what_is_no_file_is_moved_out_of_the_logs_way(tmp_path, thing):
    path = tmp_path / "log"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link to itself": lambda path: path.symlink_to(path)}[thing](path)
    told = []
    log = JobLog(tmp_path / "log", on_damage=told.append)
    log.take("stdout", message(1, "x\n"))
    assert texts(tmp_path / "log") == ["x"]
    (aside,) = [found.name for found in tmp_path.iterdir() if found.name != "log"]
    assert aside in told[0]
