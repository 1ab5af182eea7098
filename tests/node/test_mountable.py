"""Which folders of a host a container can mount, and what the host says of the others."""

from __future__ import annotations

import os

import pytest

from gpurun.node import data
from gpurun.node.agent.frames import OpError
from gpurun.supervisor.start import NO_FOLDER

MOUNT = "30 1 0:40 / {} rw - {} /etc/auto.data rw\n"


def test_a_folder_can_be_mounted_and_everything_else_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "lo\nop").symlink_to("lo\nop")
    paths = [str(tmp_path), str(tmp_path / "file"), str(tmp_path / "no"), str(tmp_path / "lo\nop")]
    found = data.folders(None, paths)
    assert list(found) == paths[1:]
    assert [found[path] in NO_FOLDER for path in paths[1:]] == [True, True, False]


@pytest.mark.parametrize(("kind", "is_missing"), [("autofs", False), ("ext4", True)])
def test_what_an_automounter_does_not_mount_is_not_missing(tmp_path, monkeypatch, kind, is_missing):
    """Its file server is off: the kernel then says that there is no such folder."""
    monkeypatch.setattr(data.serve, "mounts", lambda: [MOUNT.format(tmp_path, kind)])
    (said,) = data.folders(None, [str(tmp_path / "imagenet")]).values()
    assert (said in NO_FOLDER) is is_missing and os.strerror(2) in said


def test_a_path_that_is_not_absolute_is_refused():
    with pytest.raises(OpError):
        data.folders(None, ["data"])
