"""A disk that fills within a write: the kernel writes a part of it, and tells. No store keeps that under the digest."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import tarfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.content.export import import_save
from gpurun.errors import HostNotReady
from gpurun.node import data
from gpurun.node.agent import frames
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.folder.below import Entry, timed_digest_of
from gpurun.node.transfer import sets
from gpurun.node.transfer.sets import packed

SIZE = 100_000
CONTENT = b"\x01" + os.urandom(SIZE - 1)
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
FULL_AT = (1, 4096, SIZE // 2, SIZE - 1)


@contextmanager
def disk(room):
    """Let no file become larger: a write beyond is cut there, as on a full disk, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def pieces(size):
    return [CONTENT[at : at + size] for at in range(0, SIZE, size)]


def liars(folder):
    """Return the files under a digest that is not theirs."""
    named = [path for path in Path(folder).rglob("*") if len(path.name) == 64 and path.is_file()]
    return [path for path in named if hashlib.sha256(path.read_bytes()).hexdigest() != path.name]


@pytest.mark.parametrize("room", FULL_AT)
@pytest.mark.parametrize("piece", [SIZE, SIZE // 3])
def test_the_head_s_layer_store(store, tmp_path, room, piece):
    for keep in (store.put, lambda said: store.add(DIGEST, lambda: said)):
        with disk(room), pytest.raises(HostNotReady, match="gpurun cannot write to the head's layer store"):
            keep(pieces(piece))
        assert store.find(DIGEST) is None and liars(tmp_path) == []
    assert store.add(DIGEST, lambda: pieces(piece)).path.read_bytes() == CONTENT


@pytest.mark.parametrize("room", FULL_AT)
def test_layers_that_docker_save_wrote(store, tmp_path, room):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("a/layer.tar")
        entry.size = SIZE
        archive.addfile(entry, io.BytesIO(CONTENT))
    with disk(room), pytest.raises(HostNotReady, match="gpurun cannot write to the head's layer store"):
        import_save([stream.getvalue()], store, store._folder)
    assert store.find(DIGEST) is None and liars(tmp_path) == []


@pytest.mark.parametrize("room", FULL_AT)
def test_the_code_of_a_job_on_a_host(monkeypatch, tmp_path, room):
    monkeypatch.setenv("HOME", str(tmp_path))
    row = Entry("f", "file", 0o644, 0, SIZE, DIGEST)
    call, name = Call(1, lambda *_: None, False, packed([row])), timed_digest_of([row])
    assert data.begin_set(call, "t", name, store=sets.CODE, direct=SIZE) == [DIGEST]
    with disk(room), pytest.raises(OSError, match="too large"):
        data.put(Call(1, lambda *_: None, False, frames.encode({"d": DIGEST}, CONTENT)), "t")
    with pytest.raises(OpError, match="has not arrived"):
        data.finish(call, "t")
    data.drop(call, "t")
    assert data.use(call, [name], store=sets.CODE) == [] and liars(tmp_path) == []
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == [".lock"]
