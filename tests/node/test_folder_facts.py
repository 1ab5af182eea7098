"""Whether a job could keep its files on a host: what the probe says when it could not."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest

from gpurun.facts import hardware_from_document
from gpurun.node.agent import serve
from gpurun.node.probe import probe

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 8:2 / /home ro,relatime shared:5 - ext4 /dev/sda2 ro,errors=remount-ro
31 30 8:17 / /home/a\\040b rw - xfs /dev/sdb1 rw
garbage
""".splitlines()


def facts(folder, mountinfo=()):
    return probe.collect_folder_facts(str(folder), list(mountinfo))


def test_a_folder_is_made_as_a_job_would_and_left_empty_but_for_a_sign(tmp_path):
    home = tmp_path / "home's é"
    home.mkdir()
    found = facts(home / ".gpurun")
    assert (found["folder_fault"], found["folder_problem"]) == ("", "")
    assert found["folder_free_bytes"] > 0 and found["folder"] == str(home / ".gpurun")
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*")) == [
        ".gpurun",
        ".gpurun/jobs",
        ".gpurun/outputs",
        ".gpurun/signs",
        f".gpurun/signs/{found['folder_sign']}",
    ]
    assert hardware_from_document("h", found).folder_problem == ""
    assert facts(home / ".gpurun")["folder_fault"] == ""


def failing(monkeypatch, number, where="pwrite"):
    """Let a call of the probe fail."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(probe.os, where, fail)


@pytest.mark.parametrize("where", ["makedirs", "open", "pwrite", "fsync"])
@pytest.mark.parametrize(
    ("number", "fault", "words"),
    [
        (errno.EROFS, "read-only", "read-only file system (ext4 on /home: ro,relatime,ro,errors=remount-ro)"),
        (errno.EACCES, "denied", "may not write to"),
        (errno.EPERM, "denied", "may not write to"),
        (errno.ENOSPC, "full", "inodes are free"),
        (errno.EDQUOT, "full", "disk quota"),
        (errno.EIO, "broken", "Input/output error"),
    ],
)
def test_each_failure_is_named(tmp_path, monkeypatch, where, number, fault, words):
    monkeypatch.setattr(serve.os.path, "realpath", lambda path: "/home/train")
    with monkeypatch.context() as broken:
        failing(broken, number, where)
        found = facts(tmp_path / "x", MOUNTS)
    assert found["folder_fault"] == fault and words in found["folder_problem"]
    assert str(tmp_path / "x") in found["folder_problem"]
    assert not list(tmp_path.rglob(".probe*"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_names_its_owner():
    """As another user, in a process of its own: root may write anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home = Path(folder) / ".gpurun"
        home.mkdir(mode=0o755)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.setresuid(65534, 65534, 65534)
                os.write(writer, repr(probe.try_to_write(str(home), [])).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            said = stream.read()
        os.waitpid(pid, 0)
        assert "'denied'" in said and f"{home} belongs to root and has mode 0755" in said


@pytest.mark.parametrize("kind", ["a file", "a dangling link"])
def test_something_else_in_its_place(tmp_path, kind):
    path = tmp_path / ".gpurun"
    path.touch() if kind == "a file" else path.symlink_to("nowhere/at/all")
    found = facts(path)
    assert found["folder_fault"] == "broken" and "nothing can be written to" in found["folder_problem"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_is_no_broken_one(tmp_path, monkeypatch, number):
    failing(monkeypatch, number, "fsync")
    assert facts(tmp_path / "x")["folder_fault"] == ""


def test_a_file_system_that_hangs_costs_its_time_out(tmp_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(probe, "TRY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(probe, "try_to_write", lambda *_: over.wait(60) and ("", ""))
    found = facts(tmp_path / "x")
    over.set()
    assert found == {
        "folder": f"{tmp_path}/x",
        "folder_fault": "hangs",
        "folder_problem": f"the file system of {tmp_path}/x does not answer within 0.1 s",
    }


def test_a_link_that_waits_in_the_folder_is_not_written_through(tmp_path, monkeypatch):
    """Its name cannot be foreseen, and a file that exists is never opened."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(probe.os, "urandom", lambda _: b"7")
    (tmp_path / "x" / "jobs").mkdir(parents=True)
    (tmp_path / "x" / "jobs" / ".probe.37").symlink_to(victim)
    probe.try_to_write(str(tmp_path / "x"), [])
    assert victim.read_text() == "precious"


def test_an_agent_says_why_it_cannot_use_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"HOME": "/home/train"})

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(serve.os, "mkdir", read_only)
    with pytest.raises(serve.NotUsable, match=r"gpurun-\d+ is on a read-only file system"):
        serve.use(str(tmp_path))
    assert "GPURUN_FOLDER" not in os.environ
    monkeypatch.undo()
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(serve.NotUsable, match="nothing can be written to"):
        serve.use(str(tmp_path / "missing"))


def test_free_space_of_what_is_not_there_yet_is_that_of_its_disk(tmp_path):
    assert serve.free(str(tmp_path / "a" / "b"))[0] > 0
    assert serve.free("/proc/none/such")[0] is not None
    assert Path(tmp_path).exists()


def test_why_an_existing_folder_cannot_be_written_to(tmp_path, monkeypatch):
    assert probe.why_unwritable(str(tmp_path)) == "" and list(tmp_path.iterdir()) == []
    assert probe.why_unwritable(str(tmp_path / "none")) == "", "nothing is created: a fence has removed it"
    assert not (tmp_path / "none").exists()
    failing(monkeypatch, errno.EROFS, "open")
    assert "read-only file system" in probe.why_unwritable(str(tmp_path))
