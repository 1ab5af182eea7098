"""What a host says of a set that only hosts have: the head believes it only as far as the digest proves it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gpurun.data import content
from gpurun.data.content import content_of_host
from gpurun.images.tree import Entry, digest_of
from gpurun.node.data.data_store import ENTRIES, packed
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
    return fleet_of(lambda part: [packed(entry.as_json() for entry in entries)] if part == ENTRIES else [hashes])


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
    with pytest.raises(RemoteOpFailed, match="cannot be true") as caught:
        content_of_host(fleet, "liar", digest_of([FILE]))
    assert caught.value.host == "liar"


def test_a_host_that_never_stops_describing_does_not_fill_the_heads_memory(monkeypatch):
    monkeypatch.setattr(content, "MOST_DESCRIBED_BYTES", 1000)
    sent = []

    def endless(_part):
        while True:
            sent.append(1)
            yield b"x" * 100

    with pytest.raises(RemoteOpFailed, match="over 1000 bytes"):
        content_of_host(fleet_of(endless), "liar", digest_of([FILE]))
    assert len(sent) == 11
