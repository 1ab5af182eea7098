from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.errors import StateDiskError
from gpurun.state import durable
from gpurun.state.durable import GrowingFile
from gpurun.state.paths import StatePath


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def test_lines_come_once_and_whole(path):
    file = GrowingFile(StatePath(path.parent) / path.name)
    assert list(file.lines()) == []
    path.write_bytes(b"one\n\ntw")
    assert list(file.lines()) == [b"one", b""]
    assert list(file.lines()) == []
    with path.open("ab") as stream:
        stream.write(b"o\nthree\r\x0b\n")
    assert list(file.lines()) == [b"two", b"three\r\x0b"]


def test_a_reader_that_stops_goes_on_with_the_next_line(path):
    path.write_bytes(b"aaa\nbbb\nccc\n")
    file = GrowingFile(StatePath(path.parent) / path.name)
    assert next(iter(file.lines())) == b"aaa"
    assert list(file.lines()) == [b"bbb", b"ccc"]


def test_a_hole_longer_than_any_line_is_passed(path, monkeypatch):
    monkeypatch.setattr(durable, "PIECE_BYTES", 64)
    path.write_bytes(b"one\n" + bytes(1000) + b"\ntwo\n")
    found = list(GrowingFile(StatePath(path.parent) / path.name).lines())
    assert found[0] == b"one" and found[-1] == b"two"
    assert sum(map(len, found)) < 1000


def test_a_disk_that_fails_is_an_error_for_people_not_an_empty_file():
    unreadable = StatePath(Path("/proc/self")) / "mem"  # a regular file, whose first page nothing is mapped to
    with pytest.raises(StateDiskError, match="cannot be read: the disk of the state directory failed"):
        list(GrowingFile(unreadable).lines())
    with pytest.raises(StateDiskError, match="cannot be read"):
        unreadable.read_bytes()
