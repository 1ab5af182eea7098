"""Many small files, long names, and what the head remembers of them from copy to copy."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
from local_agents import Hosts
from outputs_world import outputs_job, removed_later

from gpurun.errors import StateError
from gpurun.state import syncing
from gpurun.supervisor.outputs import copy_outputs


@pytest.fixture
def world(tmp_path):
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def deep(tmp_path):
    yield from removed_later(tmp_path)


@pytest.fixture
def job(tmp_path, world):
    return outputs_job(tmp_path, world, "h1")


def files(job):
    return {str(path.relative_to(job.head)): path.read_bytes() for path in job.head.rglob("*") if path.is_file()}


def test_a_disk_that_fails_while_files_arrive_replaces_nothing_and_the_host_keeps_them(job, monkeypatch):
    def fails(_descriptor):
        raise OSError(errno.EIO, "I/O error")

    (job.host() / "step").write_text("1")
    copy_outputs(job)
    monkeypatch.setattr(syncing, "EARLY_SYNC_BYTES", 100)
    monkeypatch.setattr(syncing, "sync_file_system", fails)
    (job.host() / "step").write_text("22")
    with pytest.raises(StateError, match="disk of the state directory failed"):
        copy_outputs(job)
    assert files(job) == {"step": b"1"}
    assert (job.host() / "step").read_text() == "22"
    monkeypatch.undo()
    copy_outputs(job)
    assert files(job) == {"step": b"22"}


def test_names_too_long_for_one_frame_come_home(deep, world):
    """A list of 300 names of 180 KiB as JSON: more than the header of a frame may have."""
    job = outputs_job(deep, world, "h1")
    folder = os.open(job.host(), os.O_RDONLY)
    for _ in range(110):
        os.mkdir(b"\xff" * 250, dir_fd=folder)
        inner = os.open(b"\xff" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    for number in range(300):
        os.symlink("x", b"%d" % number, dir_fd=folder)
    os.close(folder)
    copy_outputs(job)
    found = subprocess.run(["find", job.head, "-type", "l"], capture_output=True, check=True)
    assert found.stdout.count(b"\n") == 300
