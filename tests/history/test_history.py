"""A row for each attempt, whatever crashes, whoever wrote it, and after the job's folder is gone."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import sqlite3
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ended_jobs import SPEC, fail_once, run, running, submit, uses

from gpurun.errors import StateError
from gpurun.head.prune import PruneWish, carry_out, plan_prune
from gpurun.history import store
from gpurun.history import store as collecting
from gpurun.history.goodput import PARTS
from gpurun.history.report import accounts
from gpurun.history.row import HistoryRow
from gpurun.history.store import JobHistory, Wanted, rows
from gpurun.jobs import folder as attempts
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Grant
from gpurun.jobs.store import JobStore, end_queued_job, finish
from gpurun.state import clock
from gpurun.state.boot import ClockReading
from gpurun.state.clock import HeadClock

MANY = 24


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home ?#%"))
    return tmp_path / "home ?#%"


def everything(home, wanted=None, **options):
    problems = []
    with JobHistory(home).sources(problems.append, **options) as found:
        read = rows(found, wanted or Wanted())
    assert problems == []
    return read


def file_of(home, uid=None):
    return home / "history" / str(os.getuid() if uid is None else uid) / store.FILE


def a_week(home):
    """Three jobs: one that a GPU's fault stopped once, one of four idle GPUs, one cancelled in the queue."""
    first, second, third = submit(home), submit(home, name="b", pool=None, project=None), submit(home, now_s=300.0)
    fail_once(home, first, at_s=110.0, stopped_s=210.0)
    run(home, first, at_s=250.0, stopped_s=350.0, use=uses(90, 91, 92, 12))
    run(home, second, at_s=400.0, stopped_s=500.0, use=uses(5, 5, 5, 5))
    end_queued_job(JobStore(home), third.record(), CancelRequest("cancel", "me", 390.0), now_s=390.0)
    return first, second, third


def test_each_attempt_has_a_row(home):
    first, second, third = a_week(home)
    last, cancelled, again, failed = everything(home)
    assert (failed.job, failed.attempt, failed.outcome, failed.gpu_s) == (first.id, 1, "RETRIED", 400.0)
    assert (failed.cause, failed.cause_host, failed.cause_rank, failed.exit_code) == ("xid", "h2", 3, 137)
    assert (failed.waited_s, failed.hosts, failed.generation, failed.pool) == (10.0, "h1 h2", "pascal", "vision")
    assert (again.attempt, again.outcome, again.waited_s, again.project) == (2, "SUCCEEDED", 40.0, "cats")
    assert again.use_words == "4 GPUs, 71 % busy; rank 3 on h2 only 12 %"
    assert again.memory_mib == 1003
    assert again.rank_uses == "90/99 91/99 92/99 12/99"
    assert again.sparks == " ".join(["50"] * 24)
    assert (last.job, last.project, last.use_words) == (second.id, "", "4 GPUs, 5 % busy")
    assert (cancelled.job, cancelled.outcome, cancelled.gpu_s, cancelled.waited_s) == (third.id, "CANCELLED", 0.0, 90.0)
    assert cancelled.granted_s is None


def test_rows_rebuilt_from_the_jobs_are_the_same(home):
    a_week(home)
    before = everything(home)
    file_of(home).unlink()
    assert JobHistory(home).rebuild() == (4, None)
    assert everything(home) == before
    assert JobHistory(home).rebuild() == (4, None)


def test_rows_outlive_their_jobs_also_a_rebuild(home):
    a_week(home)
    wish = PruneWish()
    done = carry_out(home, plan_prune(home, wish), wish)  # before anybody looked at the history
    assert len(done.jobs) == 3
    assert len(everything(home)) == 4
    assert JobHistory(home).rebuild() == (4, None)


def test_a_crash_between_the_end_and_the_row_loses_nothing(home, monkeypatch):
    folder = submit(home)
    real = type(folder).move

    def dies(self, state, **changes):
        if state.ended:
            raise KeyboardInterrupt
        return real(self, state, **changes)

    monkeypatch.setattr(type(folder), "move", dies)
    with pytest.raises(KeyboardInterrupt):
        run(home, folder, at_s=110.0, stopped_s=200.0)
    monkeypatch.undo()
    assert [row.ended_s for row in everything(home)] == [200.0]  # a reader in between
    from gpurun.jobs.store import finish

    finish(JobStore(home), folder.record(), now_s=300.0)  # who adopts the job ends it later
    assert [row.ended_s for row in everything(home)] == [300.0]


def test_a_crash_between_row_and_mark_writes_the_row_twice(home, monkeypatch):
    run(home, submit(home), at_s=110.0, stopped_s=200.0)
    marks = attempts.history_folder(home, os.getuid())
    (mark,) = attempts.marked(marks)
    assert JobHistory(home).collect() == 1
    (marks / mark.name).touch()
    assert JobHistory(home).collect() == 1
    assert JobHistory(home).collect() == 0
    assert len(everything(home)) == 1


def test_a_collector_between_the_mark_and_the_record_of_an_end_leaves_the_mark(home, monkeypatch):
    """Another process of the same user: a command, or the supervisor of another job that ends."""
    real, collected = attempts._store, []

    def late(folder, record):
        collected.append(JobHistory(home).collect())
        real(folder, record)

    monkeypatch.setattr(attempts, "_store", late)
    fail_once(home, folder := submit(home), at_s=110.0, stopped_s=200.0)
    run(home, folder, at_s=250.0, stopped_s=350.0)
    assert collected == [0, 1]  # the second look writes the row of the first attempt
    assert [row.attempt for row in everything(home)] == [2, 1]
    assert list(attempts.marked(attempts.history_folder(home, os.getuid()))) == []


def test_a_collector_that_read_an_end_before_it_was_written_again_leaves_no_old_row(home, monkeypatch):
    run(home, folder := submit(home), at_s=110.0, stopped_s=200.0)
    (record, _), real = next(attempts.kept(folder)), store.put

    def then_again(connection, rows):
        real(connection, rows)
        monkeypatch.setattr(store, "put", real)
        attempts.keep_attempt(folder, record.but(ended_s=300.0))

    monkeypatch.setattr(store, "put", then_again)
    JobHistory(home).collect()
    assert [row.ended_s for row in everything(home)] == [300.0]


def test_a_mark_of_a_job_that_was_removed_goes(home):
    folder = submit(home)
    attempts._mark(folder, folder.record().but(attempt=1))
    assert JobHistory(home).collect() == 0
    assert len(list(attempts.marked(attempts.history_folder(home, os.getuid())))) == 1
    folder.path.rmtree()
    assert JobHistory(home).collect() == 1
    assert list(attempts.marked(attempts.history_folder(home, os.getuid()))) == []


def ends(home, folders):
    """A process that ends jobs and then collects, as supervisors do."""
    for folder in folders:
        finish(JobStore(home), folder.record(), now_s=200.0)
        JobHistory(home).collect()


def collects(home, stop):
    while not stop.is_set():
        JobHistory(home).collect()


def test_processes_that_end_jobs_and_others_that_collect_lose_no_row(home):
    folders = [running(home) for _ in range(MANY)]
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    enders = [context.Process(target=ends, args=(home, folders[part::4])) for part in range(4)]
    collectors = [context.Process(target=collects, args=(home, stop)) for _ in range(2)]
    for process in (*collectors, *enders):
        process.start()
    for process in enders:
        process.join()
    stop.set()
    for process in collectors:
        process.join()
    assert [process.exitcode for process in (*enders, *collectors)] == [0] * 6
    assert len(everything(home)) == MANY


BEGIN = (
    "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0.0, isolation_level=None).execute('BEGIN IMMEDIATE')"
)


def may_write(home):
    """Return whether another process gets the lock of the history's file."""
    done = subprocess.run([sys.executable, "-c", BEGIN, file_of(home)], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 or "locked" in done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("write", [False, True])
def test_a_thread_that_opens_the_history_leaves_another_threads_lock(home, monkeypatch, write):
    """Closing a file drops all POSIX locks of the process on it: others then write into the same transaction."""
    a_week(home)
    JobHistory(home).collect()
    monkeypatch.setattr(store, "BUSY_S", 0.0)
    with store.JobHistory(home).own(write=True):
        with suppress(StateError), store.JobHistory(home).own(write=write):
            pass
        assert not may_write(home)
    assert may_write(home)


def test_what_lies_in_the_place_of_the_history_is_refused(home, tmp_path):
    a_week(home)
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "elsewhere"), os.mkdir):
        make(file_of(home))
        for write in (False, True):
            with pytest.raises(StateError, match="not a regular file"), store.JobHistory(home).own(write=write):
                pass
        file_of(home).rename(tmp_path / secrets.token_hex(4))
    assert not (tmp_path / "elsewhere").exists()
    assert len(everything(home)) == 4
    assert file_of(home).stat().st_mode & 0o777 == 0o644


def test_an_end_is_not_stopped_by_a_damaged_history(home):
    (home / "history").mkdir(parents=True)
    (home / "history" / str(os.getuid())).symlink_to("/")
    assert run(home, submit(home), at_s=110.0, stopped_s=200.0).state is State.SUCCEEDED


def test_an_elastic_gang_counts_each_gpu_for_as_long_as_it_was_there(home):
    folder = submit(home)
    record = folder.record().but(granted_s=100.0, granted=(), gpu_s=0.0)
    four = folder.record().but(granted_s=100.0)
    four = four.but(granted=(Grant("h1", (0, 1)), Grant("h2", (0, 1))))
    two = four.but(granted=(Grant("h1", (0, 1)),), gpu_s=four.gpu_s_at(150.0), gpu_s_until_s=150.0)
    assert two.gpu_s_at(250.0) == 4 * 50 + 2 * 100
    assert record.gpu_s_at(300.0) == 0.0


def test_a_damaged_file_is_reported_and_set_aside(home):
    a_week(home)
    before = everything(home)
    file_of(home).write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    problems = []
    with JobHistory(home).sources(problems.append) as found:
        assert rows(found, Wanted()) == []
    assert "--rebuild" in problems[0].hint
    count, aside = JobHistory(home).rebuild()
    assert count == 4
    assert aside.exists()
    assert everything(home) == before


@pytest.mark.parametrize("place", ["link", "pipe", "folder"])
def test_what_lies_in_the_files_place_is_not_followed(home, tmp_path, place):
    a_week(home)
    target = tmp_path / "target.db"
    sqlite3.connect(target).execute("CREATE TABLE t(x)").connection.close()
    before = target.read_bytes()
    path = file_of(home)
    {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[place]()
    with pytest.raises(StateError):
        JobHistory(home).collect()
    assert target.read_bytes() == before


def test_running_attempts_count_until_now(home):
    folder = submit(home)
    grants = {"granted_s": 110.0, "attempt": 1, "generation": "pascal"}
    folder.move(State.GRANTED, granted=(Grant("h1", (0, 1)),), **grants)
    submit(home, now_s=150.0)
    running, waiting = sorted(everything(home, now_s=200.0), key=lambda row: -row.gpu_s)
    assert (running.outcome, running.gpu_s, running.gpus) == ("GRANTED", 180.0, 2)
    assert (waiting.outcome, waiting.gpu_s, waiting.waited_s) == ("QUEUED", 0.0, 50.0)


# -- other users' files ------------------------------------------------------------------------------------

OTHER = 4242


@pytest.fixture
def theirs(home, monkeypatch):
    """Another user's history with two rows; what their gpurun would have written."""
    a_week(home)
    JobHistory(home).collect()
    folder = home / "history" / str(os.getuid())
    folder.rename(home / "history" / str(OTHER))
    monkeypatch.setattr(collecting, "_owner_of", lambda folder: int(folder.name))
    return file_of(home, OTHER)


def test_the_history_of_others_is_read_and_is_theirs(home, theirs):
    with sqlite3.connect(theirs) as connection:
        connection.execute("UPDATE attempts SET user = 'root'")
    connection.close()
    before = theirs.read_bytes()
    assert {row.user for row in everything(home)} == {f"uid {OTHER}"}
    assert len(everything(home, Wanted(user=f"uid {OTHER}"))) == 4
    assert everything(home, Wanted(user="root")) == []
    assert theirs.read_bytes() == before


def test_a_user_keeps_the_name_after_the_account_is_gone(home, theirs):
    """And whoever has the number by then does not inherit the rows."""
    with sqlite3.connect(theirs) as connection:
        connection.execute("UPDATE attempts SET user = 'carol'")
    connection.close()
    assert {row.user for row in everything(home)} == {"carol"}
    assert len(everything(home, Wanted(user="carol"))) == 4
    assert len(everything(home, Wanted(user=str(OTHER)))) == len(everything(home, Wanted(user=f"uid {OTHER}"))) == 4
    assert everything(home, Wanted(user="root")) == []
    with JobHistory(home).sources(pytest.fail) as found:
        assert list(accounts(found, Wanted(), now_s=600.0).users) == ["carol"]
        heir = [replace(source, user="dave") for source in found]
        assert {row.user for row in rows(heir, Wanted())} == {"carol"}
        assert rows(heir, Wanted(user="dave")) == []


@pytest.mark.parametrize("name", ["x'00ff'", "NULL", "17", "''", "'uid 0'", "CAST(x'00' AS TEXT)", "'\x1b[2J'"])
def test_names_in_the_file_of_others_may_be_anything(home, theirs, name):
    with sqlite3.connect(theirs) as connection:
        connection.execute(f"UPDATE OR IGNORE attempts SET user = {name}")
    connection.close()
    assert len(everything(home)) == len(everything(home, Wanted(user=str(OTHER)))) == 4
    assert everything(home, Wanted(user="root")) == []


HOSTILE = {
    "a view": "DROP TABLE attempts; CREATE VIEW attempts AS SELECT 1",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON attempts BEGIN DELETE FROM attempts; END",
    "another table": "CREATE TABLE t(x)",
}


@pytest.mark.parametrize("sql", HOSTILE.values(), ids=HOSTILE)
def test_a_strange_schema_of_others_is_refused(home, theirs, sql):
    connection = sqlite3.connect(theirs)
    connection.executescript(sql)
    connection.close()
    problems = []
    with JobHistory(home).sources(problems.append) as found:
        assert rows(found, Wanted()) == []
    assert "schema" in str(problems[0])


@pytest.mark.parametrize("value", ["x'00ff'", "'\x1b[2J; DROP TABLE'", "9e999", "-9e999", "NULL", "1e300"])
def test_columns_of_others_may_hold_anything(home, theirs, value):
    connection = sqlite3.connect(theirs)
    sets = ", ".join(f"{name} = {value}" for name in ("gpu_s", "gpus", "use_percent", "ended_s", "granted_s", "reason"))
    connection.execute(f"UPDATE OR IGNORE attempts SET {sets}")
    connection.commit()
    connection.close()
    for row in everything(home):
        assert row == HistoryRow(**asdict(row))
        json.dumps(asdict(row), allow_nan=False)
    with JobHistory(home).sources(pytest.fail) as found:
        made = accounts(found, Wanted(), now_s=600.0)
    json.dumps(asdict(made), allow_nan=False)


# -- files of an older gpurun ------------------------------------------------------------------------------

OLD = (Path(__file__).parent / "old_attempts.sql").read_text()
"""What the gpurun without `PARTS` wrote for `a_week`."""


def old_file(home, uid=None):
    file = file_of(home, uid)
    file.parent.mkdir(parents=True)
    connection = sqlite3.connect(file)
    connection.executescript(OLD)
    connection.close()
    return file


def is_as_before(found):
    assert [(row.job[-1], row.attempt, row.outcome, row.gpu_s) for row in found] == [
        ("2", 1, "SUCCEEDED", 400.0), ("3", 1, "CANCELLED", 0.0), ("1", 2, "SUCCEEDED", 400.0),
        ("1", 1, "RETRIED", 400.0),
    ]  # fmt: skip
    assert {getattr(row, part) for row in found for part in (*PARTS, "lost_cause")} == {None}
    assert {row.goodput_words for row in found} == {""}


@pytest.mark.parametrize("uid", [None, OTHER], ids=["own", "of others"])
def test_an_old_file_is_read_and_what_it_lacks_is_unknown(home, monkeypatch, uid):
    monkeypatch.setattr(collecting, "_owner_of", lambda folder: int(folder.name))
    file = old_file(home, uid)
    before = file.read_bytes()
    is_as_before(everything(home))
    with JobHistory(home).sources(pytest.fail) as found:
        made = accounts(found, Wanted(), now_s=600.0)
    assert (made.total.gpu_s, made.gpu_time.unknown) == (1200.0, 1200.0)
    assert file.read_bytes() == before, "a reader changes no file"


def test_an_old_file_gets_the_new_columns_with_the_next_row(home):
    file = old_file(home)
    run(home, submit(home), at_s=610.0, stopped_s=700.0)
    new, *old = everything(home)
    is_as_before(old)
    assert new.running_gpu_s == pytest.approx(356.0)
    connection = sqlite3.connect(file)
    texts = {text for (text,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL")}
    connection.close()
    assert texts == {*store.SCHEMA}
    assert len(everything(home)) == 5


@pytest.mark.parametrize("sql", HOSTILE.values(), ids=HOSTILE)
def test_a_strange_schema_in_an_old_file_of_others_is_refused(home, monkeypatch, sql):
    monkeypatch.setattr(collecting, "_owner_of", lambda folder: int(folder.name))
    connection = sqlite3.connect(old_file(home, OTHER))
    connection.executescript(sql)
    connection.close()
    problems = []
    with JobHistory(home).sources(problems.append) as found:
        assert rows(found, Wanted()) == []
    assert "schema" in str(problems[0])


def test_half_a_write_of_others_is_reported(home, theirs):
    theirs.with_name(f"{store.FILE}-journal").write_bytes(b"x")
    database_tries, store._COPY_TRIES = store._COPY_TRIES, 1
    try:
        problems = []
        with JobHistory(home).sources(problems.append) as found:
            assert rows(found, Wanted()) == []
        assert "is writing the file, or was killed" in str(problems[0])
    finally:
        store._COPY_TRIES = database_tries


# -- the command -------------------------------------------------------------------------------------------


def test_filters(home):
    first, second, third = a_week(home)
    jobs = lambda **wanted: [row.job for row in everything(home, Wanted(**wanted))]  # noqa: E731
    assert jobs(pool="vision") == [third.id, first.id, first.id]
    assert jobs(states=("RETRIED",)) == [first.id]
    assert jobs(host="h2", since_s=360.0) == [second.id]
    assert jobs(host="h") == []
    assert jobs(until_s=120.0) == [first.id]
    assert jobs(name="B") == jobs(name=second.id[2:]) == [second.id]
    assert jobs(name="' OR 1 --") == jobs(pool="%") == jobs(user="nobody") == []


def test_the_command(gpurun, home):
    first, *_ = a_week(home)
    code, out, _ = gpurun("history", "--json")
    assert code == 0
    assert [row["attempt"] for row in json.loads(out)["attempts"] if row["job"] == first.id] == [2, 1]
    code, out, _ = gpurun("history", "--state", "retried", "--csv")
    assert (code, len(out.splitlines())) == (0, 2)
    assert out.startswith("job,attempt,user,pool,project,name,")
    code, out, _ = gpurun("history")
    assert "Xid 79" in out
    assert len(out.splitlines()) == 5
    assert gpurun("history", "--rebuild")[0] == 0


def test_a_hostile_name_is_harmless_in_every_form(gpurun, home):
    name = "=cmd|' /C calc'!A0; \x9b2J <script>"
    run(home, submit(home, name=name), at_s=110.0, stopped_s=200.0)
    code, out, _ = gpurun("history")
    assert (code, "\x9b" in out) == (0, False)
    assert "'=cmd" in gpurun("history", "--csv")[1]
    assert json.loads(gpurun("history", "--json")[1])["attempts"][0]["name"] == name


@pytest.mark.parametrize("argv", [("--state", "WON"), ("--since", "7"), ("--until", "9" * 30), ("--since", "")])
def test_a_wrong_option_is_exit_code_2(gpurun, home, argv):
    code, out, err = gpurun("history", *argv)
    assert (code, out) == (2, "")
    assert argv[0] in err


def test_without_any_job(gpurun, home):
    code, out, err = gpurun("history")
    assert (code, out) == (0, "")
    assert "no ended attempt" in err
    assert json.loads(gpurun("history", "--json")[1]) == {"attempts": []}


def test_projects_come_from_the_recipe():
    assert replace(SPEC, project=None).project is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_who_makes_ones_folder_first_hides_no_row_and_is_named(home):
    (home / "history" / str(os.getuid())).mkdir(parents=True)
    os.chown(home / "history" / str(os.getuid()), 61_002, -1)
    job = submit(home)
    run(home, job, at_s=250.0, stopped_s=350.0)
    problems = []
    with JobHistory(home).sources(problems.append) as found:
        assert rows(found, Wanted()) == []
    assert "uid 61002" in str(problems[0])
    (home / "history" / str(os.getuid())).rmdir()
    assert JobHistory(home).rebuild() == (1, None)
    assert [row.job for row in everything(home)] == [job.id]


STEPS_S = [sign * step_s for step_s in (1.0, 3600.0, 90_000.0, 315_360_000.0) for sign in (-1, 1)]


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_step_of_the_heads_clock_is_no_gpu_time(home, monkeypatch, step_s):
    """The job's supervisor has died meanwhile: another process ends it."""
    machine = [1.8e9, 5000.0]

    def new_process():
        made = HeadClock(lambda: ClockReading("boot", machine[1], machine[0]), is_synchronised=lambda: True)
        monkeypatch.setattr(clock, "_of_process", made)

    new_process()
    folder = submit(home, now_s=clock.now_s())
    folder.move(State.GRANTED, attempt=1, granted_s=clock.now_s(), granted=(Grant("h1", (0, 1, 2, 3)),))
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state, started_s=clock.now_s())
    machine[:] = [machine[0] + 100.0 + step_s, machine[1] + 100.0]
    new_process()
    (running,) = [row for row in everything(home, now_s=clock.now_s()) if row.job == folder.id]
    assert running.gpu_s == pytest.approx(400.0)
    finish(JobStore(home), folder.move(State.STOPPING, outcome=State.SUCCEEDED), now_s=clock.now_s())
    (row,) = everything(home)
    assert row.gpu_s == pytest.approx(400.0)
    assert row.ended_s - row.started_s == pytest.approx(100.0)
    assert row.ended_s == pytest.approx(machine[0])  # by the wall clock of its end, for people


@pytest.mark.parametrize("mask", [0o002, 0o000, 0o077])
def test_a_lax_umask_costs_no_row(home, mask):
    os.umask(mask)
    a_week(home)
    assert len(everything(home)) == 4
    lax = [path for path in (home, *home.rglob("*")) if path.is_dir() and path.stat().st_mode & 0o022]
    assert lax == [], "gpurun trusts no folder that others can write"


def test_a_folder_that_an_older_version_made_under_a_lax_umask_is_closed(home):
    a_week(home)
    file_of(home).parent.chmod(0o775)
    run(home, submit(home), at_s=400.0, stopped_s=500.0)
    assert len(everything(home)) == 5
    assert file_of(home).parent.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_a_folder_in_which_somebody_else_has_put_a_file_is_not_trusted(home):
    a_week(home)
    journal = file_of(home).with_name(f"{store.FILE}-journal")
    journal.touch()
    os.chown(journal, 12345, -1)
    file_of(home).parent.chmod(0o775)
    with pytest.raises(StateError, match=r"users other than .* can write to the folder"):
        JobHistory(home).collect()
