"""What a folder is as a data set: everything in it, with a digest that is the same for everybody."""

import os
import socket

import pytest

from gpurun.content import data, tree
from gpurun.content.data import hashes_of, read_folder
from gpurun.errors import BadInput


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
