"""A file with holes costs what it stores, and its digest depends on the bytes alone: of outputs and of data sets."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from gpurun.node.folder.below import BLOCK, ContentDigest, blocks

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


def made(path, *parts):
    """Make a file of (position, bytes); what is not written is a hole."""
    with path.open("wb") as file:
        for position, piece in parts:
            file.seek(position)
            file.write(piece)
    return path


def read(path, size=None):
    with path.open("rb") as file:
        return list(blocks(file.fileno(), path.stat().st_size if size is None else size))


def digest(path, size=None):
    whole = ContentDigest()
    for zeros, piece in read(path, size):
        whole.add(zeros, piece)
    return str(whole)


@pytest.mark.parametrize("size", [16 * GIB, TIB])
def test_a_long_hole_costs_no_time(tmp_path, size):
    some = os.urandom(MIB)
    path = made(tmp_path / "f", (0, some), (size // 2, some), (size - MIB, some))
    began_s = time.process_time()
    found = read(path)
    assert digest(path).startswith("sha256-holes:")
    assert time.process_time() - began_s < 1.0
    assert b"".join(piece for _, piece in found) == 3 * some
    assert sum(zeros for zeros, _ in found) == size - 3 * MIB and len(found) < 60


@pytest.mark.parametrize("extra", [0, 1, BLOCK - 1, 12345])
def test_it_depends_on_the_bytes_and_not_on_where_a_file_system_makes_holes(tmp_path, extra):
    """Such as one with larger blocks, one that stores zeros, and one that stores none."""
    parts = [(0, b"a" * 5000), (3 * BLOCK + 100, b"b"), (9 * BLOCK - 1, b"c" * 2), (12 * BLOCK + extra, b"d")]
    sparse = made(tmp_path / "sparse", *parts)
    whole = made(tmp_path / "whole", (0, sparse.read_bytes()))
    begins = made(tmp_path / "begins", (0, bytes(2 * BLOCK)), *parts)
    assert digest(sparse) == digest(whole) == digest(begins)
    for size in (1, 5000, BLOCK, 3 * BLOCK, 3 * BLOCK + 101, 10 * BLOCK, 12 * BLOCK + extra):
        assert digest(sparse, size) == digest(whole, size)
        assert digest(sparse, size) not in (digest(sparse, size - 1), digest(sparse, size + 1))
    changed = made(tmp_path / "changed", *parts[:2], (5 * BLOCK, b"x"), *parts[2:])
    assert digest(changed) != digest(sparse)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7])
def test_a_file_of_zeros_is_one_hole_but_for_its_end(tmp_path, size):
    stored = made(tmp_path / "stored", (0, bytes(size)))
    os.truncate(made(tmp_path / "hole"), size)
    for path in (stored, tmp_path / "hole"):
        found = read(path)
        assert sum(zeros for zeros, _ in found) == size - size % BLOCK
        assert b"".join(piece for _, piece in found) == bytes(size % BLOCK)
    assert digest(stored) == digest(tmp_path / "hole")


def test_the_digest_of_a_file_without_a_block_of_zeros_is_its_sha256(tmp_path):
    """So what gpurun knew of files before still holds."""
    content = os.urandom(3 * BLOCK + 5) + bytes(BLOCK) + b"x"  # zeros, but no whole block
    assert digest(made(tmp_path / "f", (0, content))) == "sha256:" + hashlib.sha256(content).hexdigest()


def test_no_other_bytes_look_like_a_hole(tmp_path):
    """Neither what describes a hole, nor the same bytes with the hole elsewhere."""
    first, second = os.urandom(BLOCK), os.urandom(BLOCK)
    contents = [
        first + bytes(BLOCK) + second, first + second + bytes(BLOCK), bytes(BLOCK) + first + second, first + second,
        first + bytes(BLOCK) + second + bytes(BLOCK), first + bytes(2 * BLOCK) + second,
        first + b"%d+%d;" % (BLOCK, BLOCK) + second, first + b"hole:%d;" % BLOCK + second,
        bytes(BLOCK), bytes(2 * BLOCK), bytes(BLOCK) + b"\0", b"\0", b"",
    ]  # fmt: skip
    found = [digest(made(tmp_path / str(number), (0, content))) for number, content in enumerate(contents)]
    assert len(set(found)) == len(contents)
