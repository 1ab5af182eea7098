"""PREPARING: what the head's own failures mean for a job."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.content import ship as shipping
from gpurun.content.relay import DamagedBlob
from gpurun.content.tree import scan
from gpurun.content.workdir import write_code
from gpurun.errors import HostFailure
from gpurun.jobs.record import State
from gpurun.state.paths import StatePath
from gpurun.supervisor import start
from gpurun.supervisor.verdict.causes import is_unstarted
from gpurun.supervisor.verdict.ends import GangEnd

ERRORS = [
    (errno.ESTALE, True), (errno.EIO, True), (errno.EMFILE, True), (errno.ETIMEDOUT, True), (errno.EHOSTDOWN, True),
    (errno.ENOENT, False), (errno.EACCES, False), (errno.EISDIR, False),
]  # fmt: skip


def waits(end):
    return is_unstarted(State.PREPARING, end)


@pytest.mark.parametrize(("number", "may_pass"), ERRORS)
def test_a_secret_that_cannot_be_read_for_a_moment_ends_no_job(monkeypatch, number, may_pass):
    def fail(_):
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "read_bytes", fail)
    job = SimpleNamespace(spec=SimpleNamespace(secret_files={"token": "/nfs/token"}))
    with pytest.raises(GangEnd, match="/nfs/token") as ended:
        start._send_secrets(job, ["h1"])
    assert waits(ended.value.end) is may_pass
    assert "'token'" in ended.value.end.reason


def sending(spec, **more):
    """A job that sends its code to one host. Nothing is sent: its code cannot be read."""
    links = SimpleNamespace(fleet=None, is_open=lambda host: True)
    return SimpleNamespace(
        spec=spec, lease=SimpleNamespace(job="j", attempt=1), links=links, inventory=None, members=["h1"], **more
    )


@pytest.mark.parametrize(("number", "may_pass"), ERRORS)
def test_a_workdir_that_cannot_be_read_for_a_moment_ends_no_job(tmp_path, monkeypatch, number, may_pass):
    def fail(*_):
        raise OSError(number, "no", str(tmp_path / "x"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("gpurun.content.tree.Walk.entries", fail)
    job = sending(SimpleNamespace(workdir=str(tmp_path), code=False))
    with pytest.raises(GangEnd) as ended:
        start._send_workdir(job, ["h1"], lambda: False)
    assert waits(ended.value.end) is may_pass
    monkeypatch.undo()
    assert not scan(tmp_path).entries


def test_a_job_whose_list_of_files_is_not_the_submitted_one_does_not_run(tmp_path, monkeypatch):
    """Each content is sound: only the digest of all shows that two files changed places."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    for name in ("train.pb", "train.py"):
        (tmp_path / "work" / name).write_text(name)
    tree, kept = scan(tmp_path / "work"), StatePath(tmp_path) / "code"
    write_code(kept, tree)
    kept.plain.write_bytes(re.sub(rb"(train.p)(.)(.*train.p)(.)", rb"\1\4\3\2", kept.read_bytes(), count=1))
    job = sending(SimpleNamespace(workdir="/w", code=tree.digest), folder=SimpleNamespace(code=kept))
    with pytest.raises(GangEnd, match="differs from the submitted list"):
        start._send_workdir(job, ["h1"], lambda: False)


@pytest.mark.parametrize(
    "error", [DamagedBlob("sha256:0", "h1"), HostFailure("its deadline", kind="timeout")], ids=["damaged", "late"]
)
def test_an_image_that_the_head_cannot_give_now_makes_the_job_wait(monkeypatch, error):
    def ship(*_, **__):
        raise error

    monkeypatch.setattr(start, "ship", ship)
    place = SimpleNamespace(docker_host=None)
    job = SimpleNamespace(
        spec=SimpleNamespace(image="i", image_id="x"), links=SimpleNamespace(fleet=None), inventory=place
    )
    with pytest.raises(GangEnd) as ended:
        start.ship_image(job, ["h1"], cancelled=lambda: False)
    assert waits(ended.value.end)


def test_a_ship_that_is_late_is_no_cancelled_ship(monkeypatch):
    class Late:
        def __init__(self, *arguments):
            self._check = arguments[5]

        def run(self, hosts):
            self._check()

        def close(self):
            pass

    monkeypatch.setattr(shipping, "Shipment", Late)
    with pytest.raises(HostFailure, match="deadline of 0s") as late:
        shipping.ship("i", None, inventory=None, hosts=[], docker_host=None, deadline_s=-1.0)
    assert late.value.kind == "timeout"
    with pytest.raises(shipping.ShipCancelled):
        shipping.ship("i", None, inventory=None, hosts=[], docker_host=None, cancelled=lambda: True)
