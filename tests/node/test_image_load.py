"""Images that only hold layers while a ship is under way: those of a ship that was killed go with the next one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from contextlib import contextmanager

import pytest

from gpurun.node import images
from gpurun.node.agent.frames import Call, OpError

LAYERS = [f"sha256:{number:064x}" for number in range(3)]
IMAGE = {"id": "sha256:" + "a" * 64, "names": ["i:1"], "layers": LAYERS}


class Engine:
    """In the place of Docker: remembers what was removed."""

    removed: list[str]

    def __init__(self, *_: object) -> None:
        pass

    def expect(self, method, path, _statuses, _what):
        assert method == "DELETE" and path.endswith("?noprune=1")
        self.removed.append(path.removeprefix("/images/").removesuffix("?noprune=1"))


@pytest.fixture(autouse=True)
def removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "ImageApi", Engine)
    monkeypatch.setattr(Engine, "removed", [], raising=False)
    return Engine.removed


def fails(error):
    def fail(*_, **__):
        raise error

    return fail


def loading(monkeypatch, count=1):
    """A ship that has loaded its lower layers ahead of the rest."""
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": LAYERS}}).encode()
    made = images.Loading(Call(1, lambda *_: None, False, b""), "t", IMAGE, "graph", [], config)
    monkeypatch.setattr(made, "_load", lambda *_: None)
    made._load_prefix(count)
    return made


def temporary():
    return [ident for ident, entry in images.read_shipped().items() if entry.get("temporary")]


@contextmanager
def as_if_by(process, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(images.os, "getpid", lambda: process.pid)
        yield


@pytest.fixture
def other_agent():
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_what_a_ship_that_was_killed_left_is_known_and_goes_with_the_next(removed, monkeypatch):
    child = subprocess.Popen(["sleep", "600"])
    try:
        with as_if_by(child, monkeypatch):
            loading(monkeypatch, 2)
    finally:
        child.kill()
        child.wait()
    (left,) = temporary()
    mine = loading(monkeypatch)
    assert len(temporary()) == 2
    mine.remove_temporary()
    assert left in removed and len(removed) == 2 and temporary() == []


def test_another_ship_that_goes_on_keeps_its_own(removed, monkeypatch):
    other = loading(monkeypatch, 2)
    mine = loading(monkeypatch)
    mine.remove_temporary()
    assert len(removed) == 1 and len(temporary()) == 1
    other.remove_temporary()
    assert temporary() == []


def test_a_pid_that_is_another_process_by_now_keeps_nothing(removed, monkeypatch):
    loading(monkeypatch)
    with images.change() as record:
        (entry,) = record.values()
        entry["by"] = [os.getpid(), entry["by"][1] + 1]
    images.Loading(Call(1, lambda *_: None, False, b""), "t", IMAGE, "graph", [], b"").remove_temporary()
    assert len(removed) == 1 and temporary() == []


@pytest.mark.parametrize("by", [None, [], "x", [1], [1, 2, 3], ["a", "b"], [-1, 0], [1 << 80, 1], {}, [True, False]])
def test_a_note_that_is_none_keeps_nothing(removed, monkeypatch, by):
    loading(monkeypatch)
    with images.change() as record:
        (entry,) = record.values()
        entry["by"] = by
    images.Loading(Call(1, lambda *_: None, False, b""), "t", IMAGE, "graph", [], b"").remove_temporary()
    assert temporary() == []


class EngineToPrune(Engine):
    """Docker with every recorded image."""

    def get(self, _path):
        return []

    def image(self, name):
        return None if name in self.removed else {"Id": name, "Size": 1, "RepoTags": [], "RepoDigests": []}

    def expect(self, _method, path, _statuses, _what):
        self.removed.append(path.removeprefix("/images/").removesuffix("?noprune=1"))


def test_prune_keeps_what_a_running_ship_has_loaded(removed, monkeypatch):
    monkeypatch.setattr(images, "ImageApi", EngineToPrune)
    ship = loading(monkeypatch)
    assert images.prune(Call(1, lambda *_: None, False, b""), []) == [] and removed == []
    assert len(temporary()) == 1
    with images.change() as record:
        (entry,) = record.values()
        entry["by"] = [os.getpid(), entry["by"][1] + 1]
    (gone,) = images.prune(Call(1, lambda *_: None, False, b""), [])
    assert removed == [gone["id"]] == ship._temporary and temporary() == []


def test_prune_removes_every_image_where_the_record_cannot_be_written(removed, monkeypatch):
    """People prune because a disk is full, and the record may lie on it: later it names images that are gone."""
    monkeypatch.setattr(images, "ImageApi", EngineToPrune)
    record_one("a")
    record_one("b")
    with monkeypatch.context() as full:
        full.setattr(images.tempfile, "mkstemp", fails(OSError(errno.ENOSPC, "No space left on device")))
        gone = images.prune(Call(1, lambda *_: None, False, b""), [])
    assert [one["id"] for one in gone] == removed == ["a", "b"]
    assert images.prune(Call(1, lambda *_: None, False, b""), []) == [] and images.read_shipped() == {}


def test_prune_removes_nothing_while_it_cannot_see_who_needs_it(removed, monkeypatch):
    monkeypatch.setattr(images, "ImageApi", EngineToPrune)
    record_one("a")
    monkeypatch.setattr(images.fcntl, "flock", fails(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(OSError, match="Too many"):
        images.prune(Call(1, lambda *_: None, False, b""), [])
    assert removed == []


BASE = "sha256:" + "b" * 64
ASKED = {**IMAGE, "facts": {}}


def record_one(ident=BASE, **more):
    with images.change() as record:
        record[ident] = {"local": ident, "names": [], "layers": LAYERS[:2], "shipped_s": 1.0, **more}


class EngineWithBase(EngineToPrune):
    """Docker with the base image."""

    def get(self, path):
        if path == "/info":
            return {"Driver": "overlay2"}
        return [{"Id": BASE}] if path.startswith("/images/json") and BASE not in self.removed else []

    def image(self, name):
        found = super().image(name) if name == BASE else None
        return found and {**found, "RootFS": {"Layers": LAYERS[:2]}}


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(images, "ImageApi", EngineWithBase)
    return Call(1, lambda *_: None, False, b"")


def test_prune_keeps_layers_on_which_a_running_ship_counts(call, removed, monkeypatch, other_agent):
    record_one()
    with as_if_by(other_agent, monkeypatch):
        assert images.ask_image(call, ASKED)["have"] == LAYERS[:2]
    assert images.prune(call, []) == [] and removed == []
    assert [one["needed"] for one in images.listing(call)] == [True]
    other_agent.kill()
    other_agent.wait()
    assert [one["id"] for one in images.prune(call, [])] == [BASE] and removed == [BASE]


def test_prune_keeps_an_image_that_a_job_was_told_is_there(call, removed, monkeypatch, other_agent):
    record_one(IMAGE["id"])
    record_one(BASE)
    monkeypatch.setattr(images, "find_image", lambda *_: IMAGE["id"])
    with as_if_by(other_agent, monkeypatch):
        assert images.ask_image(call, ASKED)["local"] == IMAGE["id"]
    images.prune(call, [])
    assert removed == [BASE] and list(images.read_shipped()) == [IMAGE["id"]]


def test_a_layer_on_which_another_ship_counts_outlives_the_ship_that_loaded_it(call, removed, monkeypatch, other_agent):
    mine = loading(monkeypatch, 2)
    with as_if_by(other_agent, monkeypatch):
        images.ask_image(call, ASKED)
    mine.remove_temporary()
    assert removed == [] and len(temporary()) == 1
    other_agent.kill()
    other_agent.wait()
    mine.remove_temporary()
    assert removed == mine._temporary and temporary() == []


def test_a_ship_that_has_its_image_needs_no_other_one(removed, monkeypatch, other_agent):
    record_one()
    with as_if_by(other_agent, monkeypatch):
        images.need(lambda ident, _: ident == BASE)
    assert images.is_needed(images.read_shipped()[BASE])
    with as_if_by(other_agent, monkeypatch):
        assert not images.is_needed(images.read_shipped()[BASE])  # it may prune itself
        images.need(lambda ident, _: ident == IMAGE["id"])
    assert not images.is_needed(images.read_shipped()[BASE])


@pytest.mark.parametrize(
    "noted", [None, 1, "x", {}, [], [None], [[1]], [["a", 1]], [[True, 1]], [[-1, 0]], [[1 << 80, 1]]]
)
def test_a_damaged_note_of_need_keeps_nothing(call, removed, noted):
    record_one(needed_by=noted)
    assert [one["id"] for one in images.prune(call, [])] == [BASE]


def test_a_host_that_can_keep_no_note_answers_as_before(call, monkeypatch):
    record_one()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images.tempfile, "mkstemp", full)
    assert images.ask_image(call, ASKED)["have"] == LAYERS[:2]


def test_an_error_leaves_the_record_as_it_was(monkeypatch, tmp_path):
    record_one()
    before, files = images.read_shipped(), sorted(os.listdir(images.shipped_folder()))
    with pytest.raises(TypeError), images.change() as record:
        record["x"] = object()
    assert images.read_shipped() == before and sorted(os.listdir(images.shipped_folder())) == files


def test_images_that_were_shipped_stay(removed, monkeypatch):
    with images.change() as record:
        record["sha256:" + "b" * 64] = {"local": "x", "names": [], "layers": LAYERS, "shipped_s": 1.0}
    loading(monkeypatch).remove_temporary()
    assert list(images.read_shipped()) == ["sha256:" + "b" * 64] and len(removed) == 1


@pytest.mark.parametrize(
    ("image", "engine", "is_refused"),
    [
        ("amd64", "x86_64", False), ("arm64", "aarch64", False), ("arm64", "x86_64", True), ("amd64", "aarch64", True),
        ("riscv64", "riscv64", False), ("", "x86_64", False), ("amd64", None, False),
    ],
)  # fmt: skip
def test_an_image_for_other_machines_is_refused_before_it_is_sent(image, engine, is_refused):
    asked = {"facts": {"Architecture": image}}
    if is_refused:
        with pytest.raises(OpError, match=f"the image is for {image}, this host runs"):
            images._check_architecture(asked, {"Architecture": engine})
    else:
        images._check_architecture(asked, {"Architecture": engine})
