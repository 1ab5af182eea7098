"""The head's copy of a running gang's outputs, made by the real operations on a folder of this machine."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from gpurun.errors import HostFailure
from gpurun.jobs.folder import JobFolder
from gpurun.node import archive
from gpurun.node.call import Call
from gpurun.remote.agent import Reply
from gpurun.remote.fleet import Results
from gpurun.state.path import StatePath
from gpurun.supervisor.outputs import collect_outputs, copy_outputs
from gpurun.supervisor.outputs_watch import OutputsWatch

JOB = "j-00000001"


class Agent:
    """Runs `gpurun.node`'s operations here, and counts the bytes they send."""

    def __init__(self, outputs):
        self.outputs = outputs
        self.sent = 0
        self.meanwhile = lambda: None
        self.listing = None

    def call(self, op, **params):
        if op == "gang.outputs":
            files = [path.stat().st_mtime for path in self.outputs.rglob("*")]
            return Reply({"path": str(self.outputs), "run": "/run", "newest": max(files, default=None)})
        if op == "files.rmtree":
            return Reply({"removed": True})
        assert op == "files.list"
        return Reply(archive.listing(Call(1, lambda *_: None, False, b""), **params))

    def stream(self, op, **params):
        assert op == "files.tar"
        pieces = []
        call = Call(1, lambda _, piece: pieces.append(bytes(piece)), False, b"")
        said = archive.tar(call, **params)
        self.meanwhile()
        for piece in pieces:
            self.sent += len(piece)
            yield Reply(None, piece)
        yield Reply(said if self.listing is None else {"entries": 1, "listing": self.listing})


@pytest.fixture
def job(tmp_path):
    host = tmp_path / "host"
    host.mkdir()
    folder = JobFolder(StatePath(tmp_path) / JOB)
    folder.path.mkdir()
    agent = Agent(host)
    links = SimpleNamespace(
        is_open=lambda host: host == "h1",
        agent=lambda _: agent,
        each=lambda call, hosts=("h1",): Results({name: call(agent) for name in hosts}, {}),
    )
    return SimpleNamespace(
        host=host, folder=folder, agent=agent, links=links, hosts=("h1",), members=("h1",), outputs_copied={},
        lease=SimpleNamespace(job=JOB), spec=SimpleNamespace(outputs="/out", min_gpus=None), note=pytest.fail,
    )  # fmt: skip


def copy(job):
    copy_outputs(job, [("h1", str(job.host))])
    return {str(path.relative_to(job.folder.outputs)): path.read_bytes()
            for path in job.folder.outputs.rglob("*") if path.is_file()}  # fmt: skip


def test_only_what_has_changed_is_sent_and_what_is_gone_goes(job):
    (job.host / "deep" / "er").mkdir(parents=True)
    (job.host / "deep/er/old model").write_bytes(b"m" * 1_000_000)
    (job.host / "last").symlink_to("deep/er/old model")
    (job.host / "step").write_text("1")
    assert copy(job) == {"deep/er/old model": b"m" * 1_000_000, "last": b"m" * 1_000_000, "step": b"1"}
    assert job.agent.sent > 1_000_000
    job.agent.sent = 0
    (job.host / "step.new").write_text("2")
    (job.host / "step.new").rename(job.host / "step")
    (job.host / "new").write_bytes(b"n")
    assert copy(job)["step"] == b"2"
    assert job.agent.sent < 50_000
    assert str((job.folder.outputs / "last").readlink()) == "deep/er/old model"
    (job.host / "new").unlink()
    assert sorted(copy(job)) == ["deep/er/old model", "last", "step"]
    assert sorted(path.name for path in job.folder.path.plain.iterdir()) == ["outputs"]


def test_a_file_of_the_same_size_and_time_that_was_replaced_is_sent(job):
    (job.host / "step").write_text("1")
    os.utime(job.host / "step", ns=(5, 5))
    copy(job)
    (job.host / "new").write_text("2")
    os.utime(job.host / "new", ns=(5, 5))
    (job.host / "new").rename(job.host / "step")
    assert copy(job) == {"step": b"2"}


def test_a_file_that_is_being_written_stays_as_it_was(job):
    (job.host / "model").write_text("whole")
    copy(job)
    (job.host / "model").write_text("half of the ne")
    (job.host / "first").write_text("ha")

    def write_on():
        (job.host / "model").write_text("half of the new one is here")
        (job.host / "first").write_text("half")

    job.agent.meanwhile = write_on
    assert copy(job) == {"model": b"whole"}
    job.agent.meanwhile = lambda: None
    assert copy(job) == {"model": b"half of the new one is here", "first": b"half"}


def test_a_copy_that_was_removed_from_the_head_is_made_again(job):
    (job.host / "a").write_text("1")
    copy(job)
    (job.folder.outputs / "a").unlink()
    assert copy(job) == {"a": b"1"}


def test_hard_links_survive_when_one_of_them_was_known(job):
    (job.host / "a").write_text("1")
    copy(job)
    os.link(job.host / "a", job.host / "b")
    assert copy(job) == {"a": b"1", "b": b"1"}


@pytest.mark.parametrize("name", ["../spec.json", "/etc/x", "a/../../spec.json", "\0"])
def test_a_host_that_lies_about_names_reaches_nothing_outside(job, name):
    (job.folder.path / "spec.json").plain.write_text("precious")
    (job.host / "a").write_text("1")
    copy(job)
    (job.host / "a").write_text("2")
    job.agent.listing = {name: [1, 1, 1]}
    with pytest.raises(HostFailure, match="no folder of outputs"):
        copy(job)
    assert (job.folder.path / "spec.json").read_text() == "precious"
    assert (job.folder.outputs / "a").read_text() == "1"


def test_a_cancelled_copy_leaves_the_one_before(job):
    (job.host / "a").write_text("1")
    copy(job)
    (job.host / "a").write_text("22")
    with pytest.raises(HostFailure, match="cancelled"):
        copy_outputs(job, [("h1", str(job.host))], cancelled=lambda: True)
    assert (job.folder.outputs / "a").read_text() == "1"
    assert not collect_outputs(job)
    assert (job.folder.outputs / "a").read_text() == "22"


def test_of_a_host_that_is_gone_the_head_keeps_what_it_has(job):
    (job.host / "newer").write_text("2")
    job.folder.outputs.mkdir()
    (job.folder.outputs / "older").write_text("1")
    job.members, job.spec.min_gpus = ("h0", "h1"), 1
    assert not collect_outputs(job)
    assert sorted(path.name for path in job.folder.outputs.iterdir()) == ["newer", "older"]


def test_the_watch_copies_only_when_something_has_changed(job):
    watch = OutputsWatch(job, threading.Event())
    watch.look()
    assert not job.folder.outputs.exists()
    (job.host / "a").write_text("1")
    watch.look()
    first = job.folder.outputs.stat().st_ino
    watch.look()
    assert job.folder.outputs.stat().st_ino == first
    (job.host / "a").write_text("2")
    watch.look()
    assert (job.folder.outputs / "a").read_text() == "2"
