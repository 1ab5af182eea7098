"""What a host says of a set that only hosts have: the head believes it only as far as the digest proves it."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gpurun.content.data import content_of_host, read_folder
from gpurun.errors import BadInput
from gpurun.node import data
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.folder.below import Entry, digest_of
from gpurun.node.transfer import sets
from gpurun.node.transfer.sets import ENTRIES, packed
from gpurun.remote.agent import RemoteOpFailed

FILE = Entry("a", "file", 0o644, 0, 3, "sha256:" + "a" * 64, "")


def fleet_of(says):
    """A fleet whose one host describes a set as `says` does."""

    class Host:
        @contextmanager
        def stream(self, op, digest, part, silence_s):
            assert op == "data.manifest"
            yield (SimpleNamespace(payload=piece) for piece in says(part))

    return SimpleNamespace(agents={"liar": Host()})


def described(entries, hashes=b"h" * 32):
    return fleet_of(lambda part: [packed(entries)] if part == ENTRIES else [hashes])


def test_a_true_description_is_taken():
    found = content_of_host(described([FILE]), "liar", digest_of([FILE]))
    assert (found.size, found.hashes, found.holders) == (3, b"h" * 32, ["liar"])


@pytest.mark.parametrize(
    "fleet",
    [
        described([FILE], hashes=b""),
        described([FILE], hashes=b"h" * 64),
        described([Entry("a", "file", 0o644, 0, -3, "sha256:" + "a" * 64, "")]),
        described([]),
        fleet_of(lambda _: [b"not packed"]),
        fleet_of(lambda _: []),
    ],
)
def test_a_lie_is_an_error_that_names_the_host(fleet):
    with pytest.raises(RemoteOpFailed, match="is not valid") as caught:
        content_of_host(fleet, "liar", digest_of([FILE]))
    assert caught.value.host == "liar"


def test_a_host_that_never_stops_describing_does_not_fill_the_heads_memory(monkeypatch):
    monkeypatch.setattr(sets, "MOST_DESCRIBED_BYTES", 1000)
    sent = []

    def endless(_part):
        while True:
            sent.append(1)
            yield b"x" * 100

    with pytest.raises(RemoteOpFailed, match="more than 1000 bytes"):
        content_of_host(fleet_of(endless), "liar", digest_of([FILE]))
    assert len(sent) == 11


@pytest.mark.parametrize("one", ["{}", "[]", "0", '["",{},"","","","",""]'])
def test_a_small_description_does_not_become_millions_of_values(monkeypatch, one):
    """One MiB of it, unpacked, would take twenty GiB of the head's memory."""
    monkeypatch.setattr(sets, "MOST_ENTRIES", 1000)
    said = zlib.compress(b"[" + b",".join([one.encode()] * 20_000) + b"]")
    monkeypatch.setattr(sets.json, "loads", lambda _: pytest.fail("all of it was read"))
    with pytest.raises(OpError, match="more than 1000 entries"):
        sets.unpacked(said)


def test_a_folder_with_more_files_than_hosts_take_is_refused_at_the_submit(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "MOST_ENTRIES", 3)
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(BadInput, match="at most 3"):
        read_folder(tmp_path)


@pytest.mark.parametrize("receive", [data.begin_set, data.expect])
def test_a_host_takes_the_description_of_more_than_half_a_tebibyte(monkeypatch, tmp_path, receive):
    """A set of 512 GiB has 64 MiB of hashes; a set of a million files has as much of entries."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(data.blobs, "find_transfer", lambda _: SimpleNamespace(blobs={}))
    call = Call(1, lambda *_: None, more=False, payload=bytes((64 << 20) + 1))
    blob = {"blob": "sha256:" + "0" * 64} if receive is data.expect else {}
    with pytest.raises((OpError, OSError)) as caught:
        receive(call, "t", digest="sha256:" + "0" * 64, **blob)
    assert "larger" not in str(caught.value)
