"""Jobs on their way into the store: all of a submission or nothing, whatever fails."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gpurun.content.workdir import Code
from gpurun.errors import StateError
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import ABANDONED_S, PREFIX, JobStore
from gpurun.state import durable

SPEC = JobSpec(name="a'; touch /tmp/x #", image="i", gpus=2, command=("echo", "a b\n'\"", "ü"), env={"K": "v\n"})
LONG_AFTER_S = 2 * ABANDONED_S


@pytest.fixture
def store():
    """In memory: a disk would be asked to sync a thousand times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        found = JobStore(Path(folder) / "state dir")
        create(found)
        yield found


def create(store, count=1, **options):
    wanted = [replace(SPEC, gpus=number + 1) for number in range(count)]
    return store.create_many(wanted, inventory=store.home / "inventory.yaml", now_s=1.0, **options)


def left(store):
    return sorted(store.folder.names()), sorted(store.live.names())


def test_many_jobs_are_stored_in_order(store):
    before = store.ids()
    folders = create(store, 40)
    assert [folder.spec().gpus for folder in folders] == list(range(1, 41))
    assert [folder.record().gpus for folder in folders] == list(range(1, 41))
    assert all(folder.record().state is State.QUEUED for folder in folders)
    assert set(store.live_ids()) == set(store.ids()) == {*before, *(folder.id for folder in folders)}
    assert not [name for name in store.folder.names() if name.startswith(".")]


def test_no_jobs_are_stored_too(store):
    before = left(store)
    assert create(store, 0) == ()
    assert left(store) == before


def test_an_id_is_given_once(store, monkeypatch):
    (taken,) = store.ids()
    drawn = iter(["0a0a0a0a", taken[2:], "00000001", "00000001", "00000002"])  # the first names the folder of drafts
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(drawn))
    assert [folder.id for folder in create(store, 2)] == ["j-00000001", "j-00000002"]


def test_syncs_of_many_jobs_are_done_together(store, monkeypatch):
    """One after the other, a thousand jobs took twenty seconds."""
    fsync, at_once, enough, guard = os.fsync, [0], threading.Event(), threading.Lock()

    def slow(descriptor):
        """A thread's sync lasts until nine have begun, and with one after the other none ends soon."""
        if threading.current_thread() is not threading.main_thread():
            with guard:
                at_once[0] += 1
                if at_once[0] > 8:
                    enough.set()
            assert enough.wait(LIMIT_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    create(store, 10)
    assert enough.is_set()


CALLS = ("mkdir", "open", "write", "fsync", "rename")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_whatever_fails_all_jobs_are_stored_or_none(store, monkeypatch, call, error):
    """The first call fails, then the second, …: each time, with passes kept out, it is all or nothing."""
    if call == "fsync" and isinstance(error, KeyboardInterrupt):
        pytest.skip("Python interrupts only the main thread, which waits while others sync")
    before, real, main = left(store), getattr(os, call), threading.get_ident()
    for fails_at in range(1, 1000):
        calls = [0]

        def failing(*arguments, calls=calls, fails_at=fails_at, **options):
            calls[0] += threading.get_ident() == main or isinstance(error, OSError)
            if calls[0] == fails_at:
                raise error
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                folders = create(store, 3, alone=locked)
            except (StateError, KeyboardInterrupt):
                folders = ()
        if calls[0] < fails_at:
            break
        store.sweep(now_s=time.time() + LONG_AFTER_S)  # what could not be removed when the disk was full
        jobs, marks = left(store)
        assert jobs == marks, fails_at
        new = set(jobs) - set(before[0])
        late = isinstance(error, KeyboardInterrupt)  # it may come when all are stored
        assert len(new) in ((3,) if folders else (0, 3) if late else (0,)), fails_at
        for job_id in new:
            shutil.rmtree((store.folder / job_id).plain)
            store.retire(job_id)
    assert fails_at > 3
    assert len(folders) == 3


@contextmanager
def locked():
    yield


def test_passes_are_kept_out_while_jobs_appear(store):
    before = set(store.ids())

    @contextmanager
    def alone():
        assert set(store.ids()) == before
        yield
        assert len(store.ids()) == len(before) + 5

    create(store, 5, alone=alone)


def test_a_lock_that_cannot_be_had_leaves_nothing(store):
    before = left(store)

    @contextmanager
    def alone():
        raise StateError("gpurun waited for the scheduler's lock")
        yield

    with pytest.raises(StateError, match="waited for the scheduler's lock"):
        create(store, 5, alone=alone)
    assert left(store) == before


CREATE = """
import sys
from pathlib import Path
from gpurun import faults
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
faults.arm_fault("command")
specs = [JobSpec("n", "i", 1, ("true",))] * int(sys.argv[2])
JobStore(Path(sys.argv[1])).create_many(specs, inventory=Path("/i"), now_s=1.0)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_killed_submission_leaves_is_removed(store, count):
    """Killed at every fault point in turn: a job is there whole, or there is nothing of it."""
    whole, points = left(store), 0
    while True:
        points += 1
        environ = {**os.environ, "GPURUN_FAULT": f"command:{points}"}
        done = subprocess.run(
            [sys.executable, "-c", CREATE, str(store.home), str(count)], env=environ, capture_output=True, text=True
        )
        store.sweep(now_s=time.time() + LONG_AFTER_S)
        jobs, marks = left(store)
        assert jobs == marks, done.stderr
        for job_id in set(jobs) - set(whole[0]):
            assert store.get(job_id).record().state is State.QUEUED
            assert store.get(job_id).spec().image == "i"
            shutil.rmtree((store.folder / job_id).plain)
            store.retire(job_id)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert points > 6
    assert left(store) == whole


CREATE_WITH_CODE = CREATE.replace(
    "JobStore(Path", "from gpurun.content import tree, workdir\ncode = tree.scan(Path(sys.argv[3]))\n"
    "specs = [JobSpec('n', 'i', 1, ('true',), workdir=sys.argv[3], code=code.digest)] * int(sys.argv[2])\n"
    "codes = {code.digest: lambda path: workdir.CodeStore(Path(sys.argv[1])).add(path, code)}\nJobStore(Path",
).replace("now_s=1.0", "now_s=1.0, codes=codes")  # fmt: skip


@pytest.mark.parametrize("has_code", [False, True], ids=["new code", "stored code"])
def test_a_killed_submission_of_code_harms_no_job_and_leaves_no_code(store, tmp_path, monkeypatch, has_code):
    """Killed at every fault point in turn; the code of all jobs is whole then, and goes with them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_bytes(os.urandom(100_000))
    argv = [sys.executable, "-c", CREATE_WITH_CODE, str(store.home), "2", str(tmp_path / "work")]
    if has_code:
        subprocess.run(argv, check=True)
    before, points = left(store), 0
    while True:
        points += 1
        environ = {**os.environ, "GPURUN_FAULT": f"command:{points}"}
        done = subprocess.run(argv, env=environ, capture_output=True, text=True)
        store.sweep(now_s=time.time() + LONG_AFTER_S)
        jobs, marks = left(store)
        assert set(jobs) - set(store.codes()) == set(marks), done.stderr
        for job_id in marks:
            if digest := store.get(job_id).spec().code:
                code = Code(store.get(job_id).code)
                code.compare(code)
                assert code.digest == digest
        for job_id in set(marks) - set(before[1]):
            shutil.rmtree((store.folder / job_id).plain)
            store.retire(job_id)
        store.sweep(now_s=time.time() + LONG_AFTER_S)
        assert left(store) == before, done.stderr
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert points > 6


def test_what_is_still_being_made_stays(store, monkeypatch):
    """However old it is: swept after each step of a submission, by another process as the kernel sees it."""
    swept = []

    def sweeping(real):
        def step(*arguments, **options):
            done = real(*arguments, **options)
            store.sweep(now_s=time.time() + LONG_AFTER_S)
            swept.append(real.__name__)
            return done

        return step

    for name in ("write_unsynced", "sync_all", "sync_folder"):
        monkeypatch.setattr(durable, name, sweeping(getattr(durable, name)))
    create(store, 3)
    assert swept == ["write_unsynced"] * 9 + ["sync_all", "sync_folder"]
    assert len(store.live_ids()) == len(store.ids()) == 4


def test_what_is_young_or_not_ours_stays(store, monkeypatch):
    (store.folder / f"{PREFIX}00000000").mkdir()
    (store.folder / f"{PREFIX}00000000" / "j-00000001").mkdir()
    (store.live / "j-00000001").touch()
    (store.folder / f"{PREFIX}link").plain.symlink_to(store.folder.plain)
    (store.folder / f"{PREFIX}file").touch()
    os.mkfifo((store.folder / f"{PREFIX}pipe").plain)
    before = left(store)
    store.sweep(now_s=time.time())
    assert left(store) == before
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    store.sweep(now_s=time.time() + LONG_AFTER_S)
    assert left(store) == before
    monkeypatch.undo()
    store.sweep(now_s=time.time() + LONG_AFTER_S)
    assert f"{PREFIX}00000000" not in left(store)[0]
    assert left(store)[1] == list(store.ids())


def test_a_state_directory_that_is_empty_has_nothing_to_sweep(tmp_path):
    JobStore(tmp_path / "none").sweep(now_s=0.0)


def test_a_mark_whose_job_appears_meanwhile_stays(store, monkeypatch):
    """Between two looks of the sweep, a submission renames its jobs and removes its folder."""
    drafts = store.folder / f"{PREFIX}00000000"
    drafts.mkdir()
    (drafts / "j-00000001").mkdir()
    (store.live / "j-00000001").touch()
    names = type(drafts).names

    def looking(path):
        found = names(path)
        if path == store.folder and drafts.exists():
            (drafts / "j-00000001").rename(store.folder / "j-00000001")
            drafts.rmtree()
        return found

    monkeypatch.setattr(type(drafts), "names", looking)
    store.sweep(now_s=time.time())
    assert "j-00000001" in store.live_ids()
