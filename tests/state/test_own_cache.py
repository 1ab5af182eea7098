"""The user's own cache: it saves time, is never trusted more than files, and never fails."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.state import caches

PAYLOAD = bytes(range(256)) * 4


@pytest.fixture
def key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "gpurun" / "cache.key"


@pytest.fixture
def kept(tmp_path, key):
    place = caches.cache_file(tmp_path / "a'; touch x #", "what")
    caches.keep_cache(place, PAYLOAD)
    return place


def test_what_is_kept_comes_back(kept):
    assert caches.read_cache(kept) == PAYLOAD
    caches.keep_cache(kept, b"")
    assert caches.read_cache(kept) == b""
    assert [path.stat().st_mode & 0o777 for path in kept.parent.iterdir()] == [0o600]


@pytest.mark.parametrize("at", [0, 31, 32, 500, -1])
def test_a_flipped_bit_is_noticed(kept, at):
    data = bytearray(kept.read_bytes())
    data[at] ^= 1
    kept.write_bytes(data)
    assert caches.read_cache(kept) is None


@pytest.mark.parametrize("size", [0, 1, 31, 32, 100])
def test_a_cut_file_is_noticed(kept, size):
    kept.write_bytes(kept.read_bytes()[:size])
    assert caches.read_cache(kept) is None


def test_what_another_user_could_have_written_is_ignored(kept, monkeypatch):
    kept.chmod(0o660)
    assert caches.read_cache(kept) is None
    kept.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert caches.read_cache(kept) is None


def test_who_can_write_into_the_cache_folder_cannot_forge_a_file(kept, key):
    kept.write_bytes(hashlib.sha256(PAYLOAD).digest() + PAYLOAD)
    assert caches.read_cache(kept) is None, "a digest without the key"
    other = kept.with_name("other")
    caches.keep_cache(other, PAYLOAD)
    other.rename(kept)
    assert caches.read_cache(kept) is None, "a file in the place of another"
    assert key.stat().st_mode & 0o777 == 0o600 and kept.parent not in key.parents


@pytest.mark.parametrize("change", ["gone", "cut", "another", "written by others", "no place"])
def test_without_the_key_nothing_is_read_and_another_one_is_made(kept, key, change, monkeypatch):
    if change == "gone":
        key.unlink()
    elif change == "no place":
        monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    elif change == "written by others":
        key.chmod(0o622)
    else:
        key.write_bytes(key.read_bytes()[1:] + (b"" if change == "cut" else b"x"))
    assert caches.read_cache(kept) is None
    caches.keep_cache(kept, PAYLOAD)
    assert caches.read_cache(kept) == (None if change == "no place" else PAYLOAD)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "nothing"])
def test_what_is_no_file_is_ignored(kept, tmp_path, kind):
    kept.rename(tmp_path / "moved")
    if kind == "link":
        kept.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(kept)
    elif kind == "folder":
        kept.mkdir()
    assert caches.read_cache(kept) is None


@pytest.mark.parametrize("place", ["/proc/nowhere/x", "/dev/null/x", "/" + "x" * 300 + "/y"])
def test_a_place_that_cannot_be_used_fails_nothing(place):
    caches.keep_cache(Path(place), PAYLOAD)
    assert caches.read_cache(Path(place)) is None


def test_the_environment_names_the_place(tmp_path):
    assert caches.cache_room({"XDG_CACHE_HOME": "/x", "HOME": "/y"}, "jobs") == Path("/x/gpurun/jobs")
    assert caches.cache_room({"HOME": "/y"}, "jobs") == Path("/y/.cache/gpurun/jobs")
    assert caches.cache_room({}, "jobs") is None
    assert caches.cache_room({"XDG_CACHE_HOME": "relative"}, "jobs") is None
    assert caches.cache_file(tmp_path, "a") != caches.cache_file(tmp_path, "b")


def test_a_file_that_has_just_changed_is_not_settled(monkeypatch):
    now = time.time_ns()
    monkeypatch.setattr(caches, "time", SimpleNamespace(time_ns=lambda: now))
    assert not caches.is_settled(now - 1000)
    assert caches.is_settled(now - 10**9 - 1)
    assert not caches.is_settled(now + 10**9 + 1), "the clock was set back"
    assert not caches.is_settled((now // 10**9 - 1) * 10**9), "a file system that keeps whole seconds"
    assert caches.is_settled((now // 10**9 - 4) * 10**9)
