import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.node.agent import frames

headers = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text()), max_size=4)


@given(st.lists(st.tuples(headers, st.binary(max_size=300)), max_size=5), st.integers(1, 50))
def test_frames_survive_any_cutting(items, size):
    wire = b"".join(frames.encode(header, payload) for header, payload in items)
    decoder = frames.Decoder()
    out = [frame for start in range(0, len(wire), size) for frame in decoder.feed(wire[start : start + size])]
    assert [(frame.header, frame.payload) for frame in out] == items


@pytest.mark.parametrize(
    "wire",
    [
        b"not a frame at all, really",
        frames.PREFIX.pack(frames.MAX_HEADER + 1, 0),
        frames.PREFIX.pack(2, frames.MAX_PAYLOAD + 1),
        frames.PREFIX.pack(2, 0) + b"[]",
        frames.PREFIX.pack(3, 0) + b"{,}",
        frames.PREFIX.pack(2, 0) + b"\xff\xff",
        frames.PREFIX.pack(0, 0),
    ],
)
def test_what_is_no_frame(wire):
    with pytest.raises(frames.FrameError):
        list(frames.Decoder().feed(wire))


def test_a_frame_beyond_the_limits_is_not_sent():
    with pytest.raises(frames.FrameError):
        frames.encode({}, bytes(frames.MAX_PAYLOAD + 1))
    with pytest.raises(frames.FrameError):
        frames.encode({"a": "x" * (frames.MAX_HEADER + 1)})


def test_lone_surrogates_travel():
    text = b"caf\xe9".decode("utf-8", "surrogateescape")
    (frame,) = frames.Decoder().feed(frames.encode({"a": text}))
    assert frame.header["a"] == text
    assert json.loads(json.dumps(text)) == text


def test_pieces():
    assert [bytes(piece) for piece in frames.pieces(b"abcde", 2)] == [b"ab", b"cd", b"e"]
    assert list(frames.pieces(b"")) == []


def test_whole_frames_before_a_damaged_one_arrive():
    came = []
    with pytest.raises(frames.FrameError, match="not JSON"):
        came.extend(frames.Decoder().feed(frames.encode({}, b"x" * 999) + frames.PREFIX.pack(3, 0) + b"{,}"))
    assert [frame.payload for frame in came] == [b"x" * 999]


def test_what_a_frame_carried_outlives_the_next_one():
    decoder = frames.Decoder()
    data = bytearray(frames.encode({}, b"first") + frames.encode({}, b"second")[:-2])
    (frame,) = decoder.feed(data)
    assert decoder.waits
    data[:] = bytes(len(data))
    (other,) = decoder.feed(b"nd")
    assert (frame.payload, other.payload) == (b"first", b"second")
