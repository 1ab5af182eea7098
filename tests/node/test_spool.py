"""Blobs while they arrive: closed under those that write and read, and removed under those that begin."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gpurun.node.agent.frames import OpError
from gpurun.node.transfer import spool
from gpurun.node.transfer.spool import CHUNK, Blob, Spool


@pytest.fixture
def content():
    return os.urandom(2 * CHUNK)


@pytest.fixture
def blob(tmp_path, content):
    hashes = b"".join(hashlib.sha256(content[at : at + CHUNK]).digest() for at in (0, CHUNK))
    descriptor = os.open(tmp_path / "blob", os.O_RDWR | os.O_CREAT)
    made = Blob("sha256:" + "0" * 64, len(content), hashes, descriptor)
    yield made
    made.close()


class Pause:
    """In the place of a system call on a descriptor: somebody closes it and uses its number again just before."""

    def __init__(self, monkeypatch, name, reused, closing):
        self._call, self._reused, self._closing = getattr(os, name), reused, closing
        self.opened = []
        monkeypatch.setattr(spool.os, name, self)

    def __call__(self, descriptor, *rest):
        self._closing.start()
        self._closing.join(0.2)
        self.opened += [os.open(self._reused, os.O_RDWR) for _ in range(3)]
        return self._call(descriptor, *rest)


@pytest.fixture
def innocent(tmp_path):
    """Another file, which gets the number of a descriptor that was just closed."""
    path = tmp_path / "innocent"
    path.write_bytes(bytes(3 * CHUNK))
    return path


@pytest.mark.parametrize("index", [0, 1])
def test_a_late_chunk_lands_in_no_other_file(blob, content, innocent, monkeypatch, index):
    closing = threading.Thread(target=blob.close)
    pause = Pause(monkeypatch, "pwrite", innocent, closing)
    blob.write(index, content[index * CHUNK : (index + 1) * CHUNK])
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    for descriptor in pause.opened:
        os.close(descriptor)
    assert innocent.read_bytes() == bytes(3 * CHUNK)


def test_a_late_reader_gets_no_other_file(blob, content, innocent, monkeypatch):
    blob.write(0, content[:CHUNK])
    closing = threading.Thread(target=blob.close)
    pause = Pause(monkeypatch, "preadv", innocent, closing)
    assert bytes(blob.read_into(0, memoryview(bytearray(CHUNK)))) == content[:CHUNK]
    closing.join(LIMIT_S)
    for descriptor in pause.opened:
        os.close(descriptor)


def test_nothing_is_written_or_read_once_it_is_closed(blob, content):
    blob.close()
    blob.close()
    with pytest.raises(OpError) as caught:
        blob.write(0, content[:CHUNK])
    assert caught.value.kind == "closed"
    with pytest.raises(OpError):
        blob.read_into(0, memoryview(bytearray(CHUNK)))
    with pytest.raises(OpError), blob.file():
        pass
    assert not blob.holds(0)


def test_closing_waits_for_nobody_who_hangs_for_good(blob, monkeypatch):
    """A disk that hangs keeps its own descriptor, and nothing else."""
    monkeypatch.setattr(spool, "CLOSE_WAIT_S", 0.05)
    with blob.file() as descriptor:
        blob.close()
        os.fstat(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def folders(tmp_path):
    top = tmp_path / "spool"
    return top, Spool(str(top), "one")


@pytest.mark.parametrize("moment", ["lstat", "open"])
def test_a_transfer_that_ends_beside_one_that_begins_breaks_nothing(tmp_path, monkeypatch, moment):
    """Sweeping looks at files that others remove."""
    top, ending = folders(tmp_path)
    digests = [f"sha256:{number:064x}" for number in range(3)]
    blobs = [ending.open(digest, 0, b"") for digest in digests]
    real = getattr(os, moment)

    def while_others_end(path, *rest, **more):
        for blob, digest in zip(blobs, digests, strict=True):
            blob.close()
            ending.forget(digest)
        return real(path, *rest, **more)

    monkeypatch.setattr(spool.os, moment, while_others_end)
    monkeypatch.setattr(spool, "STALE_S", -1.0)
    Spool(str(top), "two")
    assert spool.sweep(str(top), -1.0) == 0
    monkeypatch.undo()
    assert [name for name in os.listdir(top) if not name.endswith(".part")] == []


def test_a_file_that_goes_while_it_is_opened_is_made_anew(tmp_path, monkeypatch):
    top, one = folders(tmp_path)
    digest = "sha256:" + "1" * 64
    left = one.open(digest, 0, b"")
    left.close()
    real, gone = os.stat, []

    def stat(path, *rest, **more):
        if str(path).endswith(".part") and not gone:
            gone.append(path)
            Path(path).unlink()
        return real(path, *rest, **more)

    monkeypatch.setattr(spool.os, "stat", stat)
    Spool(str(top), "two").open(digest, 0, b"").close()
    assert gone


def test_a_file_that_is_gone_is_forgotten_twice(tmp_path, monkeypatch):
    top, one = folders(tmp_path)
    digest = "sha256:" + "2" * 64
    one.open(digest, 0, b"").close()
    monkeypatch.setattr(spool.os.path, "exists", lambda _path: True)
    (top / ("2" * 64 + ".part")).unlink()
    one.forget(digest)
    one.forget(digest)


def test_one_transfer_may_have_the_same_blob_only_once_and_a_second_gets_its_own(tmp_path):
    top, one = folders(tmp_path)
    digest = "sha256:" + "3" * 64
    first, second = one.open(digest, 0, b""), Spool(str(top), "two").open(digest, 0, b"")
    assert len(os.listdir(top)) == 2
    first.close()
    second.close()
