"""The cache of parsed inventories: a shortcut that is never trusted more than the file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpurun.documents.plain import DocumentError
from gpurun.inventory import read
from gpurun.inventory.read import load_inventory
from gpurun.state import caches

TEXT = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {ib: {kind: infiniband, interface: ib0, hcas: [mlx5_0]}}
racks: {r1: {hosts: {"gpu-[0001-0300]": {nvlink: [[0, 1], [2, 3]], near_hca: [0], labels: {a: b}}}}}
pools: {vision: {reservation: 4, limit: null}}
ssh_config: config
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(caches, "is_settled", lambda *_: True)
    return tmp_path / "cache" / "gpurun" / "inventory"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.yaml"
    path.write_text(TEXT)
    return path


def test_what_comes_back_is_what_was_parsed(kept: Path, file: Path) -> None:
    parsed = load_inventory(file)
    (entry,) = kept.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    assert read.fetch(kept, read.cache_key(file, file.stat())) == parsed
    assert load_inventory(file) == parsed


def test_a_changed_file_is_parsed(kept: Path, file: Path) -> None:
    load_inventory(file)
    before = file.stat()
    file.write_text(TEXT.replace("gpus: 4", "gpus: 8"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_inventory(file).hosts[0].gpus == 8
    file.write_text("version: 2\n")
    with pytest.raises(DocumentError):
        load_inventory(file)


@pytest.mark.parametrize("damage", [b"", b"x", b"\x00" * 64])
def test_a_damaged_cache_is_passed_over(kept: Path, file: Path, damage: bytes) -> None:
    parsed = load_inventory(file)
    (entry,) = kept.iterdir()
    entry.write_bytes(damage)
    assert load_inventory(file) == parsed


def test_every_flipped_byte_is_noticed(kept: Path, file: Path) -> None:
    load_inventory(file)
    (entry,) = kept.iterdir()
    data = entry.read_bytes()
    key = read.cache_key(file, file.stat())
    for position in range(0, len(data), len(data) // 50):
        entry.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert read.fetch(kept, key) is None


def test_what_others_could_have_written_is_passed_over(kept: Path, file: Path, tmp_path: Path) -> None:
    load_inventory(file)
    (entry,) = kept.iterdir()
    key = read.cache_key(file, file.stat())
    entry.chmod(0o666)
    assert read.fetch(kept, key) is None
    entry.chmod(0o600)
    assert read.fetch(kept, key) is not None
    entry.rename(tmp_path / "moved")
    entry.symlink_to(tmp_path / "moved")
    assert read.fetch(kept, key) is None


def test_small_or_restless_files_are_not_kept(kept: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "is_settled", lambda *_: False)
    load_inventory(file)
    assert not kept.exists()
    monkeypatch.setattr(caches, "is_settled", lambda *_: True)
    file.write_text(TEXT.replace("0300", "0002"))
    time.sleep(0.01)
    load_inventory(file)
    assert not kept.exists()


def test_no_place_to_keep_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert len(load_inventory(file).hosts) == 300
    assert read.cache_folder({}) is None
    assert read.cache_folder({"XDG_CACHE_HOME": "relative"}) is None


def test_the_stamp_changes_with_a_module_of_any_package(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").touch()
        os.utime(tmp_path / name / "m.py", ns=(1, 1))
    before = caches.code_stamp(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "m.py", ns=(2, 2))
    assert caches.code_stamp(tmp_path / "a", tmp_path / "b") != before


def test_a_package_that_an_installer_replaces_has_a_stamp(tmp_path):
    """A command that somebody typed then ended with a traceback."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "gone.py").symlink_to("nowhere")
    assert caches.code_stamp(tmp_path / "empty", tmp_path / "gone", tmp_path / "link").endswith(" 0")


def test_the_converters_code_counts_too(tmp_path: Path) -> None:
    from gpurun.documents import convert

    (tmp_path / "i.yaml").touch()
    assert list(read.PACKAGES) == [Path(module.__file__).parent for module in (read, convert)]
    assert read.cache_key(tmp_path / "i.yaml", (tmp_path / "i.yaml").stat()).code == caches.code_stamp(*read.PACKAGES)
