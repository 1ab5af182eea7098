"""A read that fails once, as without descriptors or on a failed disk, loses no row and hides no other job."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

import pytest
from ended_jobs import SPEC, run, running, submit, uses

from gpurun.errors import StateUnavailable
from gpurun.head.prune import PruneWish, carry_out, plan_prune
from gpurun.history.collect import collect, rebuild, sources
from gpurun.history.select import Wanted, rows
from gpurun.jobs import attempts
from gpurun.state.path import StatePath


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def shown(home, on_problem=None, **options):
    with sources(home, on_problem or pytest.fail, **options) as found:
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
            collect(home)
        assert [row.job for row in shown(home, problems.append)] == [second.id]
        assert [first.id in str(problem) for problem in problems] == [True]
        with pytest.raises(StateUnavailable, match=first.id):
            carry_out(home, plan, wish)
        with pytest.raises(StateUnavailable, match=first.id):
            rebuild(home)
    assert [mark.job for mark in attempts.marked(attempts.history_folder(home, os.getuid()))] == [first.id]
    assert len(carry_out(home, plan, wish).jobs) == 1
    (row,) = [row for row in shown(home) if row.job == first.id]
    assert (row.image, row.use_percent) == (SPEC.image, 25.0)


def test_a_read_that_fails_once_hides_only_its_own_running_job(home):
    for folder in (jobs := [running(home), running(home)]):
        attempts.write_use(folder, 1, uses(10, 20, 30, 40))
    with unreadable(jobs[0], "attempt-1.use.json", errno.EIO):
        problems = []
        assert [row.job for row in shown(home, problems.append, now_s=500.0)] == [jobs[1].id]
    assert [jobs[0].id in str(problem) for problem in problems] == [True]
