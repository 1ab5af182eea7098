"""Tar streams in and out, with entries that only an attack or a mistake sends."""

import io
import os
import stat
import tarfile

import pytest

from gpurun.node import archive, files
from gpurun.node.call import Call, OpError


def call_with(payload=b"", sent=None):
    call = Call(1, lambda header, piece: sent.append(bytes(piece)) if sent is not None else None, True, b"")
    for start in range(0, len(payload), 1000):
        call.feed(payload[start : start + 1000])
    call.feed(None)
    call._room = 1 << 60
    return call


def tar_of(*entries):
    """(name, kind, content or link target, mode) … as a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        for name, kind, content, mode in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime = kind, mode, 1_000_000.25
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content.decode() if content else ""
                made.addfile(info)
    return out.getvalue()


def test_files_folders_links_and_modes_arrive(tmp_path):
    dest = tmp_path / "dest"
    name = "ünï 'a'\n$(x)"
    data = tar_of(
        ("d", tarfile.DIRTYPE, b"", 0o500),
        (f"d/{name}", tarfile.REGTYPE, os.urandom(100_000), 0o640),
        ("d/run", tarfile.REGTYPE, b"#!/bin/sh\n", 0o755),
        ("d/sym", tarfile.SYMTYPE, b"run", 0o777),
        ("up", tarfile.SYMTYPE, b"d/../d/run", 0o777),
        ("hard", tarfile.LNKTYPE, b"d/run", 0o755),
    )
    assert files.untar(call_with(data), str(dest)) == {"entries": 6, "bytes": 100_010}
    assert stat.S_IMODE((dest / "d").stat().st_mode) == 0o500
    assert stat.S_IMODE((dest / "d" / name).stat().st_mode) == 0o640
    assert (dest / "d/run").stat().st_mtime == 1_000_000.25
    assert str((dest / "d/sym").readlink()) == "run"
    assert (dest / "hard").stat().st_ino == (dest / "d/run").stat().st_ino


@pytest.mark.parametrize(
    "entry",
    [
        ("/etc/evil", tarfile.REGTYPE, b"x", 0o644),
        ("../evil", tarfile.REGTYPE, b"x", 0o644),
        ("a/../../evil", tarfile.REGTYPE, b"x", 0o644),
        ("..", tarfile.DIRTYPE, b"", 0o755),
        ("out", tarfile.SYMTYPE, b"/etc", 0o777),
        ("out", tarfile.SYMTYPE, b"../..", 0o777),
        ("out", tarfile.SYMTYPE, b"a/../../..", 0o777),
        ("hard", tarfile.LNKTYPE, b"../../etc/passwd", 0o644),
        ("hard", tarfile.LNKTYPE, b"/etc/passwd", 0o644),
        ("dev", tarfile.CHRTYPE, b"", 0o666),
        ("dev", tarfile.BLKTYPE, b"", 0o666),
        ("pipe", tarfile.FIFOTYPE, b"", 0o666),
    ],
)
def test_what_leads_out_or_is_no_file_is_refused(tmp_path, entry):
    dest = tmp_path / "a" / "dest"
    with pytest.raises(OpError) as caught:
        files.untar(call_with(tar_of(("ok", tarfile.REGTYPE, b"fine", 0o644), entry)), str(dest))
    assert caught.value.kind == "refused"
    assert not (tmp_path / "evil").exists() and not (tmp_path / "a" / "evil").exists()


def test_a_link_that_was_there_before_is_not_followed(tmp_path):
    outside, dest = tmp_path / "outside", tmp_path / "dest"
    outside.mkdir()
    dest.mkdir()
    (dest / "way").symlink_to(outside)
    with pytest.raises(OpError) as caught:
        files.untar(call_with(tar_of(("way/evil", tarfile.REGTYPE, b"x", 0o644))), str(dest))
    assert caught.value.kind == "refused"
    assert list(outside.iterdir()) == []
    (dest / "file").symlink_to(outside / "new")
    files.untar(call_with(tar_of(("file", tarfile.REGTYPE, b"x", 0o644))), str(dest))
    assert list(outside.iterdir()) == [] and (dest / "file").read_bytes() == b"x"


def test_set_user_id_bits_are_dropped(tmp_path):
    files.untar(call_with(tar_of(("su", tarfile.REGTYPE, b"x", 0o6755))), str(tmp_path / "d"))
    assert stat.S_IMODE((tmp_path / "d/su").stat().st_mode) == 0o755


@pytest.mark.parametrize("data", [b"garbage" * 200, tar_of(("f", tarfile.REGTYPE, b"x" * 5000, 0o644))[:3000]])
def test_a_broken_stream(tmp_path, data):
    with pytest.raises(OpError) as caught:
        files.untar(call_with(data), str(tmp_path / "d"))
    assert caught.value.kind == "bad-request"


def test_out_and_in_again(tmp_path):
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "big").write_bytes(os.urandom(700_000))
    (tree / "empty").touch()
    (tree / "link").symlink_to("a/big")
    sent = []
    archive.tar(call_with(sent=sent), str(tree))
    files.untar(call_with(b"".join(sent)), str(tmp_path / "copy"))
    assert (tmp_path / "copy/a/big").read_bytes() == (tree / "a/big").read_bytes()
    assert str((tmp_path / "copy/link").readlink()) == "a/big"
    assert (tmp_path / "copy/empty").read_bytes() == b""


@pytest.mark.parametrize("path", ["relative", "", "/a/../b", "/a\0b", None, 3])
def test_paths_must_be_absolute_and_plain(path):
    for op in (files.read, files.stat, files.rmtree, files.df, files.listdir, files.mkdir, files.write):
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
    assert files.rmtree(call_with(), str(tree)) == {"removed": True}
    assert files.rmtree(call_with(), str(tree)) == {"removed": False}
    assert (kept / "file").exists()


def test_write_replaces_a_link_and_leaves_no_half_file(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "f").symlink_to("target")
    files.write(call_with(b"new"), f"{tmp_path}/f")
    assert (tmp_path / "target").read_text() == "old" and (tmp_path / "f").read_text() == "new"
    call = call_with(b"x")
    call.cancel()
    with pytest.raises(OpError):
        files.write(call, f"{tmp_path}/g")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "target"]


def test_read_takes_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OpError):
        files.read(call_with(), f"{tmp_path}/pipe")
    with pytest.raises(OpError):
        files.read(call_with(), str(tmp_path))


def test_df_of_what_is_not_there_yet(tmp_path):
    assert files.df(call_with(), f"{tmp_path}/not/yet")["free_bytes"] > 0
