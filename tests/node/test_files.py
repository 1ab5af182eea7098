"""Small files on a host, with what only an attack or a mistake asks for."""

import os

import pytest

from gpurun.node.agent.frames import Call, OpError
from gpurun.node.folder import contents


def call_with(payload=b""):
    call = Call(1, lambda header, piece: None, True, b"")
    for start in range(0, len(payload), 1000):
        call.feed(payload[start : start + 1000])
    call.feed(None)
    return call


@pytest.mark.parametrize("path", ["relative", "", "/a/../b", "/a\0b", None, 3])
def test_paths_must_be_absolute_and_plain(path):
    for op in (
        contents.read_file,
        contents.stat_file,
        contents.rmtree,
        contents.df,
        contents.listdir,
        contents.mkdir,
        contents.write_file,
    ):
        with pytest.raises(OpError):
            op(call_with(), path)


def test_rmtree_takes_read_only_folders_and_leaves_what_links_lead_to(tmp_path):
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    kept.mkdir()
    (kept / "file").touch()
    (tree / "ro" / "deep").mkdir(parents=True)
    (tree / "ro" / "deep" / "f").touch()
    (tree / "link").symlink_to(kept)
    (tree / "ro" / "deep").chmod(0o500)
    (tree / "ro").chmod(0o500)
    assert contents.rmtree(call_with(), str(tree)) == {"removed": True}
    assert contents.rmtree(call_with(), str(tree)) == {"removed": False}
    assert (kept / "file").exists()


def test_write_replaces_a_link_and_leaves_no_half_file(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "f").symlink_to("target")
    contents.write_file(call_with(b"new"), f"{tmp_path}/f")
    assert (tmp_path / "target").read_text() == "old" and (tmp_path / "f").read_text() == "new"
    call = call_with(b"x")
    call.cancel()
    with pytest.raises(OpError):
        contents.write_file(call, f"{tmp_path}/g")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "target"]


def test_read_takes_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        contents.read_file(call_with(), f"{tmp_path}/pipe")
    with pytest.raises(OSError):
        contents.read_file(call_with(), str(tmp_path))
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        contents.read_file(call_with(), f"{tmp_path}/link")


def test_df_of_what_is_not_there_yet(tmp_path):
    assert contents.df(call_with(), f"{tmp_path}/not/yet")["free_bytes"] > 0
