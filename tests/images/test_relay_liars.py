"""Hosts of a transfer that lie: to those that pull from them, to those they pull from, and to the head."""

import os

import pytest
from waiting import until

from gpurun.content.chain import Want, chain
from gpurun.content.relay import Relay
from gpurun.content.seats import Options, Seat
from gpurun.errors import HostFailure
from gpurun.node.agent import frames
from gpurun.node.agent.frames import OpError
from gpurun.node.transfer import blobs
from gpurun.node.transfer.blobs import checked_ranges
from gpurun.node.transfer.spool import CHUNK, Blob, Pace, Remembered

MIB = 1 << 20


def relay_of(fleet, names, stored, told=lambda *_: None):
    wants = [Want(name, "r1", tuple(item.digest for item in stored)) for name in names]
    return Relay(fleet, [chain(wants, {item.digest: item.size for item in stored})], Options(), told)


def run(relay, stored):
    for item in stored:
        relay.announce(item)

    def is_done():
        relay.step()
        return relay.finished([item.digest for item in stored])

    until(is_done)


class Liar(blobs.Server):
    """In the place of a host's own server: sends frames as a test says, to anybody who asks."""

    def __init__(self, relay, lies):
        keys = relay.seats.certificate
        self.lies, self.asked = lies, 0
        super().__init__("127.0.0.1", keys.certificate, keys.key, lambda _digest: None, Pace(None), Remembered())

    def _prove(self, frame):
        pass

    def _send_all(self, connection, wants):
        self.asked += 1
        for header, payload in self.lies(wants[0][0]):
            blobs._send(connection, header, payload)
        blobs._send(connection, {"t": "end"})


def put_in_place_of(relay, host, lies):
    liar = Liar(relay, lies)
    relay.seats.by_host[host] = Seat("127.0.0.1", liar.port, "127.0.0.1")
    return liar


def chunk(**header):
    return lambda digest: [({"t": "chunk", "d": digest, "i": 0, **header}, bytes(CHUNK))]


LIES = {
    "far beyond the end": chunk(i=1 << 40),
    "before the beginning": chunk(i=-1),
    "no number": chunk(i="first"),
    "none": chunk(i=None),
    "a list": chunk(i=[0]),
    "half": chunk(i=0.5),
    "nobody's blob": chunk(d="sha256:" + "0" * 64),
    "no digest": chunk(d=7),
    "a path": chunk(d="../../.ssh/authorized_keys"),
    "other bytes": chunk(),
    "badly packed": chunk(z=1),
    "too long": lambda digest: [({"t": "chunk", "d": digest, "i": 0}, bytes(CHUNK - 1))],
    "nothing": lambda _digest: [],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_who_pulls_from_a_liar_stays_and_has_every_byte(hosts, blob, lie):
    stored = [blob(3 * MIB + 17)]
    relay = relay_of(hosts.fleet("h0", "h1"), ["h0", "h1"], stored)
    relay.open()
    liar = put_in_place_of(relay, "h0", lie)
    try:
        run(relay, stored)
        assert "h1" not in relay.failed and liar.asked
        name = stored[0].digest.removeprefix("sha256:") + ".part"
        assert (hosts.spool("h1") / name).read_bytes() == stored[0].path.read_bytes()
    finally:
        liar.close()
        relay.close()


def test_a_liar_of_whom_two_tell_is_named_and_left_out(hosts, blob):
    stored = [blob(2 * MIB)]
    names = ["h0", "h1", "h2"]
    relay = relay_of(hosts.fleet(*names), names, stored)
    relay.open()
    liar = put_in_place_of(relay, "h0", chunk())
    for lane in relay.lanes.values():
        if lane.host != "h0":
            lane.upstreams.insert(0, "h0")
    try:
        run(relay, stored)
        assert list(relay.failed) == ["h0"]
        assert "h1" in str(relay.failed["h0"]) and "h2" in str(relay.failed["h0"]) and relay.failed["h0"].host == "h0"
    finally:
        liar.close()
        relay.close()


def test_nobody_is_left_out_on_one_hosts_word(hosts, blob):
    """The host that says so may be the liar. It gets its chunks from elsewhere."""
    stored = [blob(2 * MIB)]
    relay = relay_of(hosts.fleet("h0", "h1"), ["h0", "h1"], stored)
    relay.open()
    liar = put_in_place_of(relay, "h0", chunk())
    try:
        run(relay, stored)
        assert not relay.failed
    finally:
        liar.close()
        relay.close()


def test_chunks_that_are_there_already_are_no_progress(hosts, blob):
    """Else a liar that sends one chunk for ever would look like the quickest of all."""
    stored, received = [blob(2 * MIB)], {}
    relay = relay_of(hosts.fleet("h0", "h1"), ["h0", "h1"], stored, lambda host, count: received.update({host: count}))
    relay.open()
    right = stored[0].path.read_bytes()[:CHUNK]
    liar = put_in_place_of(relay, "h0", lambda digest: [({"t": "chunk", "d": digest, "i": 0}, right)] * 100)
    try:
        run(relay, stored)
        assert received["h1"] <= stored[0].size
    finally:
        liar.close()
        relay.close()


@pytest.mark.parametrize(
    "wants",
    [
        [["sha256:" + "0" * 64, [[0, 0]]]],
        [[None, [[0, 1 << 50]]]],
        [[None, [[5, 4]]]],
        [[None, [[0, 3], [0, 3]]]],
        [[None, [[0, 3], [2, 5]]]],
        [[None, [[0, 0]]], [None, [[0, 0]]]],
    ],
)
def test_a_host_that_asks_the_head_for_what_there_is_not_is_named(hosts, blob, wants):
    stored = [blob(2 * MIB)]
    relay = relay_of(hosts.fleet("h0"), ["h0"], stored)
    relay.open()
    relay.announce(stored[0])
    asked = [(digest or stored[0].digest, [tuple(one) for one in ranges]) for digest, ranges in wants]
    with pytest.raises(HostFailure) as caught:
        list(relay.seats.source("head over SSH", "h0").feed(asked))
    assert caught.value.host == "h0"
    relay.close()


@pytest.mark.parametrize(
    "frame",
    [
        {"t": "want"},
        {"t": "want", "d": "sha256:" + "0" * 64, "r": 3},
        {"t": "want", "d": [], "r": [[0]]},
        {"t": "want", "d": "x", "r": [["a", "b"]]},
        {"t": "want", "d": "x", "r": [[0, 1 << 80]]},
        {"t": "want", "d": "x", "r": [[True, 0.5]]},
    ],
)
def test_what_is_no_want_ends_that_connection_and_no_thread(frame):
    incoming = iter([frames.Frame(frame, b""), frames.Frame({"t": "go"}, b"")])
    with pytest.raises((frames.FrameError, OpError)):
        for _, ranges in blobs._read_wants(incoming):
            list(checked_ranges(_blob(), ranges))


def test_wants_do_not_go_on_for_ever():
    endless = iter(lambda: frames.Frame({"t": "want", "d": "x", "r": [[0, 0]] * 1000}, b""), None)
    with pytest.raises(frames.FrameError):
        blobs._read_wants(endless)


def _blob():
    read, write = os.pipe()
    os.close(write)
    return Blob("sha256:" + "0" * 64, 3 * CHUNK, bytes(96), read)
