"""Outputs whose modes keep their owner out, and folders that other users own, as a user without rights sees them."""

from __future__ import annotations

import os

import pytest
from local_agents import Hosts
from outputs_world import JOB, as_stranger, outputs_job

from gpurun.node import data
from gpurun.node.agent.frames import Call
from gpurun.node.folder import below
from gpurun.node.folder.below import Entry, timed_digest_of
from gpurun.node.job import gang
from gpurun.node.transfer import sets
from gpurun.supervisor.outputs.outputs import collect_outputs, copy_outputs, send_outputs

STRANGER = os.geteuid() != 0
mine = pytest.mark.skipif(not STRANGER, reason="test_as_a_stranger runs it, as a user without rights")


@pytest.mark.skipif(STRANGER, reason="runs the others")
def test_as_a_stranger():
    as_stranger(__file__)


@pytest.fixture
def job(tmp_path):
    hosts = Hosts(tmp_path)
    yield outputs_job(tmp_path, hosts, "h1")
    hosts.close()


def modes(top):
    return {str(path.relative_to(top)): path.lstat().st_mode & 0o777 for path in top.rglob("*")}


@mine
def test_modes_that_keep_their_owner_out(job):
    (job.host() / "shut/in").mkdir(parents=True)
    (job.host() / "shut/in/file").write_text("x")
    (job.host() / "ro").mkdir()
    (job.host() / "ro/file").write_text("y")
    (job.host() / "secret").write_text("z")
    for path, mode in (("shut/in/file", 0), ("shut/in", 0o555), ("shut", 0), ("ro", 0o555), ("secret", 0)):
        (job.host() / path).chmod(mode)
    copy_outputs(job)
    assert (job.host() / "shut").stat().st_mode & 0o777 == 0, "a gang that runs finds its folders as they were"
    assert modes(job.head) == {"ro": 0o555, "ro/file": 0o644, "shut": 0}
    copy_outputs(job)
    assert collect_outputs(job) == set()
    assert not job.host().exists() and job.record.outputs_left is None
    assert [(job.head / name).stat().st_mode & 0o777 for name in ("shut", "ro", "secret")] == [0, 0o555, 0]
    send_outputs(job)
    for top in (job.host(), job.head):
        assert (top / "shut").stat().st_mode & 0o777 == 0
        (top / "shut").chmod(0o700)
        assert modes(top) == {
            "ro": 0o555, "ro/file": 0o644, "secret": 0, "shut": 0o700, "shut/in": 0o555, "shut/in/file": 0,
        }  # fmt: skip
        (top / "shut/in/file").chmod(0o600)
        assert (top / "shut/in/file").read_text() == "x"


@mine
def test_what_the_reader_may_not_read_stays_on_the_host(job, monkeypatch):
    """A file of another user: here one that the reader's mode bits cannot open up."""
    (job.host() / "model").write_text("m")
    (job.host() / "foreign").symlink_to("/root")
    listing = job.links.agent("h1").stream
    denied = {"p": "of root", "k": "unreadable", "why": "Permission denied"}

    def stream(op, **params):
        yield from listing(op, **params)
        if op == "outputs.list":
            from gpurun.node.agent import frames
            from gpurun.remote.agent import Reply

            yield Reply(None, frames.encode(denied))

    monkeypatch.setattr(job.links.agent("h1"), "stream", stream)
    assert collect_outputs(job) == {"h1"}
    left = job.record.outputs_left
    assert left.hosts == ("h1",) and "'of root' Permission denied" in left.words(JOB)
    assert (job.head / "model").read_text() == "m" and (job.host() / "model").exists()


@mine
def test_a_fence_removes_folders_that_keep_their_owner_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".gpurun/jobs" / JOB
    (folder / "workspace/ro/deep").mkdir(parents=True)
    (folder / "workspace/ro/deep/file").touch()
    (folder / "secrets").mkdir()
    (folder / "secrets/token").write_text("secret")
    for name, mode in (("workspace/ro/deep", 0), ("workspace/ro", 0o555), ("workspace", 0o555), ("secrets", 0o500)):
        (folder / name).chmod(mode)
    gang._remove_files(JOB, outputs=False, keep_cards=False)
    assert not folder.exists()


@mine
def test_a_workdir_with_read_only_folders_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    entries = [
        ("ro", "dir", 0o555, 5, 0, "", ""),
        ("ro/in", "dir", 0, 5, 0, "", ""),
        ("ro/l", "link", 0, 0, 0, "", "/x"),
    ]
    call = Call(1, lambda *_: None, False, sets.packed(entries))
    name = timed_digest_of([Entry(*entry) for entry in entries])
    assert data.begin_set(call, "t", name, store=sets.CODE, direct=1) == []
    data.put(Call(1, lambda *_: None, False, b""), "t")
    data.drop(call, "t")
    for _ in range(2):
        assert data.use(call, [name], store=sets.CODE) == [name]
    top = tmp_path / ".gpurun/code" / name[7:] / "tree"
    assert (top / "ro").stat().st_mode & 0o777 == 0o555
    sets.prune_code(call)
    assert not top.exists()


@mine
def test_what_cannot_be_removed_is_told_and_everything_else_goes(tmp_path):
    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/z").touch()
    below.remove_path(f"{tmp_path}/tree")
    assert not (tmp_path / "tree").exists()


@mine
def test_a_folder_of_outputs_that_keeps_its_owner_out_comes_home_and_goes_back(job):
    """A program can set the mode of what is mounted for it."""
    (job.host() / "model").write_text("m")
    job.host().chmod(0)
    assert collect_outputs(job) == set()
    assert (job.head / "model").read_text() == "m" and job.record.outputs_left is None
    assert not job.host().exists()
    job.host().mkdir()
    job.host().chmod(0)
    send_outputs(job)
    job.host().chmod(0o700)
    assert (job.host() / "model").read_text() == "m"
