"""What a build leaves in folders whose modes keep their owner out, as a user without rights sees it."""

from __future__ import annotations

import os

import pytest
from fake_engine import BASE, FakeEngine, ensure
from outputs_world import as_stranger

from gpurun.content import build
from gpurun.errors import BadInput, HostNotReady

STRANGER = os.geteuid() != 0
mine = pytest.mark.skipif(not STRANGER, reason="test_as_a_stranger runs it, as a user without rights")


@pytest.mark.skipif(STRANGER, reason="runs the others")
def test_as_a_stranger():
    as_stranger(__file__)


def shut(folder):
    """Leave what a package's own code can leave: a folder that nobody may change or read, with a file in it."""
    for name, mode in (("read-only", 0o555), ("closed", 0)):
        (folder / name).mkdir()
        (folder / name / "file").write_text("half")
        (folder / name).chmod(mode)


@mine
@pytest.mark.parametrize("code", [0, 1])
def test_a_build_with_read_only_folders_leaves_nothing(wanted, cache, code):
    engine = FakeEngine(lambda folders: shut(folders["/run/gpurun-build/scratch"]), code)
    if code:
        with pytest.raises(BadInput):
            ensure(wanted, engine)
    else:
        ensure(wanted, engine)
    assert list(cache.iterdir()) == [] and engine.containers == {}


@mine
def test_nothing_of_a_killed_build_comes_into_the_next_one(wanted, cache):
    clean, engine = FakeEngine(), FakeEngine()
    wanted_layers = ensure(wanted, clean)[0].layers
    for key in (build.planned(wanted, BASE, engine, {"PIP_CONFIG_FILE": "/dev/null"}).key, "another"):
        (cache / key / "environment").mkdir(parents=True)
        shut(cache / key / "environment")
    assert ensure(wanted, engine)[0].layers == wanted_layers
    assert list(cache.iterdir()) == []


@mine
def test_what_a_killed_build_left_and_nobody_can_remove_is_named_and_not_used(wanted, cache, monkeypatch):
    engine = FakeEngine()
    left = cache / build.planned(wanted, BASE, engine, {"PIP_CONFIG_FILE": "/dev/null"}).key
    (left / "environment").mkdir(parents=True)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr("gpurun.node.folder.below.remove_path", refuse)
    with pytest.raises(
        HostNotReady, match="cannot remove the folder of an earlier build: Operation not permitted"
    ) as caught:
        ensure(wanted, engine)
    assert caught.value.where == str(left) and engine.builds == 0
