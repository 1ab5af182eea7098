"""A job's code is what its submission saw, whatever becomes of the folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpurun.content.tree import scan
from gpurun.content.workdir import Code, write_code
from gpurun.errors import BadInput, StateDiskError, StateError
from gpurun.state.paths import StatePath


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def work(tmp_path):
    top = tmp_path / "work"
    (top / "pkg").mkdir(parents=True)
    (top / "train.py").write_text("v1")
    (top / "same").write_text("v1")
    (top / "empty").touch()
    (top / "link").symlink_to("/etc/passwd")
    (top / os.fsdecode(b"caf\xe9 '\n")).write_bytes(b"\xff\0\n")
    (top / "pkg/large").write_bytes(os.urandom(5 << 20))
    return top


@pytest.fixture
def kept(work, tmp_path):
    path = StatePath(tmp_path) / "code"
    write_code(path, scan(work))
    return path


def contents(tree):
    return {entry.path: b"".join(tree.content(digest)) for digest, entry in tree.files.items()}


def test_it_holds_what_was_there_when_the_folder_is_gone(work, kept):
    before = scan(work)
    entries, all_of_it = before.entries, contents(before)
    shutil.rmtree(work)
    code = Code(kept)
    assert code.entries == entries
    assert contents(code) == all_of_it
    assert code.digest == before.digest
    assert all_of_it[os.fsdecode(b"caf\xe9 '\n")] == b"\xff\0\n"


def test_nobody_else_reads_it(kept):
    assert kept.stat().st_mode & 0o777 == 0o600


def touched(work):
    os.utime(work / "train.py", (1, 1))


def written(work):
    (work / "train.py").write_text("v2")


def executable(work):
    (work / "train.py").chmod(0o755)


def led_elsewhere(work):
    (work / "link").unlink()
    (work / "link").symlink_to("/etc/shadow")


def moved(work):
    (work / "train.py").rename(work / "other.py")


@pytest.mark.parametrize(
    ("change", "is_same"),
    [(touched, True), (written, False), (executable, False), (led_elsewhere, False), (moved, False)],
)
def test_its_digest_names_all_but_the_times(work, change, is_same):
    before = scan(work).digest
    change(work)
    assert (scan(work).digest == before) is is_same


def test_a_file_that_changes_between_scan_and_copy_is_named(work, tmp_path):
    tree = scan(work)
    (work / "train.py").write_text("half")
    (work / "same").write_text("half")
    with pytest.raises(BadInput, match="changed while gpurun read it"):
        write_code(StatePath(tmp_path) / "code", tree)


@pytest.mark.parametrize(
    "first",
    [
        b"", b"\n", b"[1]\n", b"{}\n", b'[["a","file",420,0,"9","sha256:0",""]]\n', b'[["a"]]\n', b"\xff\n",
        b"[" * 200_000 + b"\n", b'[["a","file",420,0,1,"x","","more"]]\n',
    ],
)  # fmt: skip
def test_a_damaged_index_is_told(kept, first):
    Path(kept.plain).write_bytes(first)
    with pytest.raises(StateError, match="damaged"):
        Code(kept)


def test_a_damaged_content_is_told_and_never_sent_as_sound(kept):
    data = Path(kept.plain).read_bytes()
    for harmed in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data[: len(data) - (5 << 20)]):
        Path(kept.plain).write_bytes(harmed)
        with pytest.raises(StateError, match="differs from the submitted file"):
            contents(Code(kept))


def test_a_link_in_its_place_is_not_followed(work, kept, tmp_path):
    Path(kept.plain).rename(tmp_path / "elsewhere")
    Path(kept.plain).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="link"):
        Code(kept)


def test_a_full_disk_is_an_error_with_a_next_step(work, tmp_path, monkeypatch):
    monkeypatch.setattr("gpurun.state.durable.os.write", full)
    with pytest.raises(StateDiskError, match="disk of the state directory is full"):
        write_code(StatePath(tmp_path) / "code", scan(work))


def full(*_):
    raise OSError(28, "No space left on device")
