"""What the head has no room for stays on its host, whatever the host says of sizes; and nothing is lost."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
from outputs_world import outputs_job

from gpurun.errors import StateDiskError
from gpurun.node.agent.frames import OpError
from gpurun.node.agent.serve import reserve_of
from gpurun.node.folder.contents import Listed, listed
from gpurun.supervisor.outputs import outputs, plan
from gpurun.supervisor.outputs.arriving import Arriving
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.outputs import OutputsWatch, collect_outputs, copy_outputs
from gpurun.supervisor.outputs.plan import ENTRY_BYTES, OutputsRoom, cost_of

MIB, GIB = 1 << 20, 1 << 30


def limited(tmp_path, world, limit, *names):
    job = outputs_job(tmp_path, world, *(names or ("h1",)))
    job.outputs = HeadCopy(job.folder, limit)
    return job


def put(folder, **sizes):
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))


def names(job):
    return {path.name for path in job.head.rglob("*")}


@pytest.mark.parametrize(
    ("disk", "reserve"),
    [(0, 0), (2 * GIB, GIB // 2), (10 * GIB, GIB), (100 * GIB, 5 * GIB), (400 * GIB, 20 * GIB), (9 << 50, 20 * GIB)],
)
def test_the_reserve_is_a_share_within_bounds(disk, reserve):
    assert reserve_of(disk) == reserve


@pytest.mark.parametrize(("size", "cost"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (1 << 62, 1 << 62)])
def test_an_entry_costs_whole_blocks(size, cost):
    assert cost_of(size) == cost


def test_what_is_over_the_limit_stays_and_is_named_and_smaller_files_come(tmp_path, world):
    job = limited(tmp_path, world, 2 * MIB)
    put(job.host(), a=MIB, b=4 * MIB, c=MIB // 2)
    assert collect_outputs(job) == {"h1"}
    assert names(job) == {"a", "c"}
    left = job.record.outputs_left
    assert left.hosts == ("h1",)
    assert left.first == ("'b' does not fit: outputs_limit is 2 MiB",)
    assert f"`gpurun outputs {job.folder.id}` fetches them" in left.words(job.folder.id)
    assert (job.host() / "b").stat().st_size == 4 * MIB, "the host keeps it"


def test_an_older_version_stays_until_the_newer_one_fits(tmp_path, world):
    job = limited(tmp_path, world, 2 * MIB)
    put(job.host(), model=MIB)
    copy_outputs(job)
    old = (job.head / "model").read_bytes()
    put(job.host(), model=3 * MIB)
    (unfit,) = copy_outputs(job)
    assert (unfit.path, unfit.no_room) == ("model", True)
    assert (job.head / "model").read_bytes() == old
    put(job.host(), model=MIB + 1)
    assert copy_outputs(job) == []
    assert (job.head / "model").read_bytes() == (job.host() / "model").read_bytes()
    assert collect_outputs(job) == set()


def test_what_the_head_has_counts_and_files_of_all_hosts_do(tmp_path, world):
    job = limited(tmp_path, world, 3 * MIB, "h1", "h2")
    put(job.host("h1"), one=2 * MIB)
    copy_outputs(job)
    put(job.host("h2"), two=2 * MIB, three=MIB // 2)
    assert collect_outputs(job) == {"h2"}
    assert names(job) == {"one", "three"}
    assert not job.host("h1").exists(), "all of its outputs are on the head"
    assert (job.host("h2") / "two").exists()


def test_files_of_one_host_in_a_folder_of_another_that_does_not_fit_are_not_lost(tmp_path, world):
    job = limited(tmp_path, world, 2 * ENTRY_BYTES, "h1", "h2")
    put(job.host("h1"), a=1, b=1)
    for host in ("h1", "h2"):
        (job.host(host) / "folder").mkdir()
    put(job.host("h2") / "folder", theirs=10)
    assert collect_outputs(job) >= {"h2"}
    assert (job.host("h2") / "folder/theirs").exists()
    assert names(job) == {"a", "b"}


def test_names_of_one_file_cost_once_and_stay_together(tmp_path, world):
    job = limited(tmp_path, world, 2 * MIB)
    put(job.host(), a=MIB, large=3 * MIB)
    os.link(job.host() / "a", job.host() / "again")
    os.link(job.host() / "large", job.host() / "large again")
    assert collect_outputs(job) == {"h1"}
    assert names(job) == {"a", "again"}
    assert job.record.outputs_left.count == 2


def test_holes_cost_nothing(tmp_path, world):
    job = limited(tmp_path, world, MIB)
    with (job.host() / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        file.write(b"x" * 1000)
    assert collect_outputs(job) == set()
    assert (job.head / "sparse").stat().st_size == 1 << 40


def test_empty_files_folders_and_links_are_not_free(tmp_path, world):
    job = limited(tmp_path, world, 40 * ENTRY_BYTES)
    for number in range(20):
        (job.host() / f"d{number:02}").mkdir()
        (job.host() / f"f{number:02}").touch()
        (job.host() / f"l{number:02}").symlink_to("x" * 4000)
    (job.host() / "d19" / b"\xff\n".decode("utf-8", "surrogateescape")).write_text("x")
    assert collect_outputs(job) == {"h1"}
    assert len(names(job)) <= 40
    assert job.record.outputs_left.count >= 21


def disk(monkeypatch, free, size=100 * GIB):
    """Play a disk of the head: what it has free, which a test may change."""
    played = SimpleNamespace(free=free)
    monkeypatch.setattr(plan, "disk_of", lambda _: (played.free, size))
    return played


def test_a_disk_that_is_nearly_full_gets_no_more(tmp_path, world, monkeypatch):
    job = limited(tmp_path, world, None)
    put(job.host(), a=MIB, b=4 * MIB)
    played = disk(monkeypatch, 5 * GIB + 2 * MIB)
    assert collect_outputs(job) == {"h1"}
    assert names(job) == {"a"}
    assert job.record.outputs_left.first == ("'b' does not fit: the head keeps 5 GiB of its disk free",)
    played.free = 6 * GIB
    assert collect_outputs(job) == set()
    assert names(job) == {"a", "b"}
    assert job.record.outputs_left is None


def test_a_disk_that_fills_while_files_arrive_stops_the_copy_and_loses_nothing(tmp_path, world, monkeypatch):
    job = limited(tmp_path, world, None)
    put(job.host(), a=MIB, b=4 * MIB, c=10)
    asked = iter(range(1000))
    monkeypatch.setattr(plan, "disk_of", lambda _: (50 * GIB if next(asked) < 2 else 5 * GIB, 100 * GIB))
    assert collect_outputs(job) == {"h1"}
    assert names(job) == {"a"}
    assert job.record.outputs_left.count == 2
    assert {path.name for path in job.host().iterdir()} == {"a", "b", "c"}


def test_a_size_that_lies_brings_no_more_than_the_limit(tmp_path, world, monkeypatch):
    """The list says that each file has one byte."""
    job = limited(tmp_path, world, 2 * MIB)
    put(job.host(), a=MIB, b=4 * MIB, c=MIB)
    told = outputs.list_outputs

    def lies(agent, job_id, **options):
        said = told(agent, job_id, **options)
        small = {path: entry._replace(size=1) for path, entry in said.entries.items()}
        return type(said)(said.host, small, said.unbrought)

    monkeypatch.setattr(outputs, "list_outputs", lies)
    assert collect_outputs(job) == {"h1"}
    assert sum(path.stat().st_size for path in job.head.iterdir()) <= 2 * MIB
    assert (job.host() / "b").stat().st_size == 4 * MIB


def test_a_file_that_says_it_is_all_holes_brings_no_more_than_the_limit(tmp_path, world, monkeypatch):
    job = limited(tmp_path, world, 2 * MIB)
    put(job.host(), b=4 * MIB)
    monkeypatch.setattr(Listed, "data", property(lambda _: 0))
    assert collect_outputs(job) == {"h1"}
    assert not job.head.exists() or not list(job.head.iterdir())


@pytest.mark.parametrize("stored", [-5, 1 << 70, "x", None, 1.5, True])
def test_what_is_no_number_of_bytes_is_refused_or_counts_as_all(stored):
    header = {"p": "x", "k": "file", "s": 10, "i": [1, 2], "b": stored}
    try:
        assert listed(header).data == 10
    except OpError as error:
        assert error.kind == "refused"


def test_room_counts_down(tmp_path, monkeypatch):
    disk(monkeypatch, 50 * GIB)
    top = os.open(tmp_path, os.O_RDONLY)
    room = OutputsRoom(top, 3 * ENTRY_BYTES)
    entry = Listed("x", "file", size=ENTRY_BYTES)
    room.hold(entry)
    assert (room.take(entry), room.take(entry)) == ("", "")
    assert room.take(entry) == "does not fit: outputs_limit is 0.01172 MiB"
    assert room.refuses(entry, ENTRY_BYTES, 10) == ""
    assert room.refuses(entry, ENTRY_BYTES + 1, 10) != ""
    os.close(top)


def test_what_a_copy_that_broke_off_left_is_room_for_the_next(tmp_path, monkeypatch):
    disk(monkeypatch, 5 * GIB)
    top = os.open(tmp_path, os.O_RDONLY)
    entry = Listed("x", "file", size=MIB)
    assert OutputsRoom(top, None).take(entry) != ""
    room = OutputsRoom(top, None, came_before=MIB)
    assert (room.take(entry), room.take(entry) != "") == ("", True)
    os.close(top)


def test_files_that_come_from_a_copy_that_broke_off_count_as_what_they_are(tmp_path, world, monkeypatch):
    """A host that lies and breaks off, again and again, would fill the disk bit by bit."""
    job = limited(tmp_path, world, 2 * MIB)
    put(job.host(), a=MIB, b=3 * MIB)
    monkeypatch.setattr(Arriving, "held", lambda *_: 3 * MIB)
    monkeypatch.setattr(Arriving, "remove", lambda *_: None)
    monkeypatch.setattr(Arriving, "resume", lambda *_, **__: True)
    (left, _) = copy_outputs(job)
    assert left.no_room
    assert names(job) == set()


def test_a_gang_that_runs_is_told_once(tmp_path, world):
    job = limited(tmp_path, world, MIB)
    job.spec.outputs_every_s = 0.01
    put(job.host(), large=2 * MIB)
    stop = threading.Event()
    (thread,) = OutputsWatch(job, stop).threads()
    thread.start()
    for count in range(5):
        put(job.host(), large=2 * MIB + count)
        stop.wait(0.2)
    stop.set()
    thread.join()
    assert job.notes == [
        "gpurun does not copy some outputs to the head while the job runs: 'large' does not fit: outputs_limit is 1 MiB"
    ]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), StateDiskError("the disk is full")])
def test_copies_outlive_a_failure_and_say_it_once(tmp_path, world, monkeypatch, error):
    job = limited(tmp_path, world, MIB)
    job.spec.outputs_every_s = 0.0
    stop, tries = threading.Event(), []

    def copy(*_, **__):
        tries.append("a try")
        if len(tries) == 3:
            stop.set()
        raise error

    monkeypatch.setattr("gpurun.supervisor.outputs.outputs.copy_outputs", copy)
    OutputsWatch(job, stop)._follow()
    assert len(tries) == 3
    assert [note.rpartition(": ")[0] for note in job.notes] == ["the head's copy of the outputs is not up to date"]


def test_a_limit_of_nothing_brings_nothing(tmp_path, world):
    job = limited(tmp_path, world, 0)
    put(job.host(), a=1)
    assert collect_outputs(job) == {"h1"}
    assert not list(job.head.iterdir())
