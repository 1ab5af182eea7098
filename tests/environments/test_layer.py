"""The layer is made of the files alone."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile

import pytest

from gpurun.content.build import MTIME_S, layer_tar

TARGET = "/opt/gpurun/environment"


@pytest.fixture
def folder(write, tmp_path):
    write({
        "e/bin/tool": "#!x", "e/lib/a'; echo \"b\".py": "1", "e/lib/ünï\n.py": "22",
        f"e/lib/{'n' * 180}/{'m' * 180}": "3", "e/empty": "", "e/large": b"x" * 3_000_001,
        b"e/raw\xff".decode(errors="surrogateescape"): "4",
    })  # fmt: skip
    (tmp_path / "e/bin/tool").chmod(0o6700)
    (tmp_path / "e/bin/python").symlink_to("/usr/bin/python3")
    (tmp_path / "e/out").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "e/pipe")
    return tmp_path / "e"


def test_same_files_give_the_same_bytes_whenever_they_were_made(folder):
    one = hashlib.sha256(b"".join(layer_tar(folder, TARGET))).hexdigest()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (1, 1))
            path.chmod(path.stat().st_mode | 0o066)
    assert hashlib.sha256(b"".join(layer_tar(folder, TARGET))).hexdigest() == one


def test_all_of_it_is_there_once_below_its_target_and_harmless(folder):
    with tarfile.open(fileobj=io.BytesIO(b"".join(layer_tar(folder, TARGET)))) as tar:
        entries = {entry.name: entry for entry in tar}
        assert tar.extractfile(entries["opt/gpurun/environment/large"]).read() == b"x" * 3_000_001
    assert all(name.startswith("opt") and ".." not in name.split("/") for name in entries)
    assert {(e.uid, e.gid, e.mtime) for e in entries.values()} == {(0, 0, MTIME_S)}
    assert {oct(e.mode) for e in entries.values() if e.isreg()} == {"0o644", "0o755"}
    assert entries["opt/gpurun/environment/bin/tool"].mode == 0o755
    assert entries["opt/gpurun/environment/out"].linkname == "/etc/shadow"  # a link, whose file nobody has read
    assert "opt/gpurun/environment/pipe" not in entries and "opt/gpurun/environment/lib/ünï\n.py" in entries
    assert list(entries)[:3] == ["opt", "opt/gpurun", "opt/gpurun/environment"]
