"""A host gives its disk back what the head has of ranks' output; nothing else changes, and nothing comes twice."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from gpurun.node.agent.frames import Call
from gpurun.node.job import rank_processes, ranks

JOB, NAME, MIB = "j-0a1b2c3d", "0.17.99", 1 << 20


@pytest.fixture
def rank(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".gpurun/jobs" / JOB / "run/ranks/1" / NAME
    folder.mkdir(parents=True)
    (folder / "start").write_text("started\n")
    (folder / "end.0").touch()
    (folder / "o").write_bytes(os.urandom(4 * MIB))
    (folder / "e").write_bytes(b"warning\n")
    probe = folder / "probe"
    probe.write_bytes(bytes(MIB))
    with probe.open("r+b") as file:
        made = rank_processes._make_hole(file.fileno(), MIB)
    probe.unlink()
    return SimpleNamespace(folder=folder, holes=made)


def call():
    return Call(1, lambda *_: None, False, b"")


def release(known):
    return ranks.release_output(call(), JOB, 1, known)["bytes"]


def printed(have):
    came = {"o": b"", "e": b""}
    for reply in ranks.follow(call(), JOB, 1, have, once=True):
        if reply.value["kind"] == "output":
            came[reply.value["stream"]] += bytes(reply.payload)
    return came


def test_the_disk_gets_back_what_is_known_and_the_rest_follows(rank):
    whole = (rank.folder / "o").read_bytes()
    freed = release({NAME: [3 * MIB, 0]})
    if rank.holes:
        assert freed >= 3 * MIB - 4096
        assert (rank.folder / "o").stat().st_blocks * 512 <= MIB + 8192
    with (rank.folder / "o").open("ab") as file:
        file.write(b"more\n")
    assert printed({NAME: [3 * MIB, 0]}) == {"o": whole[3 * MIB :] + b"more\n", "e": b"warning\n"}
    assert (rank.folder / "o").stat().st_size == 4 * MIB + 5


def test_who_knows_nothing_gets_what_is_left(rank):
    whole = (rank.folder / "o").read_bytes()
    release({NAME: [3 * MIB, 0]})
    assert printed({})["o"][-MIB:] == whole[-MIB:]


@pytest.mark.parametrize(
    "known",
    [
        {},
        {NAME: []},
        {NAME: [0, 0]},
        {NAME: [-5, -1]},
        {"1.2.3": [MIB, 0]},
        {"../../..": [MIB, 0]},
        {NAME + "\n": [MIB, 0]},
    ],
)
def test_what_is_not_known_stays(rank, known):
    assert release(known) == 0
    assert (rank.folder / "o").read_bytes().count(0) < MIB


def test_more_than_there_is_makes_no_file_longer(rank):
    release({NAME: [1 << 60, 1 << 60]})
    assert (rank.folder / "o").stat().st_size == 4 * MIB and (rank.folder / "e").stat().st_size == 8


def test_no_link_leads_to_another_file(rank, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(MIB))
    before = secret.read_bytes()
    (rank.folder / "o").unlink()
    (rank.folder / "o").symlink_to(secret)
    (rank.folder / "e").unlink()
    os.mkfifo(rank.folder / "e")
    assert release({NAME: [MIB, MIB]}) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "o").write_bytes(before)
    for file in list(rank.folder.iterdir()):
        file.unlink()
    rank.folder.rmdir()
    rank.folder.symlink_to(elsewhere)
    assert release({NAME: [MIB, MIB]}) == 0
    assert secret.read_bytes() == before == (elsewhere / "o").read_bytes()
