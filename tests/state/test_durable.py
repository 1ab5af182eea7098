"""What `durable` promises beyond whole files; that it is enough for a power cut is tests/power's business."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpurun.errors import StateDiskError, StateError, StateUnavailable
from gpurun.jobs import folder
from gpurun.jobs.events import EventLog, EventTail
from gpurun.state import durable, locks
from gpurun.state import durable as syncing
from gpurun.state.audit import AuditLog
from gpurun.state.paths import StatePath, may_pass


@pytest.fixture
def synced(monkeypatch):
    """Every file and folder that was fsynced, in order."""
    seen = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd))[1])
    return seen


def test_a_folder_that_somebody_has_made_and_not_synced_is_synced_by_the_next(tmp_path, synced):
    (tmp_path / "home").mkdir()  # by a process that was killed just then
    durable.make_folder(StatePath(tmp_path) / "home" / "jobs")
    assert synced[-2:] == [str(tmp_path), str(tmp_path / "home")]
    del synced[:]
    (tmp_path / "home" / "jobs" / "j").touch()
    durable.make_folder(StatePath(tmp_path) / "home" / "jobs")
    assert synced == []


def test_a_new_file_that_another_user_locks_first_is_made_again(tmp_path, monkeypatch):
    """Who may read it may hold a read lock on it."""
    (tmp_path / "home").mkdir()
    path, readers, real = StatePath(tmp_path) / "home" / "x", [], locks.try_take

    def late(descriptor):
        if len(readers) < 3:
            readers.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
            assert real(readers[-1], shared=True)
        return real(descriptor)

    monkeypatch.setattr(locks, "try_take", late)
    descriptor = durable.write_locked_record(path, {"a": 1})
    assert path.parent.names() == ["x"]
    with path.reader() as stream:
        assert locks.is_held(stream.fileno())
    readers.clear()
    monkeypatch.setattr(locks, "try_take", lambda _: False)
    with pytest.raises(StateUnavailable, match="another user's process locks"):
        durable.write_locked_record(path, {"a": 2})
    assert path.parent.names() == ["x"]
    os.close(descriptor)


def test_the_place_of_a_folder_is_taken_by_a_file(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(StateError, match=r"is not a folder|is not the file or folder that gpurun made"):
        durable.make_folder(StatePath(tmp_path) / "home" / "jobs")


def test_a_tree_is_synced_whole_and_nothing_is_followed_or_waited_for(tmp_path, synced):
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "file").write_text("x")
    (tree / "link").symlink_to("/etc")
    os.mkfifo(tree / "pipe")
    syncing.sync_tree(tree)
    assert sorted(synced) == sorted(map(str, [tree, tree / "a", tree / "a" / "file"]))


@pytest.mark.parametrize("left", [b'{"t": 1, "ki', b"\0" * 40, b'{"t": 1}\n\0\0\0'])
def test_what_a_power_cut_left_of_a_last_line_spoils_no_other(tmp_path, left):
    path = StatePath(tmp_path) / "events.jsonl"
    log, tail = EventLog(path, clock=lambda: 1.0), EventTail(path)
    log.emit("first")
    with path.plain.open("ab") as file:
        file.write(left)
    log.emit("second")
    log.emit("third")
    assert [event["kind"] for event in tail.new() if "kind" in event] == ["first", "second", "third"]


def test_the_audit_log_too(tmp_path):
    AuditLog(tmp_path).note("submit", job="j-00000001")
    with AuditLog(tmp_path).file().plain.open("ab") as file:
        file.write(b'{"time_s": 17')
    AuditLog(tmp_path).note("grant", job="j-00000001")
    assert [entry["what"] for entry in AuditLog(tmp_path).read()] == ["submit", "damaged", "grant"]


def test_a_tree_that_keeps_its_owner_out_is_synced_with_everything_else(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").touch()
    calls = []
    monkeypatch.setattr(syncing, "sync_file_system", calls.append)
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: real(path, *rest, **more) if path != b"file" else refuse()
    )
    syncing.sync_tree(tmp_path / "tree")
    assert len(calls) == 1


def refuse():
    raise PermissionError


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path), lambda path: None])
def test_what_is_no_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "log")
    durable.sync_file(StatePath(tmp_path) / "log")


def failing(monkeypatch, number, *, of):
    """Have every fsync of a file (or of a folder) fail, and every sync of a whole file system."""
    real = os.fsync

    def fsync(descriptor):
        if (Path(f"/proc/self/fd/{descriptor}").is_dir()) == (of == "folder"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


NFS = (
    "ESTALE", "ETIMEDOUT", "ENOTCONN", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH", "EREMOTEIO",
    "ENODEV", "ESHUTDOWN", "EKEYEXPIRED", "EUCLEAN", "EINTR",
)  # fmt: skip


@pytest.mark.parametrize("name", NFS)
def test_a_file_system_that_is_away_for_a_moment_is_no_damage(tmp_path, monkeypatch, name):
    """A supervisor waits then, and no job ends; a waiter counts a record it cannot read as there."""
    error = OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    assert may_pass(error)

    def away(*_, **__):
        raise error

    events = EventLog(StatePath(tmp_path) / "events.jsonl", clock=lambda: 0.0)
    monkeypatch.setattr(os, "open", away)
    with pytest.raises(StateUnavailable) as told:
        (StatePath(tmp_path) / "state.json").read_bytes()
    assert told.value.hint
    events.emit("note", text="is lost, and nothing stops for it")


def test_an_open_file_that_cannot_be_examined_now_is_no_damage(tmp_path, monkeypatch):
    at = StatePath(tmp_path) / "history" / "7"
    durable.make_folder(at)
    durable.write_record(at / "record.json", ["x"])

    def failed(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    steps = [
        (at / "record.json").reader, lambda: durable.read_record(at / "record.json", list),
        lambda: durable.write_record(at / "record.json", ["y"]), lambda: folder.make_history_folder(tmp_path, 7),
    ]  # fmt: skip
    for step in steps:
        with monkeypatch.context() as now:
            now.setattr(os, "fstat", failed)
            with pytest.raises(StateDiskError, match="disk of the state directory failed"):
                step()
    assert durable.read_record(at / "record.json", list) == ["x"]


def test_a_pipe_in_the_place_of_a_file_is_damage(tmp_path):
    """Nobody reads it, so the kernel answers ENXIO; whoever put it there must not make others wait."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError) as told:
        (StatePath(tmp_path) / "pipe").open_file(os.O_WRONLY)
    assert not isinstance(told.value, StateUnavailable)


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_disk_that_fails_is_told_to_whoever_syncs_a_file(tmp_path, monkeypatch, of):
    """The fence would remove the only copy that is left."""
    (tmp_path / "log").write_text("last words")
    failing(monkeypatch, errno.EIO, of=of)
    with pytest.raises(StateDiskError) as failed:
        durable.sync_file(StatePath(tmp_path) / "log")
    assert str(tmp_path) in str(failed.value.where) and failed.value.hint


def test_a_disk_that_fails_is_told_to_whoever_syncs_a_folder_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "home" / "jobs").mkdir(parents=True)
    failing(monkeypatch, errno.EIO, of="folder")
    with pytest.raises(StateDiskError):
        durable.make_folder(StatePath(tmp_path) / "home" / "jobs")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_syncs_no_folders_is_good_enough(tmp_path, monkeypatch, number):
    """Some network and user-space file systems have no such call; their files are synced all the same."""
    failing(monkeypatch, number, of="folder")
    durable.make_folder(StatePath(tmp_path) / "jobs")
    durable.write_bytes(StatePath(tmp_path) / "jobs" / "spec", b"{}")
    durable.sync_file(StatePath(tmp_path) / "jobs" / "spec")
    durable.sync_all(files=[], folders=[StatePath(tmp_path)])
    syncing.sync_tree(tmp_path)
    failing(monkeypatch, number, of="file")
    with pytest.raises(StateError):
        durable.sync_file(StatePath(tmp_path) / "jobs" / "spec")


class FailingLibrary:
    """The C library of a machine whose disk fails."""

    def __init__(self, *_, **__):
        pass

    @staticmethod
    def syncfs(descriptor):
        os.fstat(descriptor)
        return -1


def test_a_disk_that_fails_during_an_early_sync_is_told_at_the_end_or_before(tmp_path, monkeypatch):
    """The kernel tells it once, so a later sync may succeed."""
    monkeypatch.setattr(syncing, "EARLY_SYNC_BYTES", 1 << 20)
    monkeypatch.setattr("ctypes.CDLL", FailingLibrary)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EIO)
    top = os.open(tmp_path, os.O_RDONLY)
    early = syncing.EarlySync(top)
    early.wrote(10)
    early.end()  # nothing was synced yet
    with pytest.raises(OSError) as failed:
        for _ in range(100):
            early.wrote(1 << 20)
            early._thread.join()
    assert failed.value.errno == errno.EIO
    early.wrote(2 << 20)
    with pytest.raises(OSError):
        early.end()
    early.end()
    os.close(top)


@pytest.mark.parametrize("has_secrets", [False, True])
def test_a_disk_that_fails_is_told_to_whoever_syncs_a_tree_too_large_to_sync_by_file(
    tmp_path, monkeypatch, has_secrets
):
    """Outputs are removed from the hosts once the head's tree is synced."""
    monkeypatch.setattr(syncing, "SYNCED_ONE_BY_ONE", 3)
    for number in range(1 if has_secrets else 10):
        (tmp_path / f"file-{number}").touch()
    if has_secrets:
        monkeypatch.setattr(syncing.below, "open_file", lambda *_, **__: refuse())
    syncing.sync_tree(tmp_path)
    monkeypatch.setattr("ctypes.CDLL", FailingLibrary)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EIO)
    with pytest.raises(OSError) as failed:
        syncing.sync_tree(tmp_path)
    assert failed.value.errno == errno.EIO


def test_files_are_synced_also_where_no_thread_can_start(tmp_path, monkeypatch):
    """`ulimit -u` counts threads, too."""

    class NoThread:
        def __init__(self, target):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    names, synced, real = [StatePath(tmp_path) / f"{number}" for number in range(5)], [], os.fsync
    for name in names:
        name.touch()
    monkeypatch.setattr(durable.threading, "Thread", NoThread)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real(descriptor)))
    durable.sync_all(files=names, folders=[StatePath(tmp_path)])
    assert len(synced) == 6
