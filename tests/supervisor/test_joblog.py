from __future__ import annotations

import errno
import os
import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.state import durable as growing
from gpurun.state.paths import StatePath
from gpurun.supervisor import lines as loglines
from gpurun.supervisor import log as joblog
from gpurun.supervisor.lines import LogTail, last_lines
from gpurun.supervisor.log import JobLog


def at(path):
    return StatePath(path.parent) / path.name


def now():
    return 1795222923.5


def texts(path):
    return [logged.line.text for logged in LogTail(at(path)).new()]


def message(nanos, text):
    return f"2026-11-21T01:02:03.{nanos:09d}Z {text}".encode()


def test_lines_are_kept_with_rank_and_time(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "[0]<stdout>:hello\n"))
    log.take("stderr", message(2, "launcher says ü\n"))
    log.close()
    tail = LogTail(at(tmp_path / "log"))
    first, second = tail.new()
    assert (first.time, first.line.rank, first.line.text) == ("2026-11-21T01:02:03.000000001Z", 0, "hello")
    assert (second.line.rank, second.line.stream) == (None, "stderr")
    assert list(tail.new()) == []


def test_long_lines_come_in_pieces_and_streams_do_not_mix(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "a" * 16384))
    log.take("stderr", message(2, "whole\n"))
    log.take("stdout", message(3, "b\n"))
    log.close()
    assert texts(tmp_path / "log") == ["whole", "a" * 16384 + "b"]


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_character_that_docker_cuts_in_two_stays_whole(tmp_path, cut):
    text = "aü€b\n".encode()
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "") + text[:cut])
    log.take("stdout", message(2, "") + text[cut:])
    log.close()
    assert texts(tmp_path / "log") == ["aü€b"]


def test_what_a_launcher_prints_that_is_no_text_stays_as_it_is(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "") + b"caf\xe9\n")
    log.take("stderr", message(2, "") + b"\xff")
    log.close()
    first, second = (tmp_path / "log").read_bytes().splitlines()
    assert first.endswith(b" o caf\xe9")
    assert second.endswith(b" e \xff")


@given(
    stamps=st.lists(st.integers(0, 5), min_size=1, max_size=40).map(sorted),
    cut=st.integers(0, 40),
    torn=st.booleans(),
)
def test_a_new_supervisor_catches_up_without_gap_or_duplicate(tmp_path_factory, stamps, cut, torn):
    path = tmp_path_factory.mktemp("log") / "log"
    all_messages = [(stamp, f"line {number}\n") for number, stamp in enumerate(stamps)]
    first = JobLog(at(path), attempt=1, now=now)
    for stamp, text in all_messages[:cut]:
        first.take("stdout", message(stamp, text))
    if torn:
        with path.open("ab") as stream:
            stream.write(b"2026-11-21T01:02:03.000000")
    second = JobLog(at(path), attempt=1, now=now)
    since = second.since
    second.resume()
    nanos = -1 if since is None else int(since.split(".")[1])
    for stamp, text in all_messages:
        if stamp >= nanos:
            second.take("stdout", message(stamp, text))
    first.close()
    second.close()
    assert texts(path) == [text.strip() for _, text in all_messages]


def test_since_is_what_docker_wants(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    assert log.since is None
    log.take("stdout", b"1970-01-02T00:00:01.5Z x\n")
    assert log.since == "86401.500000000"


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_are_a_traceback(tmp_path_factory, messages):
    path = tmp_path_factory.mktemp("log") / "log"
    log = JobLog(at(path), attempt=1, now=now)
    for data in messages:
        log.take("stdout", data)
    log.close()
    assert texts(path) == [one.line.text for one in last_lines(at(path), 100)]
    JobLog(at(path), attempt=1, now=now).close()


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 40 + b"\n", b"\xff\xfe o x\n", b"2026-13-41T99:00:00Z o x\n", b"2026-11-21 o x\n", b"\n", b"no words\n"],
)
def test_a_damaged_time_is_named_and_not_gone_on_from(tmp_path, damage):
    path, told = tmp_path / "log", []
    log = JobLog(at(path), attempt=1, now=now)
    log.take("stdout", message(1, "kept\n"))
    log.close()
    with path.open("ab") as stream:
        stream.write(damage)
    again = JobLog(at(path), attempt=1, now=now, on_damage=told.append)
    assert again.since == "1795222923.000000001"
    assert len(told) == 1
    assert str(path) in told[0]
    again.resume()
    again.take("stdout", message(1, "kept\n"))
    again.take("stdout", message(2, "more\n"))
    assert [texts(path)[0], texts(path)[-1]] == ["kept", "more"]


def test_a_log_of_nothing_but_damage_is_asked_for_from_its_beginning(tmp_path):
    (tmp_path / "log").write_bytes(b"\0\0\0\n")
    assert JobLog(at(tmp_path / "log"), attempt=1, now=now).since is None


def test_a_message_without_a_time_is_kept_and_the_log_goes_on_from_the_one_before(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "sound\n"))
    log.take("stdout", b"\0\0 odd\n")
    assert log.since == "1795222923.000000001"
    assert texts(tmp_path / "log") == ["sound", "odd"]


def test_a_line_longer_than_what_is_looked_at_first_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(loglines, "TAIL_BYTES", 64)
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "short\n"))
    log.take("stdout", message(2, "x" * 3000 + "\n"))
    log.close()
    told = []
    assert JobLog(at(tmp_path / "log"), attempt=1, now=now, on_damage=told.append).since == "1795222923.000000002"
    assert told == []


@pytest.mark.parametrize("thing", ["pipe", "folder", "link to itself"])
def test_what_is_no_file_is_moved_out_of_the_logs_way(tmp_path, thing):
    path = tmp_path / "log"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link to itself": lambda path: path.symlink_to(path)}[thing](path)
    told = []
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now, on_damage=told.append)
    log.take("stdout", message(1, "x\n"))
    assert texts(tmp_path / "log") == ["x"]
    (aside,) = [found.name for found in tmp_path.iterdir() if found.name != "log"]
    assert aside in told[0]


def test_a_line_that_never_ends_is_broken_and_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(joblog, "LINE_BYTES", 100)
    messages = [message(nanos, "x" * 60) for nanos in range(1, 6)] + [message(6, "y\n"), message(7, "next\n")]
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    for each in messages[:4]:
        log.take("stdout", each)
    assert texts(tmp_path / "log") == ["x" * 120] * 2
    again = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    assert again.since == "1795222923.000000004"
    again.resume()
    for each in messages[3:]:
        again.take("stdout", each)
    assert texts(tmp_path / "log") == ["x" * 120, "x" * 120, "x" * 60 + "y", "next"]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 40), st.booleans())
def test_pieces_and_ends_of_a_log_hold_whole_lines(tmp_path_factory, lengths, count, torn):
    path = tmp_path_factory.mktemp("log") / "log"
    log = JobLog(at(path), attempt=1, now=now)
    for number, length in enumerate(lengths, 1):
        log.take("stdout", message(number, "z" * length + "\n"))
    log.close()
    if torn:
        with path.open("ab") as stream:
            stream.write(b"2026-11-21T01:02:04.000000001Z o torn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "PIECE_BYTES", 64)
        patch.setattr(loglines, "TAIL_BYTES", 64)
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
    log = JobLog(at(path), attempt=1, now=now, on_damage=told.append)
    assert log.since == "1795222923.000000001"
    assert "appear twice" in told[0]


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


def output(path):
    """What each rank has printed, as the log has it."""
    found = {}
    for raw in path.read_bytes().split(b"\n")[:-1]:
        line = loglines.split(raw)
        if line is not None and line.source:
            found.setdefault((line.source, line.stream), []).append(line.text.partition(b":")[2])
    return {source: b"\n".join(lines) for source, lines in found.items()}


def test_a_ranks_lines_have_its_number_and_their_bytes_pass(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=2, now=now)
    log.take_output("n1/3.17", 3, "o", 8, b"caf\xe9 \xff\xfe\n")
    log.take_output("n1/3.17", 3, "e", 4, b"oops")
    log.take("stdout", message(1, "launcher\n"))
    log.close()
    _, first, *_ = (tmp_path / "log").read_bytes().split(b"\n")
    assert first == b"2026-11-21T01:02:03.500000000Z o@2/n1/3.17:8 [3]<stdout>:caf\xe9 \xff\xfe"
    lines = [logged.line for logged in LogTail(at(tmp_path / "log")).new()]
    assert [(line.rank, line.stream) for line in lines] == [(3, "stdout"), (None, "stdout"), (3, "stderr")]
    assert [line.text for line in lines[1:]] == ["launcher", "oops"]


def test_what_a_rank_prints_is_read_as_it_was_printed(tmp_path):
    """The first space of each indented line was lost: tracebacks, YAML and tables had other shapes."""
    every_byte = bytes(byte for byte in range(256) if byte != ord("\n"))
    lines = [b"  two", b" one", b"    File", b"\tx", b"", b" ", b"x  ", b"10 %\r20 %\r", b"a\r", b"[1,0]<stdout>: x"]
    lines += [every_byte, b"[0]<stdout>: y", b"  " + b"x" * (joblog.LINE_BYTES - 2), b"  no newline"]
    printed = b"\n".join(lines)
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    for begin in range(0, len(printed), 1 << 16):
        piece = printed[begin : begin + (1 << 16)]
        log.take_output("h/3.1.2", 3, "o", begin + len(piece), piece)
    log.end_lines("h/3.1.2")
    log.close()
    assert texts(tmp_path / "log") == [line.decode(errors="replace") for line in lines]


def test_what_ranks_report_is_in_the_log_and_nobody_takes_it_for_printed(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=2, now=now)
    said = b'{"time": 1.5, "step": 3, "metrics": {"accuracy": 0.5, "loss": NaN}}\n'
    log.take_output("n1/3.17", 3, "o", 6, b"hello\n")
    log.take_output("n1/3.17", 3, "m", len(said), said)
    assert log.have("n1") == {"3.17": [6, 0, len(said)]}
    log.close()
    tail = LogTail(at(tmp_path / "log"))
    (report,) = tail.new_reports()
    assert report[:4] == (2, 3, 3, 1.5) and report.metrics["accuracy"] == 0.5 and report.metrics["loss"] != 0
    assert list(tail.new_reports()) == []
    assert [line.line.text for line in LogTail(at(tmp_path / "log")).new()] == ["hello"]
    assert [line.line.text for line in last_lines(at(tmp_path / "log"), 1)] == ["hello"]


@pytest.mark.parametrize(
    "said",
    [
        b"", b"[]", b'"x"', b"{}", b'{"step": 1}', b'{"time": 1, "step": "x", "metrics": {}}', b"\xff", b"[" * 100_000,
        b'{"time": 1, "step": 1, "metrics": {"a": "many"}}', b'{"time": 1, "step": 1, "metrics": [1]}',
        b'{"time": 1, "step": 1e999, "metrics": {}}', b'{"time": 1, "step": 1, "metrics": {"a": 1' + b"0" * 400 + b"}}",
        b'{"time": 1, "step": 1, "metrics": {"' + b"a" * 20_000 + b'": 1}}',
    ],
)  # fmt: skip
def test_what_no_runtime_reports_is_no_report(tmp_path, said):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take_output("n1/3.17", 3, "m", len(said) + 1, said + b"\n")
    good = b'{"time": 1, "step": 1, "metrics": {"a": 2}}\n'
    log.take_output("n1/3.17", 3, "m", len(said) + 1 + len(good), good)
    log.close()
    assert [report.metrics for report in LogTail(at(tmp_path / "log")).new_reports()] == [{"a": 2.0}]


@given(
    pieces=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("oe"), st.binary(max_size=30)), max_size=25),
    stops=st.lists(st.integers(0, 25), max_size=3),
    torn=st.booleans(),
    every=st.sampled_from([1, 100, 1 << 20]),
)
def test_every_byte_of_every_rank_is_there_once_whoever_writes_on(tmp_path_factory, pieces, stops, torn, every):
    """Supervisors that die at any time follow each other; each is sent again what the file does not have."""
    path = tmp_path_factory.mktemp("log") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joblog, "CHECKPOINT_BYTES", every)
        patch.setattr(joblog, "LINE_BYTES", 20)
        printed = {}
        log = JobLog(at(path), attempt=1, now=now)
        for number, (rank, stream, data) in enumerate(pieces):
            key = (rank, stream)
            printed[key] = printed.get(key, b"") + data.replace(b"\0", b"0")
            log.take_output(f"h/{rank}", ord(rank), stream, len(printed[key]), data.replace(b"\0", b"0"))
            if number in stops:
                os.close(log.descriptor)
                if torn:
                    with path.open("ab") as file:
                        file.write(b"2026-11-21T01:02:04.000000001Z o@1/h/a:999 [97]<stdout>:torn")
                log = JobLog(at(path), attempt=1, now=now)
                for (name, kind), all_of_it in printed.items():
                    had = log.have("h").get(name, [0, 0])[kind == "e"]
                    begin = max(0, had - 3)  # more than was asked for does no harm
                    log.take_output(f"h/{name}", ord(name), kind, len(all_of_it), all_of_it[begin:])
        log.close()
    there = {(source[4:], stream): data for (source, stream), data in output(path).items()}
    assert {key: b"".join(data.split(b"\n")) for key, data in there.items()} == {
        key: b"".join(data.split(b"\n")) for key, data in printed.items() if data
    } or not any(printed.values())
    for key, data in printed.items():
        if b"\n" in data and all(len(line) < 20 for line in data.split(b"\n")):
            assert there[key].rstrip(b"\n") == data.rstrip(b"\n")


def test_a_log_leaves_room_for_the_state_of_all_jobs_and_goes_on_when_there_is_some(tmp_path, monkeypatch):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take_output("h/0.1", 0, "o", 4, b"one\n")
    monkeypatch.setattr(joblog, "disk_of", lambda _: (100 << 20, 100 << 30))
    with pytest.raises(OSError) as caught:
        log.take_output("h/0.1", 0, "o", 8, b"two\n")
    assert caught.value.errno == errno.ENOSPC and "state of jobs" in str(caught.value)
    os.close(log.descriptor)
    monkeypatch.undo()
    again = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    assert again.have("h") == {"0.1": [4, 0, 0]}
    again.take_output("h/0.1", 0, "o", 8, b"two\n")
    again.close()
    assert texts(tmp_path / "log") == ["one", "two"]


def test_a_rank_cannot_forge_what_the_log_goes_on_from(tmp_path, monkeypatch):
    forged = (
        b'x\n- c {"last": "", "same": 0, "ends": []}\n2026-11-21T01:02:03.000000009Z o@1/h/0.1:4000 [0]<stdout>:y\n'
    )
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take("stdout", message(1, "launcher\n"))
    log.take_output("h/0.1", 0, "o", len(forged), forged)
    log.close()
    again = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    assert again.since == "1795222923.000000001"
    assert again.have("h") == {"0.1": [len(forged), 0, 0]}


@pytest.mark.parametrize("damage", [b"- c {}\n", b"- c [\n", b"- c " + b"[" * 100_000 + b"\n", b'- c {"last": 1}\n'])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    told = []
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take_output("h/0.1", 0, "o", 2, b"x\n")
    log.close()
    with (tmp_path / "log").open("ab") as stream:
        stream.write(damage)
    again = JobLog(at(tmp_path / "log"), attempt=1, now=now, on_damage=told.append)
    assert again.have("h") == {"0.1": [2, 0, 0]}
    assert len(told) == 1


def test_another_attempt_begins_its_ranks_anew(tmp_path):
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    log.take_output("h/0.1", 0, "o", 2, b"x\n")
    log.close()
    assert JobLog(at(tmp_path / "log"), attempt=2, now=now).have("h") == {}


def test_a_ranks_lines_lost_in_a_hole_come_again(tmp_path):
    path = tmp_path / "log"
    log = JobLog(at(path), attempt=1, now=now)
    lines = b"".join(b"%05d\n" % number for number in range(1000))
    log.take_output("h/0.1", 0, "o", len(lines), lines)
    log.close()
    data = bytearray(path.read_bytes())
    data[8192:12288] = bytes(4096)
    path.write_bytes(data)
    again = JobLog(at(path), attempt=1, now=now)
    had, *_ = again.have("h")["0.1"]
    assert had < 8192
    again.take_output("h/0.1", 0, "o", len(lines), lines[had:])
    again.close()
    third = JobLog(at(path), attempt=1, now=now)
    assert third.have("h")["0.1"] == [len(lines), 0, 0], "what came again counts, and comes no third time"
    assert set(lines.split(b"\n")) <= set(output(path)["1/h/0.1", "o"].split(b"\n")) | {b""}


def test_supervisors_that_die_early_do_not_make_a_log_come_twice(tmp_path, monkeypatch):
    """None of them writes enough for a checkpoint; together they write more than a new one looks at."""
    monkeypatch.setattr(joblog, "CHECKPOINT_BYTES", 1 << 18)
    line, printed = b"x" * 1000 + b"\n", 0
    for _ in range(9):
        log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
        assert log.have("h").get("0.1", [0, 0, 0]) == [printed, 0, 0]
        for _ in range(200):
            printed += len(line)
            log.take_output("h/0.1", 0, "o", printed, line)
        os.close(log.descriptor)


def test_another_attempts_launcher_is_asked_from_its_beginning(tmp_path):
    """It may run on a host whose clock is behind that of the last one."""
    first = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    first.take("stdout", message(9, "attempt 1\n"))
    first.close()
    second = JobLog(at(tmp_path / "log"), attempt=2, now=now)
    assert second.since is None
    second.take("stdout", message(5, "attempt 2\n"))
    os.close(second.descriptor)
    again = JobLog(at(tmp_path / "log"), attempt=2, now=now)
    assert again.since == "1795222923.000000005"
    for nanos, said in [(5, "attempt 2\n"), (6, "goes on\n")]:
        again.take("stdout", message(nanos, said))
    again.close()
    assert texts(tmp_path / "log") == ["attempt 1", "attempt 2", "goes on"]


def test_a_later_attempts_lines_come_once_though_none_before_it_has_printed(tmp_path):
    for since in (None, "1795222923.000000005"):
        log = JobLog(at(tmp_path / "log"), attempt=2, now=now)
        assert log.since == since
        log.take("stdout", message(5, "attempt 2\n"))
        os.close(log.descriptor)
    assert texts(tmp_path / "log") == ["attempt 2"]


@pytest.mark.parametrize("tail", [b"", bytes(5), bytes(600)], ids=["torn", "zeros", "a hole"])
@pytest.mark.parametrize("attempts", [(1,), (2,), (1, 2), (3,), (1, 2, 3)], ids=str)
def test_every_line_comes_once_wherever_a_power_cut_tears_what_an_attempt_wrote(tmp_path, attempts, tail):
    """The host still has all of it. Attempts that are left out have printed nothing."""
    path, wanted = tmp_path / "log", [line for attempt in attempts for line in what_is_printed(attempt)]
    *earlier, attempt = attempts
    for each in earlier:
        copy_from_the_host(path, each)
    durable = len(path.read_bytes()) if earlier else 0
    copy_from_the_host(path, attempt)
    written = path.read_bytes()
    assert texts(path) == wanted
    for end in range(durable, len(written) + 1):
        path.write_bytes(written[:end] + tail)
        copy_from_the_host(path, attempt)
        assert texts(path) == wanted, f"cut after {end} bytes: {path.read_bytes().decode()}"


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("synced", [0, 5, 12])
def test_a_line_that_a_power_cut_kept_from_the_disk_comes_again_however_short_the_hole(tmp_path, attempt, synced):
    """Any sector may be missing, or the part of one that was written last, though later ones are there."""
    path, wanted = tmp_path / "log", what_is_printed(attempt, 20)
    durable = 0
    if synced:
        copy_from_the_host(path, attempt, synced)
        durable = path.stat().st_size
    copy_from_the_host(path, attempt, 20)
    written = path.read_bytes()
    for sector in range(durable // 512 * 512, len(written) - 512, 512):
        begin = max(durable, sector)
        path.write_bytes(written[:begin] + bytes(sector + 512 - begin) + written[sector + 512 :])
        copy_from_the_host(path, attempt, 20)
        had = texts(path)
        assert [line for line in wanted if line not in had] == []
        assert max(map(had.count, wanted)) <= 2
        copy_from_the_host(path, attempt, 20)
        assert texts(path) == had, "who follows starts from what came again"


def test_a_checkpoint_counts_only_what_is_on_the_disk(tmp_path, monkeypatch):
    """Nobody looks for a hole before the last checkpoint."""
    path, synced = tmp_path / "log", set()
    monkeypatch.setattr(joblog, "CHECKPOINT_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_size))
    for attempt in (1, 2, 2):
        copy_from_the_host(path, attempt, 50)
    written = path.read_bytes()
    checkpoints = {found.start() for found in re.finditer(rb"^- c ", written, re.MULTILINE)}
    assert len(checkpoints) > 4
    assert checkpoints <= synced


def what_is_printed(attempt, count=3):
    """Lines by the launcher, then as many by rank 0."""
    return [f"{who} line {number} of attempt {attempt}" for who in ("launcher", "rank") for number in range(count)]


def copy_from_the_host(path, attempt, count=3):
    """A supervisor's whole copy: it asks for what the log lacks, as Docker and the ranks' hosts answer it."""
    lines = what_is_printed(attempt, count)
    log = JobLog(at(path), attempt=attempt, now=now)
    since = int(log.since.split(".")[1]) if log.since else 0
    for number, line in enumerate(lines[:count]):
        if number + 1 >= since:
            log.take("stdout", message(number + 1, f"{line}\n"))
    printed = "".join(f"{line}\n" for line in lines[count:]).encode()
    had, *_ = log.have("h").get("0.1", (0,))
    log.take_output("h/0.1", 0, "o", len(printed), printed[had:])
    log.close()


def test_a_progress_bar_is_seen_before_its_newline_comes(tmp_path):
    bar = b"".join(b"\r%3d%% of an epoch" % done for done in range(101))
    log = JobLog(at(tmp_path / "log"), attempt=1, now=now)
    for number in range(10):
        log.take_output("h/0.1", 0, "e", (number + 1) * len(bar), bar)
    assert len(texts(tmp_path / "log")) >= 3
    log.take_output("h/0.1", 0, "e", 10 * len(bar) + 1, b"\n")
    log.close()
    assert b"".join(output(tmp_path / "log")["1/h/0.1", "e"].split(b"\n")) == bar * 10
    assert JobLog(at(tmp_path / "log"), attempt=1, now=now).have("h") == {"0.1": [0, 10 * len(bar) + 1, 0]}


def test_last_lines_of_an_attempt_leave_out_those_before_it(tmp_path):
    """The launcher of the first attempt named a rank, which was then taken for the first to fail in the second."""
    for attempt in (1, 2):
        log = JobLog(at(tmp_path / "log"), attempt=attempt, now=now)
        log.take("stderr", message(attempt, f"Process name: {attempt}\n"))
        log.take_output("h1/0.7.8", 0, "o", 6, b"saved\n")
        log.take("stderr", message(5 + attempt, f"Exit code: {attempt}\n"))
        log.close()
    texts_of = {n: [one.line.text for one in last_lines(at(tmp_path / "log"), 9, attempt=n)] for n in (1, 2, 3)}
    assert texts_of[2] == ["Process name: 2", "saved", "Exit code: 2"]
    assert texts_of[3] == [] or "saved" not in texts_of[3]
    assert len(texts_of[1]) == 6
    assert last_lines(at(tmp_path / "none"), 9, attempt=2) == []
