"""A read that fails once, as without descriptors or on a failed disk, loses no row and hides no other job."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import contextmanager

import pytest
from ended_jobs import SPEC, run, running, submit, uses

from gpurun.errors import StateDiskError, StateError, StateUnavailable
from gpurun.head.prune import PruneWish, carry_out, plan_prune
from gpurun.history import store
from gpurun.history.store import JobHistory, Wanted, rows
from gpurun.jobs.folder import history_folder, marked, write_use
from gpurun.state.paths import StatePath


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def shown(home, on_problem=None, **options):
    with JobHistory(home).sources(on_problem or pytest.fail, **options) as found:
        return rows(found, Wanted())


@contextmanager
def unreadable(folder, name, number):
    """Opening a name in a job's folder fails, as without descriptors or on a failed disk; `name` "" = the folder."""
    real = StatePath._in_folder

    @contextmanager
    def in_folder(path, doing):
        with real(path, doing) as descriptor:
            yield descriptor
            if path == (folder.path / name if name else folder.path) and doing == "opened":
                raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatePath, "_in_folder", in_folder)
        yield


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ENOMEM])
@pytest.mark.parametrize("name", ["attempt-1.json", "attempt-1.use.json", "spec.json", ""])
def test_a_read_that_fails_once_loses_no_row_and_no_other_job_waits_for_it(home, name, number):
    first, second = sorted((submit(home), submit(home)), key=lambda folder: folder.id)
    for folder in (first, second):
        run(home, folder, at_s=110.0, stopped_s=200.0, use=uses(10, 20, 30, 40))
    wish, problems = PruneWish(jobs=(first.id,)), []
    plan = plan_prune(home, wish)
    with unreadable(first, name, number):
        with pytest.raises(StateUnavailable, match=first.id):
            JobHistory(home).collect()
        assert [row.job for row in shown(home, problems.append)] == [second.id]
        assert [first.id in str(problem) for problem in problems] == [True]
        done = carry_out(home, plan, wish)
        assert (done.jobs, list(done.failed)) == ([], [first.id])
        with pytest.raises(StateUnavailable, match=first.id):
            JobHistory(home).rebuild()
    assert [mark.job for mark in marked(history_folder(home, os.getuid()))] == [first.id]
    assert len(carry_out(home, plan, wish).jobs) == 1
    (row,) = [row for row in shown(home) if row.job == first.id]
    assert (row.image, row.use_percent) == (SPEC.image, 25.0)


@pytest.mark.parametrize("name", ["attempt-1.json", "spec.json", ""])
def test_a_sector_that_stays_bad_keeps_its_job_and_no_other(home, name):
    bad, good = submit(home), submit(home)
    for folder in (bad, good):
        run(home, folder, at_s=110.0, stopped_s=200.0)
    plan = plan_prune(home, PruneWish())
    with unreadable(bad, name, errno.EIO):
        done = carry_out(home, plan, PruneWish())
    assert [each.record.id for each in done.jobs] == [good.id]
    assert list(done.failed) == [bad.id]
    assert sorted(row.job for row in shown(home)) == sorted((bad.id, good.id)), "neither lost its row"


@pytest.mark.parametrize(
    ("error", "kind", "said", "hint"),
    [
        (sqlite3.OperationalError("database or disk is full"), StateDiskError, "is full", "free some space"),
        (sqlite3.OperationalError("disk I/O error"), StateDiskError, "failed", "dmesg"),
        (sqlite3.OperationalError("database is locked"), StateUnavailable, "database is locked", "try again"),
        (sqlite3.OperationalError("unable to open database file"), StateUnavailable, "unable to open", "try again"),
        (sqlite3.DatabaseError("database disk image is malformed"), StateError, "malformed", "--rebuild"),
        (sqlite3.DatabaseError("file is not a database"), StateError, "not a database", "--rebuild"),
    ],
    ids=lambda each: str(each) if isinstance(each, sqlite3.Error) else "",
)
def test_only_damage_is_to_be_rebuilt_and_what_may_pass_keeps_only_new_jobs_from_prune(home, error, kind, said, hint):
    old, new = submit(home), submit(home)
    run(home, old, at_s=110.0, stopped_s=200.0)
    JobHistory(home).collect()
    run(home, new, at_s=110.0, stopped_s=200.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "put", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(StateError) as raised:
            JobHistory(home).collect()
        done = carry_out(home, plan_prune(home, PruneWish()), PruneWish())
    assert type(raised.value) is kind
    assert said in str(raised.value)
    assert hint in raised.value.hint
    assert [each.record.id for each in done.jobs] == [old.id]
    assert list(done.failed) == [new.id]
    assert len(shown(home)) == 2


def test_a_read_that_fails_once_hides_only_its_own_running_job(home):
    for folder in (jobs := [running(home), running(home)]):
        write_use(folder, 1, uses(10, 20, 30, 40))
    with unreadable(jobs[0], "attempt-1.use.json", errno.EIO):
        problems = []
        assert [row.job for row in shown(home, problems.append, now_s=500.0)] == [jobs[1].id]
    assert [jobs[0].id in str(problem) for problem in problems] == [True]


def test_a_history_whose_first_row_could_not_be_written_is_empty_not_damaged(home):
    run(home, submit(home), at_s=110.0, stopped_s=200.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "put", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("disk I/O error")))
        problems = []
        assert shown(home, problems.append) == []
    assert [type(problem) for problem in problems] == [StateDiskError]
    assert len(shown(home)) == 1
