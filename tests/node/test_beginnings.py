"""A file with holes costs what it stores, when the beginning of a copy is compared, too."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from gpurun.node.folder.beginnings import counted_beginning

BLOCK = 1 << 16
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


def made(path, *parts):
    """Make a file of (position, bytes); what is not written is a hole."""
    with path.open("wb") as file:
        for position, piece in parts:
            file.seek(position)
            file.write(piece)
    return path


def counted(path, size=None):
    with path.open("rb") as file:
        size = path.stat().st_size if size is None else size
        return list(counted_beginning(file.fileno(), size))


@pytest.mark.parametrize("size", [16 * GIB, TIB])
def test_a_long_hole_costs_no_time(tmp_path, size):
    some = os.urandom(MIB)
    path = made(tmp_path / "f", (0, some), (size // 2, some), (size - MIB, some))
    began_s = time.process_time()
    found = counted(path)
    assert time.process_time() - began_s < 1.0
    assert b"".join(piece for piece in found if not piece.startswith(b"hole:")) == 3 * some
    holes = [piece for piece in found if piece.startswith(b"hole:")]
    assert holes == [b"hole:%d;" % (size // 2 - MIB), b"hole:%d;" % (size // 2 - 2 * MIB)]


@pytest.mark.parametrize("extra", [0, 1, BLOCK - 1, 12345])
def test_it_depends_on_the_bytes_and_not_on_where_a_file_system_makes_holes(tmp_path, extra):
    """Such as one with larger blocks, one that stores zeros, and one that stores none."""
    parts = [(0, b"a" * 5000), (3 * BLOCK + 100, b"b"), (9 * BLOCK - 1, b"c" * 2), (12 * BLOCK + extra, b"d")]
    sparse = made(tmp_path / "sparse", *parts)
    whole = made(tmp_path / "whole", (0, sparse.read_bytes()))
    begins = made(tmp_path / "begins", (0, bytes(2 * BLOCK)), *parts)
    assert counted(sparse) == counted(whole) == counted(begins)
    for size in (1, 5000, BLOCK, 3 * BLOCK, 3 * BLOCK + 101, 10 * BLOCK, 12 * BLOCK + extra):
        assert counted(sparse, size) == counted(whole, size)
        read = hashlib.sha256(whole.read_bytes()[:size]).digest()
        for other in (size - 1, size + 1):
            assert counted(sparse, other) != counted(sparse, size) or read == b""
    changed = made(tmp_path / "changed", *parts[:2], (5 * BLOCK, b"x"), *parts[2:])
    assert counted(changed) != counted(sparse)


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_a_file_of_zeros_is_one_hole(tmp_path, size):
    stored = made(tmp_path / "stored", (0, bytes(size)))
    os.truncate(made(tmp_path / "hole"), size)
    assert counted(stored) == counted(tmp_path / "hole") == ([b"hole:%d;" % size] if size else [])
