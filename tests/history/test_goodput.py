"""What an attempt's GPUs did: the parts always add up, whatever a host said and whatever a clock did."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
from ended_jobs import fail_once, run, submit, uses
from hypothesis import given
from hypothesis import strategies as st

from gpurun.history import store
from gpurun.history.goodput import PARTS, Goodput, split
from gpurun.history.report import accounts, goodput_words
from gpurun.history.row import COLUMNS
from gpurun.history.store import HistorySource, JobHistory, Wanted, rows
from gpurun.jobs.record import Activity, GpuUse, JobRecord, State
from gpurun.jobs.spec import Grant

ENDED = JobRecord(
    id="j-00000001", name="n", owner="o", owner_uid=0, inventory="/i", gpus=4, state=State.FAILED, submitted_s=0.0,
    queued_s=0.0, granted=(Grant("h1", (0, 1, 2, 3)),), granted_s=100.0, started_s=130.0, stopping_s=430.0,
    ended_s=450.0, attempt=1,
)  # fmt: skip
"""30 s until RUNNING, 300 s in RUNNING, 20 s to stop."""


def parts_of(did, record=ENDED, *, ended_s=450.0, gpu_s=350.0):
    """The parts; without other numbers, a second is a GPU second."""
    return split(record, did, ended_s=ended_s, gpu_s=gpu_s)


def test_each_second_is_in_one_part():
    did = Activity(first_step_s=60.0, step=90, before=50, before_end="xid", repeated_s=40.0, saved_s=15.0, idle_s=25.0)
    assert parts_of(did) == Goodput(
        steps=160.0, running=0.0, start=90.0, checkpoint=15.0, lost=40.0, idle=25.0, stopping=20.0
    )


@pytest.mark.parametrize(
    ("record", "did", "parts"),
    [
        (ENDED, Activity(idle_s=100.0), Goodput(running=200.0, idle=100.0, start=30.0, stopping=20.0)),
        (ENDED, Activity(before=7), Goodput(start=330.0, stopping=20.0)),
        (ENDED.but(rehearsal="passed"), Activity(first_step_s=1.0), Goodput(start=330.0, stopping=20.0)),
        (ENDED.but(started_s=None), Activity(), Goodput(start=330.0, stopping=20.0)),
        (ENDED.but(stopping_s=None), Activity(first_step_s=0.0), Goodput(steps=320.0, start=30.0)),
        (ENDED.but(state=State.RUNNING, stopping_s=300.0), Activity(), Goodput(running=320.0, start=30.0)),
        (ENDED.but(stopping_s=50.0), Activity(), Goodput(running=320.0, start=30.0)),
    ],
    ids=["no steps", "no steps, but before", "a rehearsal", "never ran", "an older gpurun", "runs", "stopped before"],
)
def test_what_is_not_known_is_not_invented(record, did, parts):
    assert parts_of(did, record) == parts


ANY = st.floats() | st.floats(-1e3, 1e3) | st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e9, 1e308])
TIMES = st.none() | st.floats(-1e3, 2e3) | st.sampled_from([0.0, 100.0, 1e18])


@given(
    did=st.builds(Activity, first_step_s=st.none() | ANY, repeated_s=ANY, saved_s=ANY, idle_s=ANY,
                  before=st.none() | st.integers()),
    times=st.tuples(TIMES, TIMES, TIMES), ended_s=st.floats(-1e3, 2e3), gpu_s=st.floats(0.0, 1e9),
    state=st.sampled_from(State), rehearsal=st.sampled_from(["", "due", "passed"]),
)  # fmt: skip
def test_the_parts_are_the_whole_whatever_was_reported(did, times, ended_s, gpu_s, state, rehearsal):
    granted_s, started_s, stopping_s = times
    record = ENDED.but(
        granted_s=granted_s, started_s=started_s, stopping_s=stopping_s, state=state, rehearsal=rehearsal
    )
    parts = astuple(parts_of(did, record, ended_s=ended_s, gpu_s=gpu_s))
    assert all(0.0 <= part <= gpu_s * (1 + 1e-9) for part in parts), parts
    assert sum(parts) == pytest.approx(gpu_s, rel=1e-6, abs=1e-9)


def test_rows_have_the_parts_and_a_report_adds_them_up(gpurun, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("GPURUN_HOME", str(home))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "none.yaml"))
    folder = submit(home)
    fail_once(home, folder, at_s=110.0, stopped_s=210.0)
    did = Activity(first_step_s=9.0, step=9, before=5, before_end="xid", repeated_s=30.0)
    run(home, folder, at_s=250.0, stopped_s=350.0, use=replace(uses(90), activity=did))
    run(home, submit(home, name="b"), at_s=400.0, stopped_s=500.0, use=GpuUse(activity=Activity(idle_s=50.0)))
    with JobHistory(home).sources(pytest.fail) as found:
        plain, again, failed = rows(found, Wanted())
        made = accounts(found, Wanted(), now_s=600.0)
        half = accounts(found, Wanted(since_s=300.0, until_s=450.0), now_s=600.0)
    assert [row.goodput_words for row in (plain, again, failed)] == ["≤49%", "60%", "≤99%"]
    assert (again.steps_gpu_s, again.lost_gpu_s, again.lost_cause) == (240.0, 120.0, "xid")
    for row in (plain, again, failed):
        assert sum(getattr(row, part) for part in PARTS) == pytest.approx(row.gpu_s)
    assert made.gpu_time.lost_by_cause == {"xid": pytest.approx(120.0)}
    for each in (made, half):
        assert sum(each.gpu_time.parts.values()) == pytest.approx(each.total.gpu_s)
        assert each.gpu_time.unknown == 0.0
    assert half.total.gpu_s == pytest.approx(400.0)
    assert "repeated steps 10.0 % (xid 0.0 GPU h)" in goodput_words(made)
    assert "goodput: 20.0 % in steps, 49.3 % in jobs without steps; the rest: " in gpurun("report")[1]
    assert "goodput" in gpurun("history")[1]
    assert set(PARTS) <= set(gpurun("history", "--csv")[1].splitlines()[0].split(","))


def test_rows_of_others_may_say_more_than_there_is():
    row_of_one = dict.fromkeys(COLUMNS, "x") | {
        "attempt": 1, "gpus": 1, "granted_s": 0.0, "ended_s": 10.0, "waited_s": 0.0, "gpu_s": 10.0,
        **dict.fromkeys(PARTS, 1e300), "lost_cause": b"\xff",
    }  # fmt: skip
    connection = store.in_memory()
    connection.execute(f"INSERT INTO attempts VALUES({', '.join('?' * len(COLUMNS))})", [*row_of_one.values()])
    made = accounts([HistorySource(connection, "me", 1)], Wanted(), now_s=20.0)
    assert sum(made.gpu_time.parts.values()) == pytest.approx(10.0)
    assert list(made.gpu_time.lost_by_cause) == ["(none)"]
