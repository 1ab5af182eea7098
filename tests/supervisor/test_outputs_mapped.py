"""Files that are written through a mapping, on a disk: there the kernel notes when a mapped page is written again."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from outputs_world import outputs_job

from gpurun.node.folder import contents
from gpurun.supervisor.outputs.outputs import collect_outputs, copy_outputs


@pytest.fixture
def tmp_path():
    with TemporaryDirectory(prefix="gpurun-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def job(tmp_path, world):
    return outputs_job(tmp_path, world, "h1")


def test_a_change_through_a_mapping_after_a_live_read_gives_other_marks(tmp_path):
    for size in (100, 200_000):
        path = tmp_path / f"{size}"
        path.write_bytes(bytes(size))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            mapping[0] = 1
            time.sleep(0.1)
            descriptor = os.open(path, os.O_RDONLY)
            items = list(contents.content(0, descriptor, os.fstat(descriptor), is_live=True))
            marks = items[0][0].get("whole", items[-1][0].get("after"))
            assert marks == contents.marks_of(os.fstat(descriptor)), "nobody changed it"
            mapping[0] = 2
            assert marks != contents.marks_of(os.fstat(descriptor))
            os.close(descriptor)


def test_a_change_through_a_mapping_during_a_live_read_is_seen(tmp_path):
    path = tmp_path / "array.npy"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0] = 1
        time.sleep(0.1)
        descriptor = os.open(path, os.O_RDONLY)
        items = []
        for item in contents.content(0, descriptor, os.fstat(descriptor), is_live=True):
            items.append(item)
            if item[1]:
                mapping[0] = mapping[0] + 1
        os.close(descriptor)
    assert items[0][0]["marks"] != items[-1][0]["after"]


def test_what_is_written_through_a_mapping_after_a_copy_comes_home(job):
    """The kernel gives a mapped file its time when a page is written to first, not for what is written after that."""
    path = job.host() / "array.npy"
    path.write_bytes(bytes(200_000))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        for place in (0, 5000, 199_999):
            mapped[place] = 1
        time.sleep(0.1)
        copy_outputs(job)
        for place in (0, 5000, 199_999):
            mapped[place] = 2
        assert collect_outputs(job) == set()
    came = (job.head / "array.npy").read_bytes()
    assert [came[place] for place in (0, 5000, 199_999)] == [2, 2, 2]
