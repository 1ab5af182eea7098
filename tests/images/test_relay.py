"""Transfers between agents on the loopback interface: the whole way, and with every end broken."""

import os
import socket
import ssl
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gpurun.content.chain import Want, chain, star
from gpurun.content.relay import DamagedBlob, Relay
from gpurun.content.seats import Options, make_certificate
from gpurun.errors import HostUnreachable
from gpurun.node.agent.frames import OpError
from gpurun.node.transfer import blobs
from gpurun.node.transfer.spool import CHUNK, Pace

MIB = 1 << 20


def relay_of(fleet, wants, stored, *, make=chain, lanes=1, told=lambda *a: None, **options):
    sizes = {item.digest: item.size for item in stored}
    chains = [make(wants, sizes, lane=lane, lanes=lanes) if make is chain else make(wants) for lane in range(lanes)]
    return Relay(fleet, chains, Options(**options), told)


def run(relay, stored, *, until=None, each_step=lambda: None):
    """Open, announce, step until finished."""
    digests = [item.digest for item in stored]
    relay.open()
    for item in stored:
        relay.announce(item)
    deadline = time.monotonic() + LIMIT_S
    while not (until() if until else relay.finished(digests)):
        assert time.monotonic() < deadline, "it does not end"
        relay.step()
        each_step()


class Gate:
    """In the place of the head's pace: so many bytes go out at once, then a piece each half second until it is open."""

    def __init__(self, relay, size):
        self.left, self.open = size, threading.Event()
        relay.seats._pace = self

    def spend(self, amount):
        self.left -= amount
        if self.left < 0:
            self.open.wait(0.5)


def all_of(names, stored, rack="r1"):
    return [Want(name, rack, tuple(item.digest for item in stored)) for name in names]


def spooled(hosts, name, item):
    path = hosts.spool(name) / (item.digest.removeprefix("sha256:") + ".part")
    return path.read_bytes() if path.exists() else None


def test_a_chain_brings_every_byte_and_the_head_sends_it_once(hosts, blob):
    names = [f"h{number}" for number in range(4)]
    stored = [blob(5 * MIB + 17), blob(1), blob(3 * MIB)]
    fleet = hosts.fleet(*names)
    received = {}
    relay = relay_of(fleet, all_of(names, stored), stored, told=lambda host, count: received.update({host: count}))
    run(relay, stored)
    total = sum(item.size for item in stored)
    assert relay.sent_bytes == total
    for name in names:
        for item in stored:
            assert spooled(hosts, name, item) == item.path.read_bytes()
    assert received == dict.fromkeys(names, total)
    relay.close()
    assert not relay.failed
    assert all(list(hosts.spool(name).iterdir()) == [] for name in names)


@pytest.mark.parametrize("options", [{"make": star}, {"lanes": 3}, {"direct": False}, {"make": star, "direct": False}])
def test_other_shapes(hosts, blob, options):
    names = [f"h{number}" for number in range(3)]
    stored = [blob(40 * MIB + 5), blob(2 * MIB)]
    relay = relay_of(hosts.fleet(*names), all_of(names, stored), stored, **options)
    run(relay, stored)
    for name in names:
        for item in stored:
            assert spooled(hosts, name, item) == item.path.read_bytes()
    relay.close()


def test_hosts_that_lack_different_blobs(hosts, blob):
    a, b, c = blob(2 * MIB), blob(3 * MIB), blob(MIB)
    wants = [
        Want("h0", "r1", (c.digest,)),
        Want("h1", "r1", (a.digest, b.digest, c.digest)),
        Want("h2", "r2", (b.digest,)),
    ]
    relay = relay_of(hosts.fleet("h0", "h1", "h2"), wants, [a, b, c])
    run(relay, [a, b, c])
    assert spooled(hosts, "h0", c) and spooled(hosts, "h1", a) and spooled(hosts, "h2", b)
    assert spooled(hosts, "h0", a) is None and spooled(hosts, "h2", a) is None
    assert relay.sent_bytes == a.size + b.size + c.size
    relay.close()


def test_hosts_that_cannot_reach_each_other_get_it_from_the_head(hosts, blob):
    stored = [blob(6 * MIB)]
    fleet = hosts.fleet("h0", "h1", "h2")
    relay = relay_of(fleet, all_of(["h0", "h1", "h2"], stored), stored)
    relay.open()
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # bound, not listening: refuses
    seats = relay.seats.by_host
    for name in ("h0", "h1"):
        seats[name] = type(seats[name])("127.0.0.1", closed.getsockname()[1], seats[name].head)
    relay.open = lambda: None
    run(relay, stored)
    assert not relay.failed
    assert all(spooled(hosts, name, stored[0]) == stored[0].path.read_bytes() for name in ("h0", "h1", "h2"))
    relay.close()
    closed.close()


def test_a_head_that_cannot_be_reached_feeds_over_ssh(hosts, blob):
    stored = [blob(3 * MIB)]
    relay = relay_of(hosts.fleet("h0", "h1"), all_of(["h0", "h1"], stored), stored)
    relay.open()
    relay.seats.server.close()
    relay.open = lambda: None
    run(relay, stored)
    assert not relay.failed and spooled(hosts, "h1", stored[0]) == stored[0].path.read_bytes()
    relay.close()


def test_a_host_that_dies_in_the_middle_is_left_out(hosts, blob):
    names = [f"h{number}" for number in range(4)]
    stored = [blob(24 * MIB)]
    relay = relay_of(hosts.fleet(*names), all_of(names, stored), stored)
    gate, killed = Gate(relay, 12 * MIB), []

    def kill_once():
        if not killed and relay.lanes["0/h2"].received > 4 * MIB:
            hosts.kill("h1")
            killed.append(True)
            gate.open.set()

    run(relay, stored, each_step=kill_once)
    assert killed and list(relay.failed) == ["h1"]
    assert isinstance(relay.failed["h1"], HostUnreachable)
    for name in ("h0", "h2", "h3"):
        assert spooled(hosts, name, stored[0]) == stored[0].path.read_bytes()
    assert relay.sent_bytes <= 24 * MIB  # what h2 had already, nobody asked for again
    relay.close()


def test_a_host_that_hangs_is_left_out(hosts, blob):
    names = ["h0", "h1", "h2"]
    stored = [blob(12 * MIB)]
    relay = relay_of(hosts.fleet(*names), all_of(names, stored), stored)
    gate = Gate(relay, 6 * MIB)

    def stop():
        if relay.lanes["0/h2"].received > 2 * MIB:
            hosts.stop("h1")
            gate.open.set()

    run(relay, stored, each_step=stop)
    assert list(relay.failed) == ["h1"]
    assert spooled(hosts, "h2", stored[0]) == stored[0].path.read_bytes()
    relay.close()


def test_an_interrupted_transfer_goes_on_where_it_was(hosts, blob):
    stored = [blob(20 * MIB)]
    fleet = hosts.fleet("h0", "h1")
    relay = relay_of(fleet, all_of(["h0", "h1"], stored), stored)
    gate = Gate(relay, 10 * MIB)
    run(relay, stored, until=lambda: relay.lanes["0/h1"].received > 6 * MIB)
    relay.close(keep={"h0", "h1"})
    gate.open.set()
    again = relay_of(fleet, all_of(["h0", "h1"], stored), stored)
    run(again, stored)
    assert again.sent_bytes <= 14 * MIB
    assert spooled(hosts, "h1", stored[0]) == stored[0].path.read_bytes()
    again.close()


def test_what_was_left_is_verified_before_it_is_used(hosts, blob):
    stored = [blob(4 * MIB)]
    fleet = hosts.fleet("h0")
    hosts.spool("h0").mkdir(parents=True)
    left = bytearray(stored[0].path.read_bytes()[: 3 * MIB])
    left[MIB + 5] ^= 1
    (hosts.spool("h0") / (stored[0].digest.removeprefix("sha256:") + ".part")).write_bytes(left)
    relay = relay_of(fleet, all_of(["h0"], stored), stored)
    run(relay, stored)
    assert relay.seats.server.sent_bytes == MIB + CHUNK  # the missing ones and the corrupt one
    assert spooled(hosts, "h0", stored[0]) == stored[0].path.read_bytes()
    relay.close()


def test_a_chunk_that_is_corrupted_on_the_way_is_asked_for_again(hosts, blob, monkeypatch):
    stored = [blob(4 * MIB)]
    relay = relay_of(hosts.fleet("h0"), all_of(["h0"], stored), stored)
    relay.open()
    relay.announce(stored[0])
    source = relay.seats.blobs[stored[0].digest]
    honest, told = source.read_into, []

    def lie(index, buffer):
        view = honest(index, buffer)
        if index == 2 and not told:
            told.append(True)
            view[7] ^= 1
        return view

    source.read_into = lie
    relay.open = lambda: None
    relay.announce = lambda item: None
    run(relay, stored)
    assert told and not relay.failed
    assert spooled(hosts, "h0", stored[0]) == stored[0].path.read_bytes()
    relay.close()


def test_a_damaged_file_of_the_head_is_noticed(hosts, blob):
    stored = [blob(2 * MIB)]
    relay = relay_of(hosts.fleet("h0"), all_of(["h0"], stored), stored)
    content = bytearray(stored[0].path.read_bytes())
    content[MIB + 3] ^= 1
    stored[0].path.write_bytes(content)
    with pytest.raises(DamagedBlob) as caught:
        run(relay, stored)
    assert caught.value.digest == stored[0].digest
    relay.close()


def test_a_neighbour_that_lies_is_passed_over(hosts, blob):
    stored = [blob(3 * MIB)]
    relay = relay_of(hosts.fleet("h0", "h1"), all_of(["h0", "h1"], stored), stored)
    run(relay, stored, until=lambda: relay.lanes["0/h0"].done)
    path = hosts.spool("h0") / (stored[0].digest.removeprefix("sha256:") + ".part")
    relay.lanes["0/h1"].abandon()
    with path.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"tampered")
    run_on(relay, stored)
    assert not relay.failed and spooled(hosts, "h1", stored[0]) == stored[0].path.read_bytes()
    relay.close()


def run_on(relay, stored):
    relay.open, relay.announce = lambda: None, lambda item: None
    run(relay, stored)


def test_two_transfers_at_once_of_the_same_blob_to_one_host(hosts, blob):
    stored = [blob(8 * MIB)]
    fleet = hosts.fleet("h0", "h1")
    relays = [relay_of(fleet, all_of(["h0", "h1"], stored), stored) for _ in range(2)]
    threads = [threading.Thread(target=run, args=(relay, stored)) for relay in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not relays[0].failed and not relays[1].failed
    for relay in relays:
        relay.close()
    assert list(hosts.spool("h0").iterdir()) == []


def test_a_full_disk_is_that_hosts_failure(hosts, blob, tmp_path):
    stored = [blob(4 * MIB)]
    fleet = hosts.fleet("h0", "h1")
    (tmp_path / "h0/.cache/gpurun").mkdir(parents=True)
    (tmp_path / "h0/.cache/gpurun/spool").symlink_to("/proc/nowhere")
    relay = relay_of(fleet, all_of(["h0", "h1"], stored), stored)
    run(relay, stored)
    assert list(relay.failed) == ["h0"]
    assert spooled(hosts, "h1", stored[0]) == stored[0].path.read_bytes()
    relay.close()


# -- the door ---------------------------------------------------------------------------------------------


@pytest.fixture
def door(hosts, blob):
    stored = blob(2 * MIB)
    relay = relay_of(hosts.fleet("h0"), all_of(["h0"], [stored]), [stored])
    relay.open()
    relay.announce(stored)
    yield relay, stored
    relay.close()


def knock(relay, certificate, token, stored):
    wants = [(stored.digest, [(0, stored.size // CHUNK - 1)])]
    address = ("127.0.0.1", relay.seats.server.port)
    return [
        bytes(frame.payload)
        for frame in blobs.fetch_link(address, certificate.certificate, certificate.key, token, wants, lambda s: None)
    ]


def test_a_token_opens_once(door):
    relay, stored = door
    relay.seats.server.grant("good")
    assert b"".join(knock(relay, relay.seats.certificate, "good", stored)) == stored.path.read_bytes()
    with pytest.raises(OpError):
        knock(relay, relay.seats.certificate, "good", stored)


@pytest.mark.parametrize("token", ["", "bad", None, 3, ["good"], "x" * 10_000])
def test_no_token_no_bytes(door, token):
    relay, stored = door
    relay.seats.server.grant("good")
    with pytest.raises(OpError):
        knock(relay, relay.seats.certificate, token, stored)


def test_a_peer_with_another_certificate_is_refused_on_both_sides(door):
    relay, stored = door
    relay.seats.server.grant("good")
    with pytest.raises(OpError):
        knock(relay, make_certificate(), "good", stored)
    # One that does not verify the server but has no certificate of the transfer either:
    raw = socket.create_connection(("127.0.0.1", relay.seats.server.port))
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):
        connection = trusting.wrap_socket(raw)
        blobs._send(connection, {"t": "hi", "token": "good"})
        blobs._send(connection, {"t": "go"})
        assert connection.recv(10) == b""
        raise OSError("closed")
    assert b"".join(knock(relay, relay.seats.certificate, "good", stored)) == stored.path.read_bytes()


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(3000), b"\x16\x03\x01" + b"\xff" * 600],
    ids=["nothing", "HTTP", "random bytes", "a TLS record too long"],
)
def test_noise_at_the_door(door, noise):
    relay, stored = door
    with socket.create_connection(("127.0.0.1", relay.seats.server.port)) as raw:
        raw.sendall(noise)
    relay.seats.server.grant("good")
    assert b"".join(knock(relay, relay.seats.certificate, "good", stored)) == stored.path.read_bytes()


def test_old_tls_is_refused(door):
    relay, _stored = door
    old = blobs.context(False, relay.seats.certificate.certificate, relay.seats.certificate.key)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", relay.seats.server.port)) as raw, pytest.raises(OSError):
        old.wrap_socket(raw)


def test_a_digest_is_no_path(hosts):
    fleet = hosts.fleet("h0")
    agent = fleet.agents["h0"]
    certificate = make_certificate()
    agent.call("blobs.open", transfer="t", certificate=certificate.certificate, payload=certificate.key.encode())
    for digest in ("../../evil", "sha256:" + "../" * 21 + "x", "sha256:" + "A" * 64, "sha256:" + "a" * 63, ""):
        with pytest.raises(Exception, match="digest"):
            agent.call("blobs.expect", transfer="t", digest=digest, size=1, payload=bytes(32))
    assert not Path(hosts.home("h0") / "evil").exists()


@pytest.mark.parametrize("direct", [True, False])
def test_packed_chunks_arrive_as_they_were(hosts, store, direct):
    stored = [store.put([os.urandom(1000) * 3000 + os.urandom(2 * MIB)])]
    names = ["h0", "h1", "h2"]
    relay = relay_of(hosts.fleet(*names), all_of(names, stored), stored, direct=direct)
    relay.seats.packing.link_bytes_s = 1.0
    run(relay, stored)
    assert all(spooled(hosts, name, stored[0]) == stored[0].path.read_bytes() for name in names)
    if direct:
        assert 2 * MIB < relay.sent_bytes < stored[0].size - MIB
    relay.close()


def paced(hosts, store, rate_bytes_s, *, seconds):
    """Send what shrinks by half to two hosts, at that rate until it is compressed."""
    count = int(rate_bytes_s * seconds / CHUNK)
    stored = [store.put(os.urandom(CHUNK // 2).hex().encode() for _ in range(count))]
    names = ["h0", "h1"]
    relay = relay_of(hosts.fleet(*names), all_of(names, stored), stored)
    relay.seats._pace = Pace(rate_bytes_s)

    def hurry():
        if relay.seats.packing.on:
            relay.seats.server._pace = Pace(None)

    run(relay, stored, each_step=hurry)
    relay.close()
    assert all(relay.lanes[f"0/{name}"].received == stored[0].size for name in names)
    return relay.seats.packing.on, relay.sent_bytes / stored[0].size


def test_what_a_slow_link_sends_is_compressed(hosts, store):
    was_on, sent = paced(hosts, store, MIB, seconds=20.0)
    assert was_on and sent < 0.8  # at a given rate, fewer bytes are less time


def test_what_a_fast_link_sends_is_not(hosts, store, monkeypatch):
    monkeypatch.setattr("gpurun.content.seats.SLOW_BYTES_S", MIB / 4)  # a busy machine may be that slow
    assert paced(hosts, store, MIB, seconds=4.0) == (False, 1.0)


def test_when_the_first_host_was_slow_and_not_the_link_nothing_more_is_compressed(hosts, store):
    stored = [store.put([os.urandom(MIB)])]
    relay = relay_of(hosts.fleet("h0", "h1"), all_of(["h0", "h1"], stored), stored)
    relay.seats.packing.link_bytes_s = 1.0
    lanes = list(relay.lanes.values())
    relay._demote(lanes[1], lanes, replace(lanes[1].pace(lanes), upstream="h0"))
    assert relay.seats.packing.on, "the second host says nothing about the head's link"
    relay._demote(lanes[0], lanes, lanes[0].pace(lanes))
    assert not relay.seats.packing.on
    relay.close()
