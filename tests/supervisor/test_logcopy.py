"""The copy of a gang's log: complete at its end, whatever breaks on the way, and waited for no longer than that."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from waiting import LIMIT_S, until

from gpurun.errors import HostUnreachable
from gpurun.jobs.spec import Grant
from gpurun.remote.agent import RemoteOpFailed, Reply
from gpurun.state.paths import StatePath
from gpurun.supervisor import log_copy, ranks
from gpurun.supervisor.log_copy import LogCopy
from gpurun.supervisor.ranks import RankReports, Seating

SEATING = Seating((Grant("h", (0, 1, 2, 3)), Grant("other", (0, 1))))


def now():
    return 1795222923.5


def piece(nanos, text):
    return Reply({"stream": "stdout"}, f"2026-11-21T01:02:03.{nanos:09d}Z {text}\n".encode())


class Stream:
    """A stream of a script: replies, errors to raise, events to wait for."""

    def __init__(self, script):
        self._script = script

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        for each in self._script:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, threading.Event):
                assert each.wait(LIMIT_S)
            else:
                yield each


class Host:
    """An agent and the links to it: each follow gets the next script; the container ends with the last one."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.since = []
        self.host, self.ranks, self.had = "h", [], []
        self.rest = []  # for who takes the rest, and not for who follows
        self.released, self.refuses_release, self.log = [], False, None

    def agent(self, _host):
        return self

    def stream(self, op, **given):
        if op == "ranks.follow":
            self.had.append(given)
            if given["once"] and self.rest:
                return Stream(self.rest.pop(0))
            with suppress(IndexError):
                return Stream(self.ranks.pop(0))
            return Stream([])
        assert (op, given["container"]) == ("docker.logs", "c")
        self.since.append(given["since"])
        return Stream(self.scripts.pop(0))

    def each(self, call, hosts):
        for _ in hosts:
            call(self)

    def call(self, op, *, job, **given):
        if op == "ranks.release":
            self.released.append((given["known"], self.log.read_bytes()))
            if self.refuses_release:
                raise RemoteOpFailed("no room for a note", kind="no-space", host="h")
            return Reply({"bytes": 0})
        assert (op, job) == ("gang.inspect", "j")
        return Reply([{"name": "c", "status": "running" if self.scripts else "exited"}])


@pytest.fixture
def copy(tmp_path, monkeypatch):
    monkeypatch.setattr(log_copy, "RETRY_S", 0.01)

    def start(*scripts):
        host = Host(*scripts)
        made = LogCopy(host, "h", job="j", attempt=1, container="c", path=StatePath(tmp_path) / "log", clock=now,
                       reports=RankReports(SEATING))  # fmt: skip
        made.start()
        return made, host

    yield start


def let_end(name):
    """Wait for the end of copying threads."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(LIMIT_S)


def text(tmp_path):
    return [line.split(" ", 2)[2] for line in (tmp_path / "log").read_text().splitlines()]


def test_it_ends_with_the_container(copy, tmp_path):
    made, _ = copy([piece(1, "a"), piece(2, "b")])
    assert made.wait_for_launcher(LIMIT_S)
    made.close()
    assert text(tmp_path) == ["a", "b"]


def test_the_end_of_the_engine_is_not_the_end_of_the_container(copy, tmp_path):
    made, host = copy([piece(1, "a")], [piece(1, "a"), piece(2, "b")])
    assert made.wait_for_launcher(LIMIT_S)
    made.close()
    assert text(tmp_path) == ["a", "b"]
    assert host.since == [None, "1795222923.000000001"]


@pytest.mark.parametrize(
    "error",
    [HostUnreachable("cut", host="h"), RemoteOpFailed("gone", kind="no-docker"), RemoteOpFailed("", kind="internal")],
)
def test_what_breaks_is_tried_again(copy, tmp_path, error):
    made, _ = copy([piece(1, "a"), error], [error], [piece(1, "a"), piece(2, "b")])
    assert made.wait_for_launcher(LIMIT_S)
    made.close()
    assert text(tmp_path) == ["a", "b"]


def test_a_container_that_is_gone_prints_no_more(copy):
    made, _ = copy([RemoteOpFailed("no such container", kind="not-found")])
    assert made.wait_for_launcher(LIMIT_S)


def test_what_comes_while_it_is_waited_for_is_waited_for(copy, tmp_path, monkeypatch):
    """A piece comes each second, for four seconds; silence is waited for 1.5 s."""
    gates, now_s = [threading.Event() for _ in range(4)], [0.0]
    monkeypatch.setattr(log_copy, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    made, _ = copy([each for number, gate in enumerate(gates) for each in (gate, piece(number, str(number)))])

    class SecondsPass(threading.Event):
        def wait(self, _):
            now_s[0] += 1.0
            if not gates:
                return super().wait(LIMIT_S)
            gates.pop(0).set()
            until(lambda: made.last_line_s == now_s[0])
            return False

    made._launcher_ended = SecondsPass()
    assert made.wait_for_launcher(1.5)
    made.close()
    assert text(tmp_path) == ["0", "1", "2", "3"]


def test_silence_is_waited_for_no_longer_than_said(copy):
    gate = threading.Event()
    made, _ = copy([gate, piece(1, "late")])
    assert not made.wait_for_launcher(0.2)
    made.close()
    gate.set()


def test_nothing_is_written_after_it_was_closed(copy, tmp_path):
    gate = threading.Event()
    made, _ = copy([piece(1, "a"), gate, piece(2, "b")])
    until((tmp_path / "log").read_text)
    made.close()
    gate.set()
    let_end("log")
    assert text(tmp_path) == ["a"]
    made.close()


def test_a_full_disk_is_waited_for_and_nothing_is_lost(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(log_copy, "FULL_RETRY_S", 0.01)
    write, full = os.write, [True, True]

    def to_a_full_disk(descriptor, data):
        if b" b\n" in bytes(data) and full:
            full.pop()
            write(descriptor, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", to_a_full_disk)
    lines = [piece(1, "a"), piece(2, "b"), piece(3, "c")]
    made, host = copy(lines, lines, lines)
    assert made.wait_for_launcher(LIMIT_S)
    made.close()
    assert text(tmp_path) == ["a", "b", "c"]
    assert len(host.since) == 3


def test_what_was_never_begun_makes_no_file(tmp_path):
    LogCopy(Host(), "h", job="j", attempt=1, container="c", path=StatePath(tmp_path) / "log", clock=now,
            reports=RankReports(SEATING)).close()  # fmt: skip
    assert not (tmp_path / "log").exists()


# -- ranks ------------------------------------------------------------------------------------------------


def said(kind, ident="3.17", **more):
    return Reply({"kind": kind, "id": ident, "rank": 3, "age_s": 0.0, **more})


def output(end, data, ident="3.17", **more):
    return Reply({"kind": "output", "id": ident, "rank": 3, "stream": "o", "end": end, **more}, data)


@pytest.fixture
def follow(copy):
    """A copy whose launcher runs on, and whose host tells these scripts of its ranks, one a connection."""
    gates = []

    def start(*scripts):
        gate = threading.Event()
        gates.append(gate)
        made, host = copy([gate])
        host.ranks = list(scripts)
        made.follow(["h"])
        return made, host

    yield start
    for gate in gates:
        gate.set()


def test_ranks_output_and_ends_come_from_their_host(follow, tmp_path):
    made, host = follow([said("start"), output(6, b"step 1"), output(11, b"\nstep"), said("end", code=0)])
    until(lambda: made._reports.all and made._reports.all[0].code == 0)
    made.close()
    assert text(tmp_path) == ["[3]<stdout>:step 1", "[3]<stdout>:step"], "also a last line without an end"
    assert host.had[0] == {"job": "j", "attempt": 1, "have": {}, "once": False, "silence_s": None, "rest_bytes": None}


def test_a_host_has_no_say_in_the_ranks_of_others_and_is_named_once(follow, tmp_path):
    gate, notes = threading.Event(), []
    lies = [said("start", "5.1", rank=5), output(5, b"lies\n", "5.1", rank=5), said("end", "4.1", rank=4, code=0)]
    made, _ = follow([gate, *lies, said("end", "9.1", rank=9, code=1), output(6, b"truth\n"), said("end", code=0)])
    made._note = notes.append
    gate.set()
    until(lambda: made._reports.all and made._reports.all[0].code == 0)
    made.close()
    assert [(rank.rank, rank.code) for rank in made._reports.all] == [(3, 0)]
    assert text(tmp_path) == ["[3]<stdout>:truth"]
    assert notes == ["h reports a rank 5, which does not run there, so gpurun ignores these reports"]


def test_a_host_whose_answers_cannot_be_true_is_named_once(follow):
    gate, notes = threading.Event(), []
    lie = RemoteOpFailed("its answer cannot be true", kind="bad-answer", host="h")
    made, _ = follow([gate, lie], [lie], [lie], [said("end", code=0)])
    made._note = notes.append
    gate.set()
    until(lambda: made._reports.all)
    made.close()
    assert notes == ["the output of ranks on h is lost: its answer cannot be true"]


def test_a_host_that_names_ranks_without_end_fills_no_memory(follow, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_NAMES", 100)
    gate, notes = threading.Event(), []
    flood = [said("start", f"3.{number}.1") for number in range(1000)]
    made, _ = follow([gate, *flood, said("end", "3.7.1", code=0)])
    made._note = notes.append
    gate.set()
    until(lambda: any(rank.code == 0 for rank in made._reports.all))
    made.close()
    assert len(made._reports.all) == 100
    assert notes == ["h reports more than 100 ranks, so gpurun ignores these reports"]


def test_the_last_lines_of_a_host_that_falls_silent_are_not_waited_for(follow, monkeypatch):
    """Its agent answers pings, and the gang's other GPUs wait for the end of this."""
    made, host = follow([])
    until(lambda: host.had)
    made.take_rest(["h"], 7.0)
    assert 1.0 <= max(had["silence_s"] or 0.0 for had in host.had) <= 7.0
    made.take_rest(["h"], 600.0)
    assert max(had["silence_s"] or 0.0 for had in host.had) <= 20.0, "no host is waited for that long in silence"
    made.close()


def test_a_host_that_talks_without_end_and_says_nothing_is_left(follow, monkeypatch):
    made, host = follow([])
    until(lambda: host.had)
    notes = []
    made._note = notes.append
    monkeypatch.setattr(log_copy, "PACE_S", 0.05)
    host.rest = [[said("start")] * 1_000_000]
    began = time.monotonic()
    made.take_rest(["h"], 600.0)
    assert time.monotonic() - began < LIMIT_S
    assert notes == ["ranks on h printed more than gpurun could copy in time, so their last lines are lost"]
    made.close()


def test_the_rest_may_take_long_as_long_as_it_comes(follow, tmp_path, monkeypatch):
    made, host = follow([])
    until(lambda: host.had)
    monkeypatch.setattr(log_copy, "PACE_BYTES", 4)
    monkeypatch.setattr(log_copy, "PACE_S", 0.5)

    def slowly():
        yield said("start")
        for number in range(1, 9):
            time.sleep(0.15)
            yield output(4 * number, b"aaa\n")
        yield said("end", code=0)

    host.rest = [slowly()]
    made.take_rest(["h"], 600.0)
    made.close()
    assert len(text(tmp_path)) == 8, "it took longer than the patience with a silent host"


def test_a_connection_that_breaks_is_gone_on_with(follow, tmp_path):
    made, host = follow(
        [said("start"), output(4, b"a\nb\n"), HostUnreachable("cut", host="h")],
        [said("start"), output(6, b"c\n"), said("end", code=5)],
    )
    until(lambda: made._reports.all and made._reports.all[0].code == 5)
    made.close()
    assert text(tmp_path) == [f"[3]<stdout>:{letter}" for letter in "abc"]
    assert host.had[1]["have"] == {"3.17": [4, 0, 0]}


def test_a_host_may_leave_and_come_back(follow, tmp_path):
    made, host = follow([output(2, b"a\n")], [], [], [])
    until(lambda: len(host.had) > 2)
    made.forget(["h"])
    let_end("log h")
    host.ranks = [[said("start", "3.17.9"), output(2, b"b\n", "3.17.9")]]
    made.follow(["h"])
    until(lambda: made._reports.all)
    made.close()
    assert text(tmp_path) == ["[3]<stdout>:a", "[3]<stdout>:b"]


def test_what_a_forgotten_host_told_counts_no_more(follow):
    made, _ = follow([said("start"), said("end", code=1)])
    until(lambda: made._reports.all and made._reports.all[0].code == 1)
    made.forget(["h"])
    assert made._reports.all == ()


def test_what_a_host_tells_while_it_is_forgotten_counts_no_more(follow):
    begin, forgotten = threading.Event(), threading.Event()

    class LastWords(dict):
        """Between the look at what is known of the rank and the note of its end, the host is forgotten."""

        def get(self, key, default=None):
            if key == "more":
                made.forget(["h"])
                forgotten.set()
            return super().get(key, default)

    made, _ = follow([begin, said("start"), Reply(LastWords(said("end", code=1).value))])
    begin.set()
    assert forgotten.wait(LIMIT_S)
    let_end("log h")
    assert made._reports.all == ()


@pytest.mark.parametrize(
    "lie",
    [
        output(1, b"xx\n"), output(3, b"xx\n", ident="../1"), output(3, b"xx\n", ident="3 o@1"),
        output(2, b"x\n", rank=-1),
        output(3, b"xx\n", stream="c"), output(True, b"x"), output(3, b"xx\n", ident=""), output(3, b"xx\n", rank="0"),
        Reply(["output"], b"xx\n"), Reply(None, b"xx\n"), output(3, b"xx\n", ident="1" * 65), Reply({"kind": []}),
    ],
)  # fmt: skip
def test_a_host_that_lies_changes_no_line_of_the_log(follow, tmp_path, lie):
    made, _ = follow([lie, said("start", "9.9")])
    until(lambda: made._reports.all)
    made.close()
    assert text(tmp_path) == []


def test_the_rest_is_taken_once_the_containers_are_dead(follow, tmp_path):
    made, host = follow([HostUnreachable("cut", host="h")] * 1000)
    until(lambda: host.had)
    made.take_rest(["h", "unknown"], LIMIT_S)
    host.ranks = [[said("start"), output(2, b"a\n"), said("end", code=137, killed=True)]]
    made.take_rest(["h"], LIMIT_S)
    until(lambda: made._reports.all)
    made.close()
    assert text(tmp_path) == ["[3]<stdout>:a"]
    assert any(given["once"] for given in host.had)


def test_a_full_disk_loses_nothing_of_what_ranks_print(follow, tmp_path, monkeypatch):
    monkeypatch.setattr(log_copy, "FULL_RETRY_S", 0.01)
    write, full = os.write, [True, True]

    def to_a_full_disk(descriptor, data):
        if b":b\n" in bytes(data) and full:
            full.pop()
            write(descriptor, bytes(data)[:9])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", to_a_full_disk)
    script = [output(2, b"a\n"), output(6, b"b\nc\n"), said("end", code=0)]
    made, _ = follow(script, script, script)
    until(lambda: made._reports.all and made._reports.all[0].code == 0)
    made.close()
    assert text(tmp_path) == [f"[3]<stdout>:{letter}" for letter in "abc"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_head_without_threads_or_memory_loses_nothing_of_the_log(follow, tmp_path, monkeypatch, error):
    monkeypatch.setattr(log_copy, "FULL_RETRY_S", 0.01)
    met = set()

    def agent(host, _name):
        thread = threading.current_thread().name
        if thread not in met:
            met.add(thread)
            raise error
        return host

    monkeypatch.setattr(Host, "agent", agent)
    made, host = follow([said("start"), output(2, b"a\n"), said("end", code=0)])
    until(lambda: made._reports.all and made._reports.all[0].code == 0 and host.since)
    made.close()
    assert text(tmp_path) == ["[3]<stdout>:a"] and met == {"log", "log h"}


def test_last_words_without_a_newline_are_in_the_log_when_the_end_is_known(follow, tmp_path):
    made, _ = follow([said("start"), output(5, b"fatal"), said("end", code=3)])
    until(lambda: made._reports.all and made._reports.all[0].code == 3)
    assert text(tmp_path) == ["[3]<stdout>:fatal"]
    made.close()
    assert text(tmp_path) == ["[3]<stdout>:fatal"]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_host_may_forget_what_the_heads_disk_has_and_no_more(follow, tmp_path, monkeypatch, refuses):
    """Ranks that print for a week would fill their host's disk."""
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (fsync(descriptor), synced.append(os.fstat(descriptor).st_size))
    )
    monkeypatch.setattr(log_copy, "RELEASE_BYTES", 8)
    go = threading.Event()
    made, host = follow(
        [go, said("start"), output(4, b"a\nb\n"), output(9, b"c\nhal"), output(11, b"f\n"), said("end", code=0)]
    )
    host.log, host.refuses_release = tmp_path / "log", refuses
    go.set()
    until(lambda: made._reports.all and made._reports.all[0].code == 0)
    made.close()
    ((known, log),) = host.released
    assert known == {"3.17": [6, 0, 0]}, "half a line is not in the log yet"
    assert log.count(b"<stdout>:") == 3 and len(log) in synced
    assert text(tmp_path)[-1] == "[3]<stdout>:half"
