"""Many small files, long names, and what the head remembers of them from copy to copy."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess

import pytest
from outputs_world import outputs_job, removed_later, shape

from gpurun.errors import HostFailure, StateError
from gpurun.node.agent import frames
from gpurun.state import durable
from gpurun.supervisor.outputs.listing import KnownRows, list_outputs, outputs_of
from gpurun.supervisor.outputs.outputs import copy_outputs


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
    monkeypatch.setattr(durable, "EARLY_SYNC_BYTES", 100)
    monkeypatch.setattr(durable, "sync_file_system", fails)
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


# -- lists of many files ------------------------------------------------------------------------------------


def fill(folder, count, chance):
    """Files with names of all kinds in a few folders."""
    for number in range(count):
        where = folder / f"epoch {number // 30}"
        where.mkdir(exist_ok=True)
        name = chance.choice([b"step-%d", b"%d\xff\n", "größe %d".encode(), b"\x1b[31m%d", b"'%d\""]) % number
        (where / os.fsdecode(name)).write_bytes(chance.randbytes(chance.randrange(40)))


def change(folder, chance):
    """Change something: a file's bytes, size, mode or name, a folder, a link."""
    paths = sorted(folder.rglob("*"))
    path = chance.choice(paths)
    for what in chance.sample(range(5), 5):
        if what == 0 and path.is_file():
            path.write_bytes(chance.randbytes(len(path.read_bytes())))
        elif what == 1 and path.is_file():
            path.unlink()
        elif what == 2:
            path.rename(path.with_name(f"moved {chance.random()}"))
        elif what == 3 and path.is_dir():
            shutil.rmtree(path)
            path.symlink_to("nowhere")
        elif what == 4 and path.is_file():
            path.chmod(0o640)
        else:
            continue
        return


@pytest.mark.parametrize("seed", range(5))
def test_a_list_that_tells_only_what_has_changed_is_the_list(job, seed):
    chance = random.Random(seed)
    fill(job.host(), 300, chance)
    agent, before = job.links.agent("h1"), None
    for _ in range(6):
        after = list_outputs(agent, job.lease.job, before=before)
        assert after == list_outputs(agent, job.lease.job)
        copy_outputs(job)
        assert shape(job.head) == shape(job.host())
        before = after
        for _ in range(3):
            change(job.host(), chance)
        fill(job.host(), 30, chance)


def test_a_second_list_is_short(job, monkeypatch):
    fill(job.host(), 2000, random.Random(1))
    agent, came = job.links.agent("h1"), [0]
    stream = agent.stream

    def counted(op, **params):
        for reply in stream(op, **params):
            came[-1] += len(reply.payload)
            yield reply

    monkeypatch.setattr(agent, "stream", counted)
    first = list_outputs(agent, job.lease.job)
    came.append(0)
    second = list_outputs(agent, job.lease.job, before=first)
    assert second == first
    assert came[1] < came[0] / 15
    path = next(path for path in job.host().rglob("*") if path.is_file())
    assert second.entries[str(path.relative_to(job.host()))].size == path.stat().st_size
    path.write_bytes(b"changed in its place")
    came.append(0)
    third = list_outputs(agent, job.lease.job, before=second)
    assert third != second
    assert came[2] < came[0] / 10


def test_a_folder_of_many_files_is_listed_in_parts(job):
    for number in range(2500):
        (job.host() / f"{number:04}").touch()
    agent = job.links.agent("h1")
    first = list_outputs(agent, job.lease.job)
    assert sorted(first.rows) == [("", 0), ("", 1000), ("", 2000)]
    (job.host() / "1500").unlink()
    second = list_outputs(agent, job.lease.job, before=first)
    assert second.rows["", 0] is first.rows["", 0]
    assert set(first.entries) - set(second.entries) == {"1500"}


ROW = ["a", 0o644, 5, 3, 6, 7, -1]
FOLDER = frames.Frame({"p": "d", "k": "dir", "m": 0o755, "t": 1}, b"")


def rows(*said, **more):
    return frames.Frame({"in": "d", "at": 0, **more}, json.dumps(said).encode())


def test_rows_are_files_of_their_folder():
    found = outputs_of("h1", [FOLDER, rows(ROW, ["b\udcff", *ROW[1:]])], {})
    assert list(found.entries) == ["d", "d/a", "d/b\udcff"]
    assert found.entries["d/a"].marks == [3, 5, 6, 7]


@pytest.mark.parametrize(
    "said",
    [
        [rows(ROW)], [FOLDER, rows(ROW, ROW)], [FOLDER, rows(ROW), rows(ROW, at=9)], [FOLDER, rows(ROW, at="0")],
        [FOLDER, rows(ROW, **{"in": ".."})], [FOLDER, rows(ROW, **{"in": 7})], [FOLDER, rows(ROW, **{"in": "d/../d"})],
        [FOLDER._replace(header={"p": "d", "k": "link", "to": "/etc", "t": 1}), rows(ROW)],
        [FOLDER, rows(["", *ROW[1:]])], [FOLDER, rows(["..", *ROW[1:]])], [FOLDER, rows([".", *ROW[1:]])],
        [FOLDER, rows(["x/y", *ROW[1:]])], [FOLDER, rows(["/etc/passwd", *ROW[1:]])], [FOLDER, rows(["a\0", *ROW[1:]])],
        [FOLDER, rows(["x" * 256, *ROW[1:]])], [FOLDER, rows(["ö" * 200, *ROW[1:]])],
        [FOLDER, rows(["\ud800", *ROW[1:]])],
        [FOLDER, rows([7, *ROW[1:]])], [FOLDER, rows(["a", 0o4755, *ROW[2:]])], [FOLDER, rows(["a", True, *ROW[2:]])],
        [FOLDER, rows([*ROW[:3], -1, *ROW[4:]])], [FOLDER, rows([*ROW[:3], 1 << 80, *ROW[4:]])],
        [FOLDER, rows([*ROW[:2], "5", *ROW[3:]])], [FOLDER, rows(ROW[:-1])], [FOLDER, rows([*ROW, 0])],
        [FOLDER, frames.Frame({"in": "d", "at": 0}, b"[" * 100_000)],
        [FOLDER, frames.Frame({"in": "d", "at": 0}, b"{}")],
        [FOLDER, frames.Frame({"in": "d", "at": 0}, b"\xff[]")], [FOLDER, frames.Frame({"in": "d", "at": 0}, b"")],
        [FOLDER, rows(ROW, same=1, at=1)], [FOLDER, rows(ROW, same=1, **{"in": ""})],
    ],
)  # fmt: skip
def test_rows_that_cannot_be(said):
    known = {("d", 0): KnownRows("0", ())}
    with pytest.raises(HostFailure, match="list of outputs that no folder can have"):
        outputs_of("h1", said, known)
