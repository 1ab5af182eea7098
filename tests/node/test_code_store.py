"""A host's store of code, which jobs share: one job does not remove what another has been told is there."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from gpurun.node.agent.frames import Call
from gpurun.node.transfer import tree

SIZE = 10_000


@pytest.fixture(autouse=True)
def room_for_one_and_a_half(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tree, "SHARE", 1.5 * SIZE / shutil.disk_usage(tmp_path).total)
    (tmp_path / "cache/gpurun/files").mkdir(parents=True)


def call(payload=b""):
    made = Call(1, lambda *_: None, False, payload)
    made.feed(payload)
    made.feed(None)
    return made


def digest_of(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def put(content, age_s=0.0):
    digest = digest_of(content)
    making = tree._Making(digest)
    making.write(content)
    making.keep()
    age(digest, age_s)
    return digest


def age(digest, age_s):
    used_s = Path(tree._place(digest)).stat().st_mtime - age_s
    os.utime(tree._place(digest), (used_s, used_s))


def made(folder, digest):
    tree.make(call(), str(folder), [("f", "file", 0o644, 0, SIZE, digest, "")])
    return (folder / "f").read_bytes()


def test_what_a_job_was_told_is_there_stays_until_its_folder_is_made(tmp_path):
    mine, others = os.urandom(SIZE), os.urandom(SIZE)
    first = put(mine, age_s=100_000)
    assert tree.lacking(call(), [first]) == []
    assert made(tmp_path / "b", put(others)) == others
    assert made(tmp_path / "a", first) == mine


def test_what_has_just_come_for_a_job_stays_too(tmp_path):
    mine, others = os.urandom(SIZE), os.urandom(SIZE)
    first = put(mine)
    assert made(tmp_path / "b", put(others)) == others
    assert made(tmp_path / "a", first) == mine


def test_what_nobody_has_asked_for_lately_goes(tmp_path):
    old = put(os.urandom(SIZE), age_s=2 * tree.NEEDED_S)
    new = put(os.urandom(SIZE))
    made(tmp_path / "b", new)
    assert tree.lacking(call(), [old, new]) == [old]


def test_a_clock_that_was_set_back_keeps_nothing_for_ever(tmp_path):
    ahead = put(os.urandom(SIZE), age_s=-1e6)
    later = put(os.urandom(SIZE), age_s=-2e6)
    made(tmp_path / "b", later)
    assert tree.lacking(call(), [ahead]) == [ahead]
