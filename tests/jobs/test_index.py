"""The index of live jobs: it says what the files say, or nothing at all."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import fields, replace

import pytest

from gpurun.jobs import store
from gpurun.jobs import store as index
from gpurun.jobs.record import CancelRequest, FirstFailure, JobRecord, Restart, Setback, State
from gpurun.jobs.spec import Constraints, DataSource, Grant, JobSpec, Wants
from gpurun.jobs.store import JobStore, LiveJob
from gpurun.state import caches, durable
from gpurun.state.clock import head_clock

SPECS = (
    JobSpec(name="a'; touch /tmp/x #\n", image="i", gpus=2, command=("true",), env={"K": "ü"}),
    JobSpec(name="b", image="i", gpus=2, command=("other", "command")),
    JobSpec(
        name="c", image="i", gpus=8, min_gpus=2, command=("x",), pool="vision", priority=-3, preemptible=True,
        time_limit_s=0.5,
        constraints=Constraints(("pascal",), "P", 16000, 4, "rack", ("h1",), ("h2",), True, "host", 9.0),
    ),
)  # fmt: skip

READ = store._read_live


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A store with some jobs that an index is worth, and whose folders can be taken for settled at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "FEW", 1)
    monkeypatch.setattr(caches, "is_settled", lambda *_: True)
    found = JobStore(tmp_path / "state dir")
    for number in range(6):
        found.create(SPECS[number % 3], inventory=tmp_path / "inventory.yaml", now_s=float(number))
    return found


@pytest.fixture
def read(monkeypatch):
    """The ids of the jobs whose files were read."""
    ids = []
    monkeypatch.setattr(store, "_read_live", lambda folder, tell: (ids.append(folder.id), READ(folder, tell))[1])
    return ids


def look(jobs):
    """What the index says must be what the files say."""
    problems, expected_problems = [], []
    found = jobs.live_jobs(problems.append)
    expected = {}
    for job_id in jobs.live_ids():
        if not jobs.get(job_id).path.exists():
            continue
        job, _ = READ(jobs.get(job_id), expected_problems.append)
        if job is not None:
            expected[job_id] = job
    assert found == expected
    assert {problem.where for problem in problems} == {problem.where for problem in expected_problems}
    return found


def kept(tmp_path):
    (path,) = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    return path


def test_files_are_read_once(jobs, read):
    jobs.live_jobs(pytest.fail)
    assert sorted(read) == list(jobs.ids())
    read.clear()
    first = jobs.live_jobs(pytest.fail)
    assert read == []
    assert look(jobs) == first


def test_every_field_comes_back(jobs, read):
    full = JobRecord(
        id="", name="n", owner="me", owner_uid=os.getuid(), inventory="/i", gpus=3, state=State.QUEUED,
        submitted_s=1.5, queued_s=2.5, pool="p", priority=7, outcome=State.FAILED, ladder=True, reached="files",
        attempt=2, restarts=1, granted=(Grant("h1", (0, 2)),), granted_s=3.0, started_s=4.0, checkpoint_s=5.0,
        ended_s=6.0, reason="r\n", code=1, avoid=("h9",),
        first_failure=FirstFailure("it", 0, "h1", 1, ("a",), "rank", "Xid", True), restart=Restart(9.0, 2, 3),
        setback=Setback(1, "rank", "", 0, 1, None, 2.0), boot=head_clock().boot.id, boot_s=head_clock().boot.began_s,
    )  # fmt: skip
    folder = jobs.get(jobs.ids()[0])
    folder.write(full.but(id=folder.id))
    folder.ask_to_cancel(CancelRequest("preempt", "me", 1.0, "because"))
    look(jobs)
    read.clear()
    assert jobs.live_jobs(pytest.fail)[folder.id] == LiveJob(
        full.but(id=folder.id), folder.spec().wants, CancelRequest("preempt", "me", 1.0, "because")
    )
    assert read == []


def test_the_spec_gives_all_that_it_wants():
    wants = SPECS[2].wants
    assert all(getattr(SPECS[2], each.name) == getattr(wants, each.name) for each in fields(wants))
    assert SPECS[0].wants == SPECS[1].wants != wants


def test_the_wants_of_jobs_with_data_of_their_own_share_no_hash():
    """Otherwise each of ten thousand such jobs would be compared with all others."""
    digests = [f"sha256:{number:064}" for number in range(50)]
    wants = [Wants(data={"a'; #": DataSource("folder", "/x", digest)}) for digest in digests]
    assert len(set(map(hash, wants))) == len(set(wants)) == 50
    assert hash(wants[0]) == hash(replace(wants[0], data=dict(wants[0].data)))


def change_record(folder):
    folder.write(folder.record().but(priority=9))


def cancel(folder):
    folder.ask_to_cancel(CancelRequest("cancel", "me", 1.0))


def damage(file, content=b"{"):
    def change(folder):
        durable.write_bytes(folder.path / file, content)

    return change


def replace_folder(folder):
    """Another folder in its place, with other content and the same times."""
    before, other = folder.path.stat(), folder.path.sibling("other")
    shutil.copytree(folder.path.plain, other.plain)
    durable.write_record(other / "state.json", folder.record().but(priority=9))
    os.utime(other.plain, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.rmtree(folder.path.plain)
    other.rename(folder.path)


def forge_time(folder):
    """A change that somebody hides by setting the folder's time of modification."""
    before = folder.path.stat()
    change_record(folder)
    os.utime(folder.path.plain, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert folder.path.stat().st_mtime_ns == before.st_mtime_ns


def edit_in_place(folder):
    path = folder.path / "state.json"
    path.plain.write_bytes(path.read_bytes().replace(b'"priority": 0', b'"priority": 9'))
    folder.path.plain.touch()


CHANGES = [
    change_record, cancel, damage("state.json"), damage("spec.json"), damage("cancel.json"), replace_folder, forge_time,
    edit_in_place, lambda folder: (folder.path / "spec.json").unlink(), lambda folder: shutil.rmtree(folder.path.plain),
    lambda folder: folder.path.rename(folder.path.sibling("elsewhere")),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(jobs, read, change):
    before = look(jobs)
    folder = jobs.get(jobs.ids()[0])
    time.sleep(0.02)  # more than a tick of the kernel's clock
    read.clear()
    change(folder)
    found = jobs.live_jobs(lambda _: None)
    assert read == [folder.id] or folder.id not in found
    assert found | {folder.id: before[folder.id]} == before
    look(jobs)


def test_a_job_that_ends_or_comes_is_seen(jobs):
    look(jobs)
    gone = jobs.ids()[0]
    jobs.retire(gone)
    new = jobs.create(SPECS[0], inventory=jobs.home, now_s=9.0)
    assert gone not in look(jobs)
    assert new.id in look(jobs)


def test_an_edit_in_place_is_seen_when_the_folder_is_touched(jobs):
    """What is promised, and no more: an editor that does not replace the file leaves the folder as it was."""
    folder = jobs.get(jobs.ids()[0])
    look(jobs)
    path = folder.path / "state.json"
    path.plain.write_bytes(path.read_bytes().replace(b'"name": "', b'"name": "x'))
    assert jobs.live_jobs(pytest.fail)[folder.id].record != folder.record()
    time.sleep(0.02)
    folder.path.plain.touch()
    assert jobs.live_jobs(pytest.fail)[folder.id].record == folder.record()


def test_a_folder_that_has_just_changed_is_read_again(jobs, read, monkeypatch):
    """A second change within a tick of the clock would not be seen."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(jobs.home.parent / "cache"))
    monkeypatch.setattr(index, "FEW", 1)
    time.sleep(caches.SETTLED_NS / 1e9 + 0.05)
    folder = jobs.get(jobs.ids()[0])
    for priority in range(50):
        folder.write(folder.record().but(priority=priority))
        assert jobs.live_jobs(pytest.fail)[folder.id].record.priority == priority


def test_a_clock_that_was_set_back_hides_no_change(jobs, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(jobs.home.parent / "cache"))
    monkeypatch.setattr(index, "FEW", 1)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
    look(jobs)
    assert not (jobs.home.parent / "cache").exists(), "folders that changed in the future may change at that time"


def test_a_damaged_job_is_reported_every_time(jobs):
    folder = jobs.get(jobs.ids()[0])
    durable.write_bytes(folder.path / "spec.json", b"{")
    for _ in range(3):
        problems = []
        found = jobs.live_jobs(problems.append)
        assert found[folder.id].wants is None
        assert [problem.where for problem in problems] == [str(folder.path / "spec.json")]


@pytest.mark.parametrize("cut", [0, 1, 31, 40, 200, -1])
def test_an_index_that_is_cut_is_made_again(jobs, tmp_path, read, cut):
    look(jobs)
    kept(tmp_path).write_bytes(kept(tmp_path).read_bytes()[:cut])
    read.clear()
    look(jobs)
    assert set(read) == set(jobs.ids())
    read.clear()
    jobs.live_jobs(pytest.fail)
    assert read == []


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x92\xa0\x90", b"\x92\xa0\x91\x92\x80\x90", b"\x91" * 100000])
def test_content_that_is_no_index_is_made_again(jobs, tmp_path, content):
    """Another version of gpurun may have written it, with a right checksum."""
    look(jobs)
    caches.keep_cache(kept(tmp_path), content)
    look(jobs)


def test_every_flipped_byte_is_noticed(jobs, tmp_path, read):
    look(jobs)
    data = kept(tmp_path).read_bytes()
    for position in range(0, len(data), len(data) // 40):
        kept(tmp_path).write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        look(jobs)


def test_an_index_of_another_boot_or_another_gpurun_is_made_again(jobs, read, monkeypatch):
    """After a power cut, a job's files may be older than what the index says of them."""
    look(jobs)
    for name, value in (("boot_id", lambda: "another"), ("INDEX_CODE", "another")):
        monkeypatch.setattr(index, name, value)
        read.clear()
        jobs.live_jobs(pytest.fail)
        assert set(read) == set(jobs.ids())


def test_an_index_that_another_user_could_have_written_is_ignored(jobs, tmp_path, read):
    look(jobs)
    kept(tmp_path).chmod(0o662)
    read.clear()
    look(jobs)
    assert set(read) == set(jobs.ids())


def test_an_index_of_another_state_directory_is_ignored(jobs, tmp_path, read):
    """Also if it lies where this one's should, and the jobs have the same names."""
    look(jobs)
    other = JobStore(tmp_path / "other")
    shutil.copytree(jobs.home, other.home)
    folder = other.get(other.ids()[0])
    folder.write(folder.record().but(priority=9))
    mine = caches.cache_file(tmp_path / "cache" / "gpurun" / "jobs", os.path.realpath(other.folder.plain))
    shutil.copy(kept(tmp_path), mine)
    look(other)


@pytest.mark.parametrize("environ", [{}, {"XDG_CACHE_HOME": "/proc/nowhere"}, {"HOME": "/dev/null"}])
def test_without_a_place_for_it_all_works(jobs, monkeypatch, environ):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        assert len(look(jobs)) == 6
