import os
import zlib
from types import SimpleNamespace

import pytest

from gpurun.content.seats import NOT_TRIED, SLOW_BYTES_S, Packing, pack
from gpurun.node.agent.frames import OpError
from gpurun.node.transfer.spool import CHUNK, Remembered, unpack_bytes

MIB = 1 << 20
LINK = SLOW_BYTES_S / 2


def test_what_shrinks_is_packed_and_what_does_not_is_not():
    text = b"the same line again\n" * 10_000
    packed = pack(text)
    assert packed is not None and len(packed) < len(text) / 10 and unpack_bytes(packed) == text
    assert pack(os.urandom(100_000)) is None


def test_what_is_no_packed_chunk():
    too_long = [zlib.compress(bytes(size)) for size in (CHUNK + 1, 300 * MIB)]
    for packed in (b"", b"garbage", *too_long, zlib.compress(b"cut")[:-3]):
        with pytest.raises(OpError) as caught:
            unpack_bytes(packed)
        assert caught.value.kind == "corrupt"


class OneBlob:
    digest = "sha256:x"


def test_a_host_remembers_the_last_packs_only():
    memory = Remembered(limit_bytes=100)
    for index in range(10):
        memory.put("sha256:x", index, b"p" * 30)
    assert [index for index in range(10) if memory.get(OneBlob, index, b"")] == [7, 8, 9]


def test_the_head_packs_each_chunk_once_and_only_while_it_is_on(monkeypatch):
    made = []
    monkeypatch.setattr("gpurun.content.seats.pack", lambda piece: made.append(1) or b"packed")
    head = Packing()
    assert head.get(OneBlob, 0, b"x") is None
    head.link_bytes_s = SLOW_BYTES_S
    assert head.get(OneBlob, 0, b"x") is None
    head.link_bytes_s = LINK
    assert head.get(OneBlob, 0, b"x") == head.get(OneBlob, 0, b"x") == b"packed" and len(made) == 1


@pytest.mark.parametrize(("took_s", "packed"), [(0.0, None), (2 * CHUNK / LINK, b"packed")])
def test_after_a_chunk_that_hardly_shrinks_or_takes_long_the_next_ones_are_not_tried(monkeypatch, took_s, packed):
    clock, tried = [0.0], []

    def slow(piece):
        tried.append(clock[0])
        clock[0] += took_s
        return packed

    monkeypatch.setattr("gpurun.content.seats.pack", slow)
    monkeypatch.setattr("gpurun.content.seats.time", SimpleNamespace(monotonic=lambda: clock[0]))
    head = Packing()
    head.link_bytes_s = LINK
    found = [head.get(OneBlob, index, bytes(CHUNK)) for index in range(2 * NOT_TRIED + 3)]
    assert len(tried) == 3
    assert [index for index, one in enumerate(found) if one] == (
        [0, NOT_TRIED + 1, 2 * NOT_TRIED + 2] if packed else []
    )


def test_chunks_that_shrink_quickly_are_all_compressed(monkeypatch):
    monkeypatch.setattr("gpurun.content.seats.time", SimpleNamespace(monotonic=lambda: 1.0))
    head = Packing()
    head.link_bytes_s = LINK
    assert all(head.get(OneBlob, index, bytes(CHUNK)) for index in range(NOT_TRIED))
