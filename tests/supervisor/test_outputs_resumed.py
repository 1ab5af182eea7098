"""A copy of outputs that breaks off: what has arrived is not sent again, and only what is right is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outputs_trees import change
from outputs_world import outputs_job, shape

from gpurun.errors import HostFailure, HostUnreachable
from gpurun.node.agent import frames
from gpurun.node.folder import below, contents
from gpurun.node.folder.contents import unpacked
from gpurun.remote.agent import Reply
from gpurun.state import durable
from gpurun.supervisor.outputs import arriving as outputs_arriving
from gpurun.supervisor.outputs import plan
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.outputs import collect_outputs, copy_outputs

SIZE = 20_000_000
BYTES = random.Random(1).randbytes(SIZE)


class Wire:
    """Counts what a host sends of its files, and cuts it off.

    Attributes:
        sent: bytes of the last copy.
        asked: what it was asked for.
    """

    def __init__(self, job) -> None:
        self._stream = job.links.agent("h1").stream
        self.sent, self.asked, self.cut_after, self.at_cut = 0, [], None, self._lost
        job.links.agent("h1").stream = self.stream

    def stream(self, op, *, payload_in=None, **params):
        if op != "outputs.read":
            yield from self._stream(op, payload_in=payload_in, **params)
            return
        asked = list(payload_in)
        self.sent, self.asked = 0, [frame.header for frame in unpacked(asked)]
        for reply in self._stream(op, payload_in=asked, **params):
            self.sent += len(reply.payload)
            if self.cut_after is not None and self.sent > self.cut_after:
                self.at_cut()
            yield reply

    @staticmethod
    def _lost():
        raise HostUnreachable("the SSH session was lost", host="h1")


@pytest.fixture
def job(tmp_path, world):
    made = outputs_job(tmp_path, world, "h1")
    (made.host() / "model").write_bytes(BYTES)
    return made


@pytest.fixture
def wire(job):
    return Wire(job)


def arriving(job):
    return (job.folder.path / "outputs.arriving").plain


def break_off(job, wire, share=0.6):
    wire.cut_after = int(share * SIZE)
    with pytest.raises(HostFailure):
        copy_outputs(job)
    wire.cut_after = None
    assert not job.head.exists()
    assert share - 0.1 < wire.sent / SIZE < share + 0.1


def check_whole(job, wire):
    """A copy that does not break off; which share of the file came now."""
    copy_outputs(job)
    assert shape(job.head) == shape(job.host())
    assert not arriving(job).exists()
    return wire.sent / SIZE


def test_a_file_goes_on_where_its_copy_broke_off(job, wire):
    break_off(job, wire)
    assert check_whole(job, wire) <= 0.45
    assert wire.asked[0]["at"] >= 0.55 * SIZE


def test_a_file_with_holes_that_breaks_off_costs_what_it_stores(job, wire, monkeypatch):
    """Each side read the holes of its beginning as zeros: 90 s for these 17 MiB."""
    model, far = job.host() / "model", 16 << 30
    with model.open("wb") as file:
        for position, size in ((0, 1 << 20), (far, 8 << 20), (far + (40 << 20), 8 << 20)):
            file.seek(position)
            file.write(BYTES[:size])
        file.truncate(far + (64 << 20))
    wire.cut_after = 8 << 20
    with pytest.raises(HostFailure):
        copy_outputs(job)
    wire.cut_after, reads, pread = None, [], os.pread

    def counting(descriptor, size, position):
        reads.append(size)
        return pread(descriptor, size, position)

    monkeypatch.setattr(os, "pread", counting)
    began_s = os.times()
    copy_outputs(job)
    assert sum(reads) < 40 << 20, "the head reads about what it has"
    now_s = os.times()
    assert now_s.user + now_s.system - began_s.user - began_s.system < 5
    monkeypatch.undo()
    assert wire.asked[0]["at"] > far and wire.sent < 17 << 20
    copied = job.head / "model"
    assert copied.stat().st_size == far + (64 << 20) and copied.stat().st_blocks * 512 < 20 << 20
    with copied.open("rb") as file:
        for position, size in ((0, 1 << 20), (far, 8 << 20), (far + (40 << 20), 8 << 20)):
            file.seek(position)
            assert file.read(size) == BYTES[:size]


def test_a_file_goes_on_again_and_again(job, wire):
    break_off(job, wire, 0.3)
    break_off_at = wire.sent
    wire.cut_after = int(0.3 * SIZE)
    with pytest.raises(HostFailure):
        copy_outputs(job)
    wire.cut_after = None
    assert wire.asked[0]["at"] <= break_off_at
    assert check_whole(job, wire) <= 0.45


def test_a_copy_goes_on_when_the_gang_has_ended(job, wire):
    break_off(job, wire)
    there = shape(job.host())
    assert collect_outputs(job) == set()
    assert shape(job.head) == there and wire.sent <= 0.45 * SIZE


def test_files_that_have_arrived_are_not_sent_again(job, wire):
    for name in ("a", "b", "z"):
        (job.host() / name).write_bytes(os.urandom(100_000))
    os.link(job.host() / "b", job.host() / "twin of b")
    break_off(job, wire)
    assert check_whole(job, wire) <= 0.45
    assert [each["p"] for each in wire.asked] == ["model", "z"]


def test_the_head_s_process_is_killed(job, wire, tmp_path):
    """SIGKILL: nothing of it can tidy up."""
    script = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parents[1] / room) for room in ("", "lab", "supervisor")]!r}
from pathlib import Path
from local_agents import Hosts
from outputs_world import outputs_job
from test_outputs_resumed import Wire
from gpurun.supervisor.outputs.outputs import copy_outputs

job = outputs_job(Path({str(tmp_path)!r}), Hosts(Path({str(tmp_path)!r})), "h1")
wire = Wire(job)
wire.cut_after, wire.at_cut = {int(0.6 * SIZE)}, lambda: os.kill(os.getpid(), signal.SIGKILL)
copy_outputs(job)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not job.head.exists()
    assert check_whole(job, wire) <= 0.45


def test_what_arrived_while_the_disk_failed_is_not_used(job, wire, monkeypatch):
    """The kernel tells a failure once: the last sync of the next copy may succeed."""

    def fails(_descriptor):
        raise OSError(errno.EIO, "I/O error")

    (job.host() / "a").write_text("small")
    with monkeypatch.context() as failing:
        failing.setattr(durable, "EARLY_SYNC_BYTES", 0)
        failing.setattr(durable, "sync_file_system", fails)
        break_off(job, wire)
    assert not arriving(job).exists()
    assert check_whole(job, wire) >= 1


def test_a_file_that_has_changed_comes_from_its_beginning(job, wire):
    break_off(job, wire)
    before = (job.host() / "model").stat()
    with (job.host() / "model").open("r+b") as file:
        file.write(b"changed")
    os.utime(job.host() / "model", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert check_whole(job, wire) > 1
    assert "at" not in wire.asked[0]


def test_a_file_that_changes_once_it_is_asked_for_comes_from_its_beginning(job, wire):
    """The head asks for the rest of a file that is another one by now: the host's marks tell."""
    break_off(job, wire)
    stream = wire._stream

    def late(op, **params):
        if op == "outputs.read":
            with (job.host() / "model").open("r+b") as file:
                file.write(b"changed")
        return stream(op, **params)

    wire._stream = late
    copy_outputs(job)
    assert "at" in wire.asked[0] and wire.sent > SIZE
    assert shape(job.head) == shape(job.host())


def test_a_beginning_that_was_damaged_here_is_not_used(job, wire):
    break_off(job, wire)
    with (arriving(job) / "new/model").open("r+b") as file:
        file.write(b"damaged")
    assert check_whole(job, wire) > 1


def test_a_whole_file_that_was_cut_here_is_not_used(job, wire):
    (job.host() / "a").write_bytes(os.urandom(100_000))
    break_off(job, wire)
    os.truncate(arriving(job) / "new/a", 50_000)
    check_whole(job, wire)
    assert [each["p"] for each in wire.asked] == ["a", "model"]


def test_nothing_is_used_after_the_head_was_started_anew(job, wire, monkeypatch):
    """A power loss may have taken what nothing had synced."""
    break_off(job, wire)
    monkeypatch.setattr(outputs_arriving, "boot_id", lambda: "another")
    assert check_whole(job, wire) > 1


@pytest.mark.parametrize("index", [b"", b"{", b"[]\n", b"\xff\n", b'{"boot": 1}\n', b'"boot"\n{"h": 1, "p": []}\n'])
def test_an_index_that_is_damaged_says_nothing(job, wire, index):
    break_off(job, wire)
    (arriving(job) / "index").write_bytes(index)
    assert check_whole(job, wire) > 1


@pytest.mark.parametrize("damage", [{"m": None}, {"m": [1]}, {"m": "x"}, {"w": 1}, {"w": "no"}])
def test_lines_that_cannot_be_true_are_not_believed(job, wire, damage):
    break_off(job, wire)
    boot, line = (arriving(job) / "index").read_text().splitlines()
    (arriving(job) / "index").write_text(f"{boot}\n{json.dumps({**json.loads(line), **damage})}\n")
    check_whole(job, wire)


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe", "link above"])
def test_a_beginning_that_became_something_else(job, wire, tmp_path, kind):
    secret = tmp_path / "h1/secret"
    secret.write_bytes(b"s" * (2 << 20))
    (job.host() / "step").mkdir()
    (job.host() / "model").rename(job.host() / "step/model")
    break_off(job, wire)
    begun = arriving(job) / "new/step/model"
    begun.unlink()
    if kind == "link":
        begun.symlink_to(secret)
    elif kind == "hard link":
        begun.hardlink_to(secret)
    elif kind == "folder":
        begun.mkdir()
    elif kind == "pipe":
        os.mkfifo(begun)
    else:
        begun.parent.rmdir()
        (secret.parent / "model").write_bytes(b"s" * (2 << 20))
        begun.parent.symlink_to(secret.parent)
    assert check_whole(job, wire) > 1
    assert secret.read_bytes() == b"s" * (2 << 20)


def test_what_nobody_asks_for_any_more_goes(job, wire):
    break_off(job, wire)
    (job.host() / "model").unlink()
    (job.host() / "other").write_text("o")
    copy_outputs(job)
    assert shape(job.head) == shape(job.host()) and not arriving(job).exists()


def test_what_arrived_does_not_grow_with_each_try(job, wire):
    for _ in range(3):
        with (job.host() / "model").open("ab") as file:
            file.write(b"more")
        break_off(job, wire)
    assert sum(path.stat().st_size for path in arriving(job).rglob("*") if path.is_file()) <= 0.7 * SIZE


def test_a_sparse_file_goes_on_inside_a_hole(job, wire):
    data = os.urandom(3_000_000)
    with (job.host() / "model").open("wb") as file:
        for position in (0, 40 << 20, 80 << 20):
            file.seek(position)
            file.write(data)
        file.truncate(100 << 20)
    wire.cut_after = 4_500_000
    with pytest.raises(HostFailure):
        copy_outputs(job)
    wire.cut_after = None
    assert check_whole(job, wire) * SIZE < 5_000_000
    assert wire.asked[0]["at"] > 40 << 20
    assert (job.head / "model").stat().st_blocks * 512 < 30_000_000


# -- hosts that lie ---------------------------------------------------------------------------------------


def lying_about_the_rest(job, wire, position, sha=None):
    """The host answers with what it likes, for a file whose marks are the right ones."""
    rest = (job.host() / "model").read_bytes()[-1000:]

    def stream(op, *, payload_in=None, **params):
        if op != "outputs.read":
            yield from wire._stream(op, payload_in=payload_in, **params)
            return
        (asked,) = (frame.header for frame in unpacked(payload_in))
        place = asked["at"] if position == "asked" else position
        whole = hashlib.sha256(below.begun(asked).counted() + rest) if "at" in asked else hashlib.sha256(rest)
        marks = contents.marks_of((job.host() / "model").stat())
        yield Reply(None, frames.encode({"n": 0, "marks": marks}))
        yield Reply(None, frames.encode({"n": 0, "from": place}))
        yield Reply(None, frames.encode({"n": 0}, rest))
        yield Reply(None, frames.encode({"n": 0, "sha": sha or whole.hexdigest(), "after": marks}))

    job.links.agent("h1").stream = stream


@pytest.mark.parametrize("position", ["asked", 0, -1, 1, SIZE - 1000, SIZE, SIZE + 1, 1 << 80, "5", None, [1], True])
def test_a_host_that_goes_on_where_it_likes(job, wire, position):
    break_off(job, wire)
    lying_about_the_rest(job, wire, position)
    with pytest.raises(HostFailure, match="not the job's outputs"):
        copy_outputs(job)
    assert not job.head.exists() and not arriving(job).exists()


def test_a_host_that_goes_on_where_nothing_is(job, wire):
    lying_about_the_rest(job, wire, SIZE - 1000)
    with pytest.raises(HostFailure, match="which was not requested"):
        copy_outputs(job)
    assert not job.head.exists() and not arriving(job).exists()


@pytest.mark.parametrize(
    "asked",
    [{"at": -1}, {"at": 1 << 80}, {"at": "5"}, {"at": True}, {"sha": 5}, {"sha": "é"}, {"marks": "x"}, {"marks": [1]}],
)
def test_a_head_that_asks_for_nonsense_gets_the_whole(job, asked):
    """Another version of gpurun may ask otherwise than this one."""
    path = job.host() / "model"
    marks = contents.marks_of(path.stat())
    sound = {"p": "model", "marks": marks, "at": 5, "sha": hashlib.sha256(path.read_bytes()[:5]).hexdigest()}
    question = frames.encode({**sound, **asked})
    stream = job.links.agent("h1").stream("outputs.read", job="j-00000001", payload_in=[question])
    came = list(unpacked(reply.payload for reply in stream))
    assert all("from" not in frame.header for frame in came)
    assert b"".join(frame.payload for frame in came) == path.read_bytes()


# -- crashes while the copy is changed --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_changes_that_crash_anywhere_are_made_in_the_end(tmp_path, world, seed, monkeypatch):
    """The head is killed before one of the changes, or in the middle of one, for each of them; twice in a row."""
    job, chance = outputs_job(tmp_path, world, "h1"), random.Random(seed)
    top = os.fsencode(job.host())
    (job.host().parent / "elsewhere").mkdir()
    make, left = plan._make, 0

    def crash(*args):
        nonlocal left
        left -= 1
        if left == 0:
            if chance.random() < 0.5:
                make(*args)
            raise SystemExit("killed")
        make(*args)

    for _ in range(8):
        for _ in range(40):
            change(top, chance)
        with monkeypatch.context() as killing:
            killing.setattr(plan, "_make", crash)
            left = chance.randint(1, 30)
            try:
                copy_outputs(job)
            except SystemExit:
                left = chance.randint(1, 30)
                job.outputs = HeadCopy(job.folder)
                try:
                    job.outputs.settle()
                except SystemExit:
                    HeadCopy(job.folder).settle()
        assert shape(job.head) == shape(job.host()), seed
        assert not (arriving(job) / "changes").exists()
