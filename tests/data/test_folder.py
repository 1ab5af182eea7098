"""What a folder is as a data set: everything in it, with a digest that is the same for everybody."""

import os
import socket

import pytest

from gpurun.content import data, tree
from gpurun.content.data import hashes_of, read_folder
from gpurun.content.tree import scan
from gpurun.errors import BadInput
from gpurun.node.folder import below


def test_modes_and_times_do_not_change_the_digest(top):
    before = read_folder(top).digest
    (top / "big").chmod(0o600)
    os.utime(top / "big", (1, 1))
    assert read_folder(top).digest == before
    (top / "big").chmod(0o700)
    assert read_folder(top).digest != before


def test_what_has_not_changed_is_not_read_again(top, monkeypatch):
    monkeypatch.setattr(tree, "RACY_S", -1.0)
    first = read_folder(top)
    hashes = hashes_of(first)
    monkeypatch.setattr(data, "_digest", lambda *_: pytest.fail("a file is read again"))
    monkeypatch.setattr(data.DataFolder, "chunk_hashes", lambda *_: pytest.fail("the folder is read again"))
    assert read_folder(top).entries == first.entries
    assert hashes_of(read_folder(top)) == hashes


def test_a_link_that_leads_out_is_refused(top):
    for target in ("/etc", "../x", "sub/../../x", ".."):
        (top / "out").symlink_to(target)
        with pytest.raises(BadInput, match="outside the data set"):
            read_folder(top)
        (top / "out").unlink()
    (top / "sub/in").symlink_to("../big")
    read_folder(top)


def test_what_is_no_file_is_refused_and_nobody_waits_for_it(top):
    os.mkfifo(top / "pipe")
    with pytest.raises(BadInput, match="is a FIFO"):
        read_folder(top)
    (top / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(top / "s"))
        with pytest.raises(BadInput, match="is a socket"):
            read_folder(top)


def test_no_folder(top):
    for path in (top / "big", top / "none", top / ("x" * 300)):
        with pytest.raises(BadInput):
            read_folder(path)


def test_a_file_that_changed_since_it_was_read_gives_no_hashes(top):
    tree = read_folder(top)
    (top / "big").write_bytes(b"other")
    with pytest.raises(BadInput, match="changed while gpurun read it"):
        hashes_of(tree)


def test_digests_of_code_and_of_data_are_those_of_every_earlier_gpurun(tmp_path, monkeypatch):
    """People and jobs that wait pin data sets by them, and hosts know sets by them: they must never change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    top = tmp_path / "set"
    (top / "pkg/empty").mkdir(parents=True)
    files = {
        "train.py": (b"print(1)\n", 0o640),
        "run.sh": (b"#!/bin/sh\n", 0o751),
        "caf\udce9 '\n": (b"\xff\0\n", 0o644),
    }
    files["pkg/zeros"] = b"a" * 65536 + bytes(200_000) + b"b", 0o600
    for name, (content, mode) in files.items():
        (top / name).write_bytes(content)
        (top / name).chmod(mode)
    (top / "pkg").chmod(0o750)
    (top / "pkg/empty").chmod(0o755)
    (top / "link").symlink_to("pkg/zeros")
    assert scan(top).digest == "sha256:6f6618f37d970b94b535fda558fa04dca0fe3f59da324bcc976b431271a71d12"
    assert read_folder(top).digest == "sha256:deddf1d25ef07055d23244eb4a345d6d1a07a37b1efba3d916b0777c1156ea3a"


@pytest.mark.parametrize("read", [scan, read_folder])
def test_a_file_that_grows_while_it_is_read_is_named(top, monkeypatch, read):
    (top / "log").write_bytes(b"x" * 100_000)
    real = below.blocks

    def growing(descriptor, size):
        yield from real(descriptor, size)
        with (top / "log").open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(below, "blocks", growing)
    with pytest.raises(BadInput, match="log: the file changed while gpurun read it"):
        read(top)
