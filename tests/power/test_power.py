"""The power of the head is cut anywhere: no GPU is in two leases, none in use is free, and nothing promised is lost.

A sample of the states that `power_disk` derives from a recording of real processes;
``benchmarks/bench_power.py`` tries many more, and a real file system.
"""

from __future__ import annotations

import random
from dataclasses import replace

import power_boot
import power_disk
import power_recording
import power_work
import pytest
from how_many import count
from power_recording import Op

JOBS = 9
BOOTED = count("power cuts")
SEARCHES, STATES = 15, 20
"""Without syncs of folders, about one state in eight shows the break. The first one that does ends the search."""
EXACT = ("world",)
AUDIT = "state/audit.jsonl"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not power_recording.available(), reason=power_recording.NEEDS),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What went on, the folder in which it did, and the inventory."""
    place = tmp_path_factory.mktemp("power")
    root = place / "root"
    root.mkdir()
    home, inventory = root / "state", place / "inventory.yaml"
    argv = power_work.argv(home, root / "world", seed=1, jobs=JOBS)
    operations = power_recording.record(argv, root, place / "strace", power_work.environ(home, inventory))
    return operations, root, inventory


def sample(operations, count, seed=1):
    """So many states, of cuts all over the recording."""
    chance = random.Random(seed)
    cuts = chance.sample(range(len(operations)), min(count, len(operations)))
    crashes = power_disk.distinct(power_disk.Disk(operations, exact=EXACT, seed=seed).crashes(cuts))
    return chance.sample(crashes, min(count, len(crashes)))


def broken(operations, count, place, seed=1):
    """What breaks, with where and how it was cut."""
    for crash, verdict in power_boot.boots(sample(operations, count, seed), place):
        for what in verdict.broken:
            yield crash.at, crash.lost, crash.bytes_are, what


def test_the_recording_is_what_happened(recorded):
    operations, root, _ = recorded
    replayed = power_disk.everything(operations, exact=EXACT)
    there = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    # Of two processes that append at the same moment, strace may tell of either first.
    lines = [sorted(files.pop(AUDIT).splitlines()) for files in (replayed.files, there)]
    assert lines[0] == lines[1]
    assert replayed.files == there
    assert set(replayed.folders) == {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()}


def test_nothing_is_broken_by_a_power_cut(recorded, tmp_path, monkeypatch):
    operations, _, inventory = recorded
    monkeypatch.setenv("GPURUN_INVENTORY", str(inventory))
    assert list(broken(operations, BOOTED, tmp_path)) == []


def test_a_sync_that_is_missing_is_found(recorded, tmp_path, monkeypatch):
    """The same recording as if nobody had synced files, or folders: the checks must see what that breaks."""
    operations, _, inventory = recorded
    monkeypatch.setenv("GPURUN_INVENTORY", str(inventory))
    folders = {0, *(op.node for op in operations if op.is_folder)}
    for unsynced, found in ((lambda node: node in folders, "is gone"), (lambda node: node not in folders, "damaged")):
        without = [op for op in operations if op.kind != "sync" or not unsynced(op.node)]
        seen = (what for seed in range(SEARCHES) for *_, what in broken(without, STATES, tmp_path, seed))
        assert any(found in what for what in seen), found


def op(kind, at, node, **more):
    return Op(kind, at, at, node, **more)


def crashes(*operations):
    found = power_disk.distinct(power_disk.Disk(operations, exact=(), seed=1).crashes())
    return [crash.files for crash in found if crash.at == len(operations)]


def test_what_is_not_synced_may_be_lost():
    made = [op("enter", 0, 1, name="x"), op("write", 1, 1, data=b"abc")]
    found = crashes(*made, op("sync", 2, 0))
    assert {} not in found
    assert {"x": b""} in found or {"x": b"\0\0\0"} in found or {"x": b"abc"} in found
    assert {} in crashes(*made, op("sync", 2, 1))
    assert crashes(*made, op("sync", 2, 1), op("sync", 3, 0)) == [{"x": b"abc"}]


def test_a_sync_counts_only_for_what_ended_before_it_began():
    made = [op("enter", 0, 1, name="x"), replace(op("sync", 2, 0), began=0)]
    assert {} in crashes(*made)


def test_a_name_that_is_replaced_is_one_or_the_other():
    old = [op("enter", 0, 1, name="x"), op("write", 1, 1, data=b"old"), op("sync", 2, 1), op("sync", 3, 0)]
    new = [op("enter", 4, 2, name="t"), op("write", 5, 2, data=b"new"), op("sync", 6, 2)]
    moved = crashes(*old, *new, op("move", 7, 2, name="x", source=(0, "t")))
    assert {frozenset(files.values()) for files in moved if "t" not in files} == {
        frozenset([b"old"]),
        frozenset([b"new"]),
    }
    assert all(files["x"] in (b"old", b"new") for files in moved)
