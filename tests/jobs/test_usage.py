"""What a job's folder takes of the disk, whatever containers have left in it."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from gpurun.jobs.folder import DOOMED, Freed, each_counted_once, measure
from gpurun.node.folder import below
from gpurun.state.paths import StatePath


@pytest.fixture
def job(tmp_path):
    (tmp_path / "jobs/j-00000001").mkdir(parents=True)
    yield StatePath(tmp_path) / "jobs/j-00000001"
    below.remove_path(str(tmp_path / "jobs"))


def on_disk(*paths):
    return sum(path.lstat().st_blocks * 512 for path in paths)


def test_each_byte_has_a_kind(job):
    top = job.plain
    (top / "state.json").write_bytes(b"x" * 5000)
    (top / "log").write_bytes(b"x" * 70_000)
    for name in ("outputs", "outputs.replaced", f"{DOOMED}outputs-1"):
        (top / name).mkdir()
        (top / name / "model").write_bytes(b"x" * 100_000)
    found = measure(job)
    assert found.sizes["logs"] == on_disk(top / "log")
    assert found.sizes["other"] == on_disk(top, top / "state.json")
    assert found.sizes["outputs"] == 3 * on_disk(top / "outputs", top / "outputs/model")
    assert (found.files, found.unread) == (5, ())
    assert found.total == sum(found.sizes.values())
    assert found.outputs_alone().total == found.sizes["outputs"]


def test_a_size_that_lies_does_not_count(job):
    (job.plain / "outputs").mkdir()
    with (job.plain / "outputs/sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert measure(job).total < 1 << 20


def test_no_link_is_followed_and_no_pipe_is_opened(job, tmp_path):
    (tmp_path / "large").write_bytes(b"x" * (1 << 20))
    (tmp_path / "far").mkdir()
    (tmp_path / "far/large").write_bytes(b"x" * (1 << 20))
    outputs = job.plain / "outputs"
    outputs.mkdir()
    (outputs / "file").symlink_to(tmp_path / "large")
    (outputs / "folder").symlink_to(tmp_path / "far")
    (outputs / "loop").symlink_to("..")
    os.mkfifo(outputs / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(outputs, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    found = measure(job)
    assert found.total < 1 << 20
    assert (found.files, found.unread) == (5, ())


def test_a_job_that_is_a_link_is_not_measured(job, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far/large").write_bytes(b"x" * (1 << 20))
    (tmp_path / "jobs/j-00000002").symlink_to(tmp_path / "far")
    found = measure(StatePath(tmp_path) / "jobs/j-00000002")
    assert found.total == 0
    assert "is a link" in found.unread[0]


def test_names_of_any_bytes_and_paths_of_any_depth(job):
    outputs = os.fsencode(job.plain / "outputs")
    os.mkdir(outputs)  # noqa: PTH102 - names of any bytes
    with open(outputs + b"/\xff\n\x1b[2J", "wb") as file:  # noqa: PTH123 - likewise
        file.write(b"x" * 10_000)
    top = os.open(outputs, os.O_RDONLY)
    for _ in range(600):
        os.mkdir(b"d" * 100, dir_fd=top)
        inner = os.open(b"d" * 100, os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = inner
    os.close(top)
    found = measure(job)
    assert found.files == 1
    assert "longer than" in found.unread[0], "beyond what a path may have, it says so and goes on"
    assert found.total > 10_000


def test_a_file_of_several_names_counts_once_and_is_freed_with_the_last(job, tmp_path):
    other = StatePath(tmp_path) / "jobs/j-00000002"
    other.plain.mkdir()
    code = job.plain / "code"
    code.write_bytes(b"x" * 50_000)
    os.link(code, other.plain / "code")
    (job.plain / "outputs").mkdir()
    (job.plain / "outputs/a").write_bytes(b"x" * 30_000)
    os.link(job.plain / "outputs/a", job.plain / "outputs/b")
    one, two = measure(job), measure(other)
    first, second = each_counted_once([one, two])
    assert first.total == on_disk(job.plain, code, job.plain / "outputs", job.plain / "outputs/a")
    assert second.total == on_disk(other.plain)
    freed = Freed()
    assert freed.add(one) == first.total - on_disk(code)
    assert freed.add(two) == second.total + on_disk(code)


def test_a_file_that_has_a_name_outside_is_not_freed(job, tmp_path):
    (job.plain / "model").write_bytes(b"x" * 50_000)
    os.link(job.plain / "model", tmp_path / "mine")
    assert Freed().add(measure(job)) == on_disk(job.plain)


def test_a_tree_that_changes_meanwhile_confuses_nobody(job):
    outputs = job.plain / "outputs"
    outputs.mkdir()
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for number in range(20):
                (outputs / f"{number}/in").mkdir(parents=True, exist_ok=True)
                (outputs / f"{number}/in/file").write_bytes(b"x" * 4096)
            for number in range(20):
                below.remove_path(str(outputs / f"{number}"))
                (outputs / f"{number}").symlink_to("/usr")
            for number in range(20):
                (outputs / f"{number}").unlink()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert measure(job).total < 1 << 20
    finally:
        stop.set()
        thread.join()


def test_a_folder_that_is_gone_takes_nothing(job):
    assert measure(job.sibling("j-00000009")).total == 0


def test_what_cannot_be_read_is_named(job, monkeypatch):
    """As root, everything can be read: so the kernel's answer is played."""
    (job.plain / "outputs/closed").mkdir(parents=True)
    (job.plain / "outputs/closed/file").write_text("x")
    (job.plain / "outputs/open").write_text("x")
    closed = os.stat(job.plain / "outputs/closed").st_ino  # noqa: PTH116
    names_in = below.names_in

    def refused(folder):
        if os.fstat(folder).st_ino == closed:
            raise PermissionError(13, "Permission denied")
        return names_in(folder)

    monkeypatch.setattr(below, "names_in", refused)
    found = measure(job)
    monkeypatch.undo()
    assert found.unread == ("'outputs/closed': Permission denied",)
    assert found.files == 1
    assert found.sizes["outputs"] > 0
