"""A user's caches on a host: shared by the user's jobs, never larger than the limit for long, and hostile inside."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gpurun.node.agent.frames import Call, OpError
from gpurun.node.job import caches, parts

OWNER, OTHER = f"{'a' * 16}-1000", f"{'a' * 16}-1001"
JOB, SECOND = "j-00000001", "j-00000002"
MODEL = 200 << 10


def call():
    return Call(1, lambda *_: None, False, b"")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A host with a large disk."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPURUN_FOLDER", raising=False)
    monkeypatch.setattr(caches, "disk_of", lambda _: (1 << 50, 1 << 50))
    return tmp_path


def begin(job=JOB, owner=OWNER, most=1 << 40):
    Path(parts.job_folder(job)).mkdir(parents=True, exist_ok=True)
    caches.join(call(), job, owner, most)
    return Path(caches.caches_folder(owner))


def end(job=JOB):
    Path(parts.job_folder(job), caches.USE_FILE).unlink()


def model(top, name, used_s, size=MODEL):
    """A model as Hugging Face keeps it: a file, and a link to it."""
    folder = top / "huggingface/hub" / name
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    (folder / "blobs/x").write_bytes(os.urandom(size))
    (folder / "snapshots/model").symlink_to("../blobs/x")
    for each in (folder / "blobs/x", folder / "snapshots/model"):
        os.utime(each, (used_s, used_s), follow_symlinks=False)
    return folder


def test_jobs_of_a_user_share_a_folder_and_no_other_user_sees_it():
    top = begin()
    (top / "a").write_text("a")
    end()
    assert (begin(SECOND) / "a").read_text() == "a"
    other = begin("j-00000003", OTHER)
    assert not list(other.iterdir())
    assert top.parent.stat().st_mode & 0o777 == 0o700 == other.stat().st_mode & 0o777
    assert caches.folder_of_job(SECOND) == str(top)
    assert caches.folder_of_job(JOB) == ""
    assert caches.list_caches(call(), OWNER)["jobs"] == [SECOND]


def test_the_least_recently_used_model_goes_as_a_whole_and_only_beyond_the_limit():
    top = begin()
    old, young = model(top, "models--old", 1000), model(top, "models--young", 2000)
    (top / "huggingface/token").write_text("x")
    checkpoint = top / "torch/hub/checkpoints/r.pth"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(os.urandom(MODEL))
    os.utime(checkpoint, (1500, 1500))
    end()
    assert caches.list_caches(call(), OWNER)["entries"] == 4
    told = caches.trim(call(), OWNER, 2 * MODEL + (40 << 10))
    assert (told["jobs"], told["stuck"]) == ([], [])
    assert MODEL <= told["freed_bytes"] < 2 * MODEL
    assert not old.exists()
    assert young.exists()
    assert checkpoint.exists()
    begin(SECOND, most=MODEL + (40 << 10))
    assert not checkpoint.exists()
    assert (young / "snapshots/model").exists()
    end(SECOND)
    told = caches.trim(call(), OWNER, 0)
    assert told["bytes"] == 0
    assert caches.list_caches(call(), OWNER) == {"bytes": 0, "entries": 0, "jobs": []}
    assert not list((top.parent / "gone").iterdir())


def test_nothing_goes_while_a_job_uses_it():
    old = model(begin(), "models--old", 1000)
    told = caches.trim(call(), OWNER, 0)
    assert (told["freed_bytes"], told["jobs"]) == (0, [JOB])
    assert told["bytes"] >= MODEL
    begin(SECOND, most=1)
    assert old.exists()
    end()
    end(SECOND)
    begin(SECOND, most=1)  # a try again of its own job is no other use
    assert not old.exists()


def test_a_job_that_begins_waits_for_a_prune(home):
    begin()
    end()
    with caches._alone(call(), OWNER):
        thread = threading.Thread(target=begin, args=(SECOND,), daemon=True)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert caches._users(OWNER) == []
    thread.join(60)
    assert caches._users(OWNER) == [SECOND]


def test_the_reserve_of_the_disk_is_kept_whatever_the_limit(monkeypatch):
    old = model(begin(), "models--old", 1000)
    end()
    monkeypatch.setattr(caches, "disk_of", lambda _: (1 << 30, 100 << 30))
    begin(SECOND)
    assert not old.exists()


def test_a_job_does_not_wait_long_for_what_is_too_large(monkeypatch):
    old = model(begin(), "models--old", 1000)
    end()
    monkeypatch.setattr(caches, "_JOIN_S", -1.0)
    begin(SECOND, most=1)
    assert caches.list_caches(call(), OWNER)["jobs"] == [SECOND]
    assert old.exists()


def test_links_and_odd_files_and_folders_without_rights_go_and_nothing_outside(home):
    top = begin()
    outside = home / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (top / "link").symlink_to(outside)
    (top / "huggingface").symlink_to(outside)
    (top / "torch").mkdir()
    (top / "torch/hub").symlink_to(outside)
    os.mkfifo(top / "pipe")
    os.link(outside / "kept", top / "hard")
    (top / os.fsdecode(b"\xff\n")).write_text("x")
    locked = top / "locked/in"
    locked.mkdir(parents=True)
    (locked / "x").write_text("x")
    locked.chmod(0)
    locked.parent.chmod(0)
    os.utime(top / "pipe", (1 << 40, 1 << 40))
    end()
    told = caches.trim(call(), OWNER, 0)
    assert told["stuck"] == []
    assert not list(top.iterdir())
    assert (outside / "kept").read_text() == "kept"


def test_what_this_account_cannot_remove_is_said_and_counts(monkeypatch):
    top = begin()
    old, young = model(top, "models--old", 1000), model(top, "models--young", 2000)
    end()
    usual = caches.below.remove_entry

    def refuse(above, name):
        if Path(f"/proc/self/fd/{above}", os.fsdecode(name), "blobs/mine").exists():
            raise PermissionError(1, "Operation not permitted")
        usual(above, name)

    (old / "blobs/mine").write_text("root's")
    monkeypatch.setattr(caches.below, "remove_entry", refuse)
    told = caches.trim(call(), OWNER, 0)
    assert told["stuck"] == ["'huggingface/hub/models--old': Operation not permitted"]
    assert not young.exists()
    assert caches.list_caches(call(), OWNER)["bytes"] >= MODEL
    begin(SECOND)
    end(SECOND)
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(top.parents[3]))
    assert caches.trim(call(), OWNER, 0)["stuck"] == []
    assert caches.list_caches(call(), OWNER)["bytes"] == 0


def test_a_folder_that_a_job_has_closed_is_still_seen_trimmed_and_used_again():
    top = begin()
    model(top, "models--old", 1000)
    top.chmod(0)
    assert caches.list_caches(call(), OWNER)["bytes"] >= MODEL
    top.chmod(0)
    end()
    assert caches.trim(call(), OWNER, 0)["freed_bytes"] >= MODEL
    top.chmod(0)
    (begin(SECOND) / "x").write_text("x")


def test_empty_folders_count_and_go_and_leave_none_behind():
    top = begin()
    for name in ("huggingface/hub", "huggingface/a", "torch/hub/checkpoints", "b"):
        (top / name).mkdir(parents=True)
    model(top, "models--old", 1000)
    end()
    assert caches.list_caches(call(), OWNER)["entries"] == 4
    assert caches.trim(call(), OWNER, 0)["bytes"] == 0
    assert not list(top.iterdir())


def test_a_job_that_begins_waits_neither_for_a_long_prune_nor_for_a_large_entry(monkeypatch):
    """A start that takes too long would make the host one that cannot start jobs."""
    top = begin()
    old = model(top, "models--old", 1000)
    end()
    monkeypatch.setattr(caches, "_JOIN_S", 0.2)
    with caches._alone(call(), OWNER):
        begin(SECOND, most=0)
    assert caches._users(OWNER) == [SECOND]
    assert old.exists()
    end(SECOND)
    goes = threading.Event()
    usual = caches.below.remove_entry
    monkeypatch.setattr(caches.below, "remove_entry", lambda *each: goes.wait(60) and usual(*each))
    begin(SECOND, most=0)
    assert caches._users(OWNER) == [SECOND]
    assert not old.exists()
    goes.set()


def test_a_prune_stops_when_a_job_has_not_waited_for_it(monkeypatch):
    top = begin()
    for number in range(3):
        model(top, f"models--{number}", 1000 + number)
    end()
    usual = caches._moved

    def moved(*each):
        Path(parts.job_folder(SECOND)).mkdir(parents=True, exist_ok=True)
        caches._note_use(SECOND, OWNER)
        return usual(*each)

    monkeypatch.setattr(caches, "_moved", moved)
    told = caches.trim(call(), OWNER, 0)
    assert told["jobs"] == [SECOND]
    assert MODEL <= told["freed_bytes"] < 2 * MODEL <= told["bytes"]
    assert len(list((top / "huggingface/hub").iterdir())) == 2


def test_a_cache_that_cannot_be_read_stops_no_job(monkeypatch):
    begin()
    end()

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(caches, "_entries", broken)
    begin(SECOND)
    assert caches._users(OWNER) == [SECOND]


def test_a_second_step_of_the_same_attempt_removes_nothing():
    old = model(begin(), "models--old", 1000)
    begin(most=0)
    assert old.exists()


@pytest.mark.parametrize("owner", ["", "..", "../../x", f"{'a' * 16}-1000/..", f"{'a' * 16}-1000\n", "A" * 16 + "-1"])
def test_a_folder_that_is_nobodys_is_refused(owner):
    for ask in (
        lambda: caches.list_caches(call(), owner),
        lambda: caches.trim(call(), owner, 0),
        lambda: begin(owner=owner),
    ):
        with pytest.raises(OpError) as error:
            ask()
        assert error.value.kind == "bad-request"
