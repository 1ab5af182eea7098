import os
import zlib

import pytest

from gpurun.content.relay import GAIN, MEASURE_S, WARM_UP_S, PackingSample, PackingTrial, promises
from gpurun.node.agent.frames import OpError
from gpurun.node.transfer.spool import CHUNK, Packing, Remembered, pack, unpack_bytes

MIB = 1 << 20


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
    monkeypatch.setattr("gpurun.node.transfer.spool.pack", lambda piece: made.append(1) or b"packed")
    head = Packing()
    assert head.get(OneBlob, 0, b"x") is None
    head.on = True
    assert head.get(OneBlob, 0, b"x") == head.get(OneBlob, 0, b"x") == b"packed" and len(made) == 1


@pytest.mark.parametrize(
    ("ratio", "pack_rate", "link", "worth"),
    [
        (0.5, 70 * MIB, 10 * MIB, True),
        (0.5, 70 * MIB, 100 * MIB, False),  # the link is faster than packing
        (0.95, 70 * MIB, 10 * MIB, False),  # it hardly shrinks
        (0.5, 12 * MIB, 10 * MIB, False),  # this machine is slow
    ],
)
def test_when_it_promises_anything(ratio, pack_rate, link, worth):
    assert promises(PackingSample(ratio, pack_rate), link) is worth
    assert promises(None, link) is False


def drive(rates, found, left=1 << 40):
    """A transfer at so many bytes a second while packing is (off, on); what was switched."""
    clock, switched, everywhere = [0.0], [], [0.0]
    trial = PackingTrial(switched.append, lambda: found, lambda: clock[0])
    for _ in range(200):
        clock[0] += 0.05
        everywhere[0] += 0.05 * rates[bool(switched and switched[-1])]
        trial.step(int(everywhere[0] / 4), int(everywhere[0]), left)
    return switched


def test_it_stays_on_where_hosts_receive_faster():
    assert drive((40 * MIB, 70 * MIB), PackingSample(0.5, 70 * MIB)) == [True, True]


def test_it_is_switched_off_for_good_where_they_do_not():
    assert drive((40 * MIB, 40 * MIB * (GAIN - 0.1)), PackingSample(0.5, 70 * MIB)) == [True, False]


def test_it_is_never_tried_where_it_promises_nothing():
    assert drive((40 * MIB, 80 * MIB), PackingSample(0.97, 70 * MIB)) == []
    assert drive((40 * MIB, 80 * MIB), None) == []


def test_it_is_never_tried_when_little_is_left():
    assert drive((40 * MIB, 80 * MIB), PackingSample(0.5, 70 * MIB), left=100 * MIB) == []


def test_a_short_transfer_is_left_alone():
    switched = []
    trial = PackingTrial(switched.append, lambda: PackingSample(0.1, 70 * MIB), lambda: 0.0)
    for _ in range(50):
        trial.step(1, 4, 1 << 40)
    assert switched == [] and WARM_UP_S + MEASURE_S >= 1.5
