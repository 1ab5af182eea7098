"""Sums over the history are right for every period, and what is shown of them is harmless."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from ended_jobs import fail_once, run, submit, uses
from hypothesis import given
from hypothesis import strategies as st

from gpurun.history import store
from gpurun.history.report import COLUMNS_SHOWN, accounts, report_page
from gpurun.history.row import HistoryRow
from gpurun.history.store import HistorySource, Wanted


def row(number, at_s, ran_s, gpus, **changes):
    values = {
        "job": f"j-{number:08x}", "attempt": 1, "user": "alice", "pool": "p", "project": "", "name": "n", "image": "i",
        "gpus": gpus, "generation": "pascal", "hosts": "h1", "submitted_s": 0.0, "granted_s": at_s,
        "started_s": at_s, "ended_s": at_s + ran_s, "waited_s": at_s, "gpu_s": gpus * ran_s,
        "outcome": "SUCCEEDED",
    }  # fmt: skip
    return HistoryRow(**{**values, **changes})


def made_of(rows, wanted=None, *, user=None, **options):
    options = {"now_s": 1000.0, **options}
    return accounts([HistorySource(store.in_memory(rows), user)], wanted or Wanted(), **options)


ATTEMPTS = st.lists(st.tuples(st.floats(0, 990), st.floats(0.01, 500), st.integers(1, 64)), max_size=20)


@given(attempts=ATTEMPTS, since_s=st.floats(0, 500), long_s=st.floats(1, 499))
def test_the_timeline_and_the_sums_are_what_attempts_used_in_the_period(attempts, since_s, long_s):
    until_s = since_s + long_s
    made = made_of([row(n, *each) for n, each in enumerate(attempts)], Wanted(since_s=since_s, until_s=until_s))
    spent = sum(max(0.0, min(at + ran, until_s) - max(at, since_s)) * gpus for at, ran, gpus in attempts)
    assert made.total.gpu_s == pytest.approx(spent, abs=1e-3)
    width = (made.until_s - made.since_s) / COLUMNS_SHOWN
    assert sum(made.timeline) * width == pytest.approx(spent, abs=0.01 + 0.001 * long_s)
    for number, mean in enumerate(made.timeline):
        begin, end = made.since_s + number * width, made.since_s + (number + 1) * width
        right = sum(max(0.0, min(at + ran, end) - max(at, begin)) * gpus for at, ran, gpus in attempts) / width
        assert mean == pytest.approx(right, abs=0.01)


def test_sums_by_user_pool_cause_and_host():
    rows = [
        row(1, 0.0, 100.0, 8, use_percent=31.0),
        row(2, 0.0, 100.0, 2, user="bob", pool="", cause="xid", cause_host="h1", outcome="RETRIED"),
        row(3, 0.0, 100.0, 2, user="bob", cause="rank", cause_host="h2", outcome="FAILED", use_percent=100.0),
        row(4, 0.0, 50.0, 0, user="bob", outcome="CANCELLED", granted_s=None, gpu_s=0.0),
    ]
    made = made_of(rows)
    assert list(made.users) == ["alice", "bob"]
    bob = made.users["bob"]
    assert (bob.attempts, bob.jobs, bob.failed, bob.gpu_s, bob.idle_gpu_s) == (3, 2, 2, 400.0, 0.0)
    assert made.users["alice"].busy_percent == pytest.approx(31.0)
    assert made.total.idle_gpu_s == pytest.approx(552.0)
    assert list(made.pools) == ["p", "(none)"]
    assert made.causes == {"rank": 1, "xid": 1}
    assert made.failed_hosts == {"h1": 1, "h2": 1}
    assert made.outcomes["RETRIED"] == 1
    assert [each.job for each in made.largest] == ["j-00000001", "j-00000002", "j-00000003"]
    others = [replace(each, user="root") for each in rows]  # no file gives its rows to another user's account
    assert made_of(others, user="carol").users.keys() == {"carol"}


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.words = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "\"'><img src=x onerror=y>", "a\x1b]0;x\x07\x9b", "&lt;\u202e"]
)
def test_the_page_has_no_script_and_asks_no_network(hostile):
    names = ("user", "pool", "project", "name", "generation", "outcome", "cause", "cause_host", "slow_host", "sparks")
    first = row(1, 10.0, 100.0, 8, use_percent=5.0, slow_rank=1, slow_percent=1.0, **dict.fromkeys(names, hostile))
    text = report_page(made_of([first, row(2, 5.0, 50.0, 1)], capacity=16))
    reader = Reader()
    reader.feed(text)
    assert reader.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th", "td", "svg", "polygon",
        "polyline", "rect", "text",
    }  # fmt: skip
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href")]
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert any("of 16 GPUs" in words for words in reader.words)


def test_the_command(gpurun, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("GPURUN_HOME", str(home))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "none.yaml"))
    folder = submit(home, name="[red]x[/] \x1b[2J")
    fail_once(home, folder, at_s=110.0, stopped_s=3710.0)
    run(home, folder, at_s=4000.0, stopped_s=7600.0, use=uses(90, 91, 92, 12))
    code, out, _ = gpurun("report", "--until", "2026-01-01")
    assert code == 0
    assert "2 attempts used 8.0 GPU hours" in out
    assert "4 GPUs, 71 % busy; rank 3 on h2 only 12 %" in out
    assert "[red]x[/]" in out
    assert "\x1b" not in out
    for columns in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("NO_COLOR", "1")
        for command in ("history", "report", "du"):
            code, out, _ = gpurun(command)
            assert code == 0 and folder.id in out.split(), "no id is in two pieces"
            wide = [line for line in out.splitlines() if len(line) > columns and " " in line.strip()]
            assert command != "history" or wide == [], wide
    monkeypatch.undo()
    monkeypatch.setenv("GPURUN_HOME", str(home))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "none.yaml"))
    code, out, _ = gpurun("report", "--json", "--html", str(tmp_path / "r.html"))
    assert json.loads(out)["causes"] == {"xid": 1}
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert gpurun("report", "--html", str(tmp_path))[0] == 2
    assert gpurun("report", "--inventory", str(tmp_path / "none.yaml"))[0] == 2
    assert json.loads(gpurun("report", "--user", "nobody", "--json")[1])["total"]["attempts"] == 0
