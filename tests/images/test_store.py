import hashlib
import os
import threading

import pytest

from gpurun.content.store import Hashed, LayerStore
from gpurun.errors import HostNotReady
from gpurun.node.transfer.spool import CHUNK, ZEROS_HASH, ChunkHashes, runs_of_zeros, stored_of


def digest_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("piece", [1000, CHUNK, CHUNK + 3])
def test_hashes_do_not_depend_on_the_pieces(size, piece):
    content = os.urandom(size)
    seen = Hashed()
    for start in range(0, size, piece):
        seen.update(content[start : start + piece])
    assert (seen.size, seen.digest, seen.chunks) == (size, digest_of(content), hashes_of(content))


def hashes_of(content):
    return b"".join(hashlib.sha256(content[at : at + CHUNK]).digest() for at in range(0, len(content), CHUNK))


@pytest.mark.parametrize("before", [0, 1, CHUNK - 1, CHUNK])
@pytest.mark.parametrize("zeros", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_zeros_that_are_skipped_have_the_hashes_of_zeros(before, zeros):
    seen, some = ChunkHashes(), os.urandom(before)
    seen.add(some)
    seen.skip(zeros)
    seen.add(b"end")
    content = some + bytes(zeros) + b"end"
    assert (seen.size, seen.hashes()) == (len(content), hashes_of(content))
    whole = sum(not any(content[at : at + CHUNK]) for at in range(0, len(content) - CHUNK + 1, CHUNK))
    assert stored_of(seen.hashes(), seen.size) == len(content) - whole * CHUNK


def test_chunks_of_zeros_are_found_only_where_a_hash_begins():
    other = os.urandom(32)
    hashes = ZEROS_HASH * 2500 + other + b"x" + ZEROS_HASH + b"y" * 31 + ZEROS_HASH
    assert list(runs_of_zeros(hashes)) == [(0, 2500), (2503, 1)]
    assert list(runs_of_zeros(other)) == list(runs_of_zeros(b"")) == []


def test_what_is_there_is_not_made_again(store):
    content = b"x" * 100
    made = []

    def make():
        made.append(1)
        return [content]

    first = store.add(digest_of(content), make)
    assert store.add(digest_of(content), make) == first and len(made) == 1
    assert first.path.read_bytes() == content


def test_another_content_is_refused_and_leaves_nothing(store):
    with pytest.raises(HostNotReady, match="does not match its digest"):
        store.add(digest_of(b"right"), lambda: [b"wrong"])
    assert store.find(digest_of(b"right")) is None
    assert not [path for path in store._folder.iterdir() if path.name.startswith("making-")]


def test_a_maker_that_breaks_off_leaves_nothing(store):
    def pieces():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(HostNotReady, match="No space"):
        store.add(digest_of(b"half and half"), pieces)
    assert not [path for path in store._folder.iterdir() if path.name.startswith("making-")]


def test_several_at_once_make_it_once(store):
    content, made = os.urandom(100_000), []

    def make():
        made.append(1)
        return [content]

    threads = [threading.Thread(target=store.add, args=(digest_of(content), make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_the_least_recently_used_goes_first_and_what_is_being_sent_stays(tmp_path):
    store = LayerStore(tmp_path, limit_bytes=350)
    store.close()  # so that it holds nothing of what it writes
    blobs = [store.put([bytes([number]) * 100]) for number in range(3)]
    for age, blob in enumerate(blobs):
        os.utime(blob.path, (1000 + age, 1000 + age))
    sent = blobs[0].open()  # also makes it the last used
    os.utime(blobs[0].path, (1, 1))
    store.put([b"n" * 100])
    assert store.find(blobs[0].digest) and not store.find(blobs[1].digest) and store.find(blobs[2].digest)
    sent.close()
    store.put([b"m" * 100])
    assert not store.find(blobs[0].digest)


def test_a_file_without_its_hashes_is_not_there(store):
    blob = store.put([b"x" * 2000])
    blob.path.with_suffix(".chunks").write_bytes(b"short")
    assert store.find(blob.digest) is None
    assert store.add(blob.digest, lambda: [b"x" * 2000]).hashes == blob.hashes


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "sha256:../x", "sha256:" + "g" * 64, "md5:" + "0" * 32])
def test_a_digest_is_no_path(store, digest):
    with pytest.raises(Exception, match="not a sha256 digest"):
        store.find(digest)
