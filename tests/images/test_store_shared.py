"""Several ships use one store that is full, its usual state: no ship fails by another, or removes what it needs."""

from __future__ import annotations

import os
import random

import pytest

from gpurun.content.store import LayerStore

PUTS, SIZE, ROOM = 400, 3000, 12
CONTENTS = 30


def ship(folder, seed):
    """Store blobs that other ships store, too, and send each."""
    draw = random.Random(seed)
    for _ in range(PUTS):
        store = LayerStore(folder, limit_bytes=ROOM * SIZE)
        content = bytes([draw.randrange(CONTENTS)]) * SIZE
        stored = store.put([content])
        sent = stored.open()
        with sent.file() as descriptor:
            assert os.pread(descriptor, 2 * SIZE, 0) == content
        assert store.find(stored.digest) == stored
        sent.close()
        store.close()


def test_three_ships_with_a_full_store_of_1200_puts_no_error(tmp_path):
    ships = []
    for seed in range(3):
        pid = os.fork()
        if not pid:
            ended = 1
            try:
                ship(tmp_path, seed)
                ended = 0
            except BaseException as error:  # noqa: BLE001
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(ended)
        ships.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in ships] == [0, 0, 0]
    blobs = [path for path in (tmp_path / "sha256").iterdir() if len(path.name) == 64]
    assert 0 < len(blobs) <= ROOM + 3


def test_what_a_store_has_written_stays_until_it_is_closed(tmp_path):
    mine, others = LayerStore(tmp_path, limit_bytes=SIZE), LayerStore(tmp_path, limit_bytes=SIZE)
    first = mine.put([b"1" * SIZE])
    second = others.put([b"2" * SIZE])
    assert mine.find(first.digest) == first and mine.find(second.digest) == second
    mine.close()
    others.put([b"3" * SIZE])
    assert mine.find(first.digest) is None and mine.find(second.digest) == second


def test_what_two_ships_have_written_stays_while_one_of_them_is_open(tmp_path):
    mine, others = LayerStore(tmp_path, limit_bytes=SIZE), LayerStore(tmp_path, limit_bytes=SIZE)
    first = mine.put([b"1" * SIZE])
    assert others.put([b"1" * SIZE]) == first
    others.close()
    third = LayerStore(tmp_path, limit_bytes=SIZE)
    third.put([b"3" * SIZE])
    assert mine.find(first.digest) == first
    mine.close()
    third.put([b"4" * SIZE])
    assert mine.find(first.digest) is None
    assert list(tmp_path.rglob("making-*")) == []


def test_a_blob_that_is_removed_just_before_it_is_opened_is_not_there(store, monkeypatch):
    stored = store.put([b"x" * SIZE])
    store.close()

    def take(descriptor, *, shared):
        stored.path.unlink()

    monkeypatch.setattr("gpurun.content.store.locks.take", take)
    with pytest.raises(FileNotFoundError):
        stored.open()
