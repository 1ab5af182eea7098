"""Hosts that lie about a job's outputs, and containers that change them under the reader's hands."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_agents import Hosts
from outputs_world import JOB, meanwhile, outputs_job, removed_later

from gpurun.errors import HostFailure
from gpurun.node.agent import frames
from gpurun.node.folder import below
from gpurun.remote.agent import Reply
from gpurun.supervisor.outputs import listing as outputs_listed
from gpurun.supervisor.outputs.outputs import collect_outputs, copy_outputs, send_outputs
from gpurun.supervisor.verdict.ends import GangEnd

SECRET = "the secret of the host's user"
MARKS = [3, 5, 6, 7]


@pytest.fixture
def job(tmp_path):
    hosts = Hosts(tmp_path)
    yield outputs_job(tmp_path, hosts, "h1")
    hosts.close()


@pytest.fixture
def deep(tmp_path):
    yield from removed_later(tmp_path)


@pytest.fixture
def swap(tmp_path):
    """Exchange two names, as a container does in a loop: there is always one or the other."""
    rename = ctypes.CDLL(None, use_errno=True).renameat2

    def exchange(one: Path, other: Path) -> None:
        rename(-100, os.fsencode(one), -100, os.fsencode(other), 2)

    return exchange


def secrets_in(top: Path) -> list[Path]:
    return [path for path in top.rglob("*") if not path.is_symlink() and path.is_file() and SECRET in path.read_text()]


@pytest.fixture
def outside(tmp_path):
    """What belongs to the user and not to the job."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("model", "key"):
        (folder / name).write_text(SECRET)
        (folder / name).chmod(0o600)
    before = {path.name: path.stat().st_mode for path in folder.iterdir()}
    yield folder
    assert {path.name: path.stat().st_mode for path in folder.iterdir()} == before
    assert all(path.read_text() == SECRET for path in folder.iterdir())


def test_a_folder_that_is_swapped_for_a_link_while_it_is_read(job, swap, outside):
    (job.host() / "step").mkdir()
    (job.host() / "step/model").write_text("of the job")
    (job.host() / "other").symlink_to(outside)
    with meanwhile(lambda: swap(job.host() / "step", job.host() / "other")):
        for _ in range(12):
            copy_outputs(job)
            assert secrets_in(job.head) == []


def test_a_file_that_is_swapped_for_a_link_while_it_is_read(job, swap, outside):
    for number in range(20):
        (job.host() / f"{number}").write_text("of the job")
    (job.host() / "link").symlink_to(outside / "key")
    with meanwhile(lambda: swap(job.host() / "7", job.host() / "link")):
        for _ in range(12):
            copy_outputs(job)
            assert secrets_in(job.head) == []


def test_a_folder_that_is_swapped_while_outputs_are_removed_or_sent(job, swap, outside):
    job.head.mkdir()
    (job.head / "step").mkdir()
    (job.head / "step/model").write_text("of the job")
    for _ in range(8):
        (job.host() / "step").mkdir(parents=True, exist_ok=True)
        other = job.host() / "other"
        if not os.path.lexists(other):
            other.symlink_to(outside)
        with meanwhile(lambda other=other: swap(job.host() / "step", other)):
            with suppress(GangEnd):
                send_outputs(job)
            job.links.agent("h1").call("outputs.list", job=JOB)
            with suppress(HostFailure):
                job.links.agent("h1").call("outputs.remove", job=JOB, attempt=1)


def test_a_link_in_the_place_of_the_whole_folder_is_not_followed(job, outside):
    job.host().rmdir()
    job.host().symlink_to(outside)
    assert collect_outputs(job) == {"h1"}
    assert not job.head.exists() or secrets_in(job.head) == []
    assert job.record.outputs_left.hosts == ("h1",)


def test_autotune_reads_no_other_file(job, outside):
    run = job.world.home("h1") / ".gpurun/jobs" / JOB / "run"
    run.mkdir(parents=True)
    (run / "autotune.csv").symlink_to(outside / "key")
    with pytest.raises(HostFailure):
        job.links.agent("h1").call("gang.run_file", job=JOB, name="autotune.csv")
    with pytest.raises(HostFailure):
        job.links.agent("h1").call("gang.run_file", job=JOB, name="../../../../home/key")
    with pytest.raises(HostFailure):
        job.links.agent("h1").call("files.read", path=f"{run}/autotune.csv")


def test_a_link_in_the_heads_copy_is_never_a_way_out(job, outside):
    """The first copy has a link; later the host says that there is a folder, with a file that it had before."""
    (job.host() / "way").symlink_to(outside)
    (job.host() / "a").write_text("1")
    copy_outputs(job)
    job.outputs._origins["way/key"] = ("h1", [len(SECRET), 5, 6, 7])
    listing = [entry("way", k="dir"), entry("way/key", s=len(SECRET))]
    lying(job, listing, [{"n": 0, "gone": "?"}])
    collect_outputs(job)
    assert secrets_in(job.head) == []


# -- lies -------------------------------------------------------------------------------------------------


def entry(path, k="file", **more):
    return {"p": path, "k": k, "m": 0o644, "t": 5, "s": 3, "i": [6, 7], **more}


def lying(job, listing, read=(), payloads=()):
    """Have the host answer these frames."""
    payloads = dict(payloads)

    def stream(op, *, payload_in=None, **_):
        items = {"outputs.list": listing, "outputs.read": read}[op]
        for number, header in enumerate(items):
            payload = payloads.get(number, b"") if op == "outputs.read" else b""
            yield Reply(None, header if isinstance(header, bytes) else frames.encode(header, payload))
        yield Reply({"present": True})

    agent = SimpleNamespace(
        host="h1", alive=True, last_heard_s=1e18, close=lambda: None, stream=stream, call=lambda *_, **__: Reply(None)
    )
    job.links.fleet.agents["h1"].close()
    job.links.fleet.agents["h1"] = agent


SHA = hashlib.sha256(b"abc").hexdigest()
GOOD = {"n": 0, "marks": MARKS, "sha": SHA, "after": MARKS}


@pytest.fixture
def kept(job, tmp_path):
    """What must be as it was, whatever a host says."""
    (job.folder.path / "spec.json").plain.write_text("precious")
    job.head.mkdir()
    (job.head / "a").write_text("1")
    yield job
    assert (job.folder.path / "spec.json").read_text() == "precious"
    names = {path.name for path in tmp_path.iterdir()} - {"h1", JOB}
    assert names == set()
    assert {path.name for path in job.folder.path.plain.iterdir()} <= {"spec.json", "outputs", "outputs.lock"}


@pytest.mark.parametrize(
    "listing",
    [
        [entry("../spec.json")], [entry("/etc/passwd")], [entry("a/../../spec.json")], [entry("a//b")], [entry(".")],
        [entry("")], [entry("a\0b")], [entry(7)], [entry("\ud800")], [entry("x" * 256)], [entry("d/" * 20_000 + "x")],
        [entry("a"), entry("a")],
        [entry("a", k="link", to="/etc"), entry("a/passwd")],
        [entry("a", k="link", to="/etc"), entry("a", k="dir"), entry("a/passwd")],
        [entry("a", k="dir"), entry("a", k="link", to="/etc"), entry("a/passwd")],
        [entry("a/b")], [entry("a"), entry("a/b")],
        [entry("l", k="link", to="")], [entry("l", k="link", to="\0")], [entry("l", k="link", to=["/etc"])],
        [entry("a", s=-1)], [entry("a", s=1 << 80)], [entry("a", t="5")], [entry("a", i="67")], [entry("a", m=True)],
        [b"no frames at all, but bytes"], [frames.encode(entry("a"))[:-3]], [b"\0\0\0\2\0\0\0\0[]"],
    ],
)  # fmt: skip
def test_a_list_that_cannot_be(kept, listing):
    lying(kept, listing)
    with pytest.raises(HostFailure, match=r"list of outputs|bytes"):
        copy_outputs(kept)
    assert collect_outputs(kept) == {"h1"}
    assert (kept.head / "a").read_text() == "1"
    assert kept.record.outputs_left.hosts == ("h1",)


@pytest.mark.parametrize(
    ("read", "payload"),
    [
        ([], b""),
        ([GOOD], b"abd"),
        ([GOOD], b"ab"),
        ([GOOD], b"abcd"),
        ([{**GOOD, "sha": "0" * 64}], b"abc"),
        ([{**GOOD, "sha": None}], b"abc"),
        ([{**GOOD, "n": 1}], b"abc"),
        ([{**GOOD, "n": "0"}], b"abc"),
        ([GOOD, {**GOOD, "n": 1}], b"abc"),
        ([{"n": 0}], b"abc"),
        ([{"n": 0, "whole": MARKS}], b"abcd"),
        ([{"n": 0, "whole": MARKS}], b""),
        ([{"n": 0, "whole": MARKS, "sha": "0" * 64}], b"abc"),
        ([{"n": 0, "whole": [3, 5, 6]}], b"abc"),
        ([{"n": 0, "whole": [True, 5, 6, 7]}], b"abc"),
        ([{"n": 0, "whole": [3, 1 << 70, 6, 7]}], b"abc"),
        ([{"n": 0, "whole": {}}], b"abc"),
        ([{"n": 0, "whole": MARKS, "from": -3}], b"abc"),
        ([{"n": 0, "whole": MARKS, "from": "3"}], b"abc"),
        ([{"n": 0, "gone": "it is gone", "from": "3"}], b""),
        ([{"n": 0, "marks": [6, 5, 6, 7]}, {"n": 0, "whole": MARKS}], b"abc"),
        ([{"n": 0, "whole": MARKS}, {"n": 0, "whole": MARKS}], b"abc"),
        ([{"all": [[{"n": 0, "whole": MARKS}, 3]], "sha": "0" * 64}], b"abc"),
        ([{"all": [[{"n": 0, "whole": MARKS}, 3]]}], b"abc"),
        ([{"all": [[{"n": 0, "whole": MARKS}, 4]], "sha": SHA}], b"abc"),
        ([{"all": [[{"n": 0, "whole": MARKS}, True]], "sha": SHA}], b"abc"),
        ([{"n": 0, "marks": MARKS}, {"n": 0, "marks": MARKS}], b"abc"),
        ([{"n": 0, "marks": [-3, 5, 6, 7]}], b"abc"),
        ([{"n": 0, "marks": [3, 1 << 70, 6, 7]}], b"abc"),
        ([{"n": 0, "marks": "3567"}], b"abc"),
        ([{"n": 0, "marks": MARKS, "skip": -1}], b""),
        ([{"n": 0, "marks": MARKS, "skip": 1 << 61}], b""),
        ([{"n": 0, "marks": MARKS}], b"ab"),
        ([b"\xff" * 100], b""),
    ],
)
def test_contents_that_break_their_word(kept, read, payload):
    lying(kept, [entry("a")], read, {0: payload})
    with pytest.raises(HostFailure) as caught:
        copy_outputs(kept)
    assert caught.value.host == "h1"
    assert collect_outputs(kept) == {"h1"}
    assert (kept.head / "a").read_text() == "1"
    assert kept.record.outputs_left.hosts == ("h1",)


def test_words_of_a_host_steer_no_terminal_and_can_be_written(kept):
    strange = "\ud800\x1b[2J\n"
    lying(
        kept,
        [entry("a"), {"p": os.fsdecode(b"\xff\x1b"), "k": "unreadable", "why": strange}],
        [{"n": 0, "gone": strange}],
    )
    assert collect_outputs(kept) == {"h1"}
    left = kept.record.outputs_left
    assert left.words(JOB).isprintable() and left.words(JOB).encode()
    assert left.count == 2 and left.hosts == ("h1",)


def test_more_files_than_the_head_can_remember_stay_and_are_said(job, monkeypatch):
    monkeypatch.setattr(outputs_listed, "MOST_LISTED", 100)
    for number in range(150):
        (job.host() / f"{number}").mkdir()
    assert collect_outputs(job) == {"h1"}
    assert "more than 100 files" in job.record.outputs_left.first[0]
    assert len(list(job.host().iterdir())) == 150


def test_a_list_that_goes_on_without_a_word_ends(kept, monkeypatch):
    """Every item is a sign of life, so no silence ends it."""
    monkeypatch.setattr(outputs_listed, "LIST_LIMIT_S", 0.2)
    lying(kept, itertools.repeat(b""))
    with pytest.raises(HostFailure, match="list of outputs is too long"):
        copy_outputs(kept)


def test_a_list_that_does_not_end(kept, monkeypatch):
    monkeypatch.setattr(outputs_listed, "MOST_LISTED_BYTES", 1 << 20)

    def forever():
        number = 0
        while True:
            number += 1
            yield entry(f"{number}")

    lying(kept, forever())
    with pytest.raises(HostFailure, match="list of outputs is too long"):
        copy_outputs(kept)


def test_a_content_that_does_not_end(kept):
    def forever():
        yield {"n": 0, "marks": MARKS}
        while True:
            yield frames.encode({"n": 0}, b"x")

    lying(kept, [entry("a")], forever())
    with pytest.raises(HostFailure, match="the file has more than the announced 3 bytes"):
        copy_outputs(kept)


def test_an_honest_host_is_not_held_up_by_one_that_lies(tmp_path, monkeypatch):
    hosts = Hosts(tmp_path)
    job = outputs_job(tmp_path, hosts, "h1", "h2")
    (job.host("h2") / "model").write_text("m")
    lying(job, [entry("../x")])
    assert collect_outputs(job) == {"h1"}
    assert (job.head / "model").read_text() == "m"
    assert job.record.outputs_left.hosts == ("h1",) and "no folder can have" in job.record.outputs_left.words(JOB)
    hosts.close()


# -- what a container leaves ------------------------------------------------------------------------------


def test_a_folder_that_is_swapped_for_a_link_leads_no_removal_out(tmp_path, swap, outside):
    for _ in range(30):
        (tmp_path / "tree/step").mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(tmp_path / "tree/other"):
            (tmp_path / "tree/other").symlink_to(outside)
        with meanwhile(lambda: swap(tmp_path / "tree/step", tmp_path / "tree/other")), suppress(OSError):
            below.remove_path(f"{tmp_path}/tree")
    below.remove_path(f"{tmp_path}/tree")


@pytest.mark.parametrize("depth", [3, 1500])
def test_folders_of_any_depth_are_removed(tmp_path, depth):
    (tmp_path / "tree").mkdir()
    here = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    below.remove_path(f"{tmp_path}/tree")
    assert not (tmp_path / "tree").exists()
    assert opened_below(tmp_path) == []


def opened_below(folder):
    """What this process has open there: what else its threads open and close is nobody's business."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    return [path for path in found if path.startswith(f"{folder}/")]


def test_what_nobody_can_copy_is_named(deep, job):
    """Paths longer than any that can be opened, and sockets."""
    here = os.open(job.host(), os.O_RDONLY)
    for _ in range(200):
        os.mkdir("x" * 255, dir_fd=here)
        inner = os.open("x" * 255, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    (job.host() / "model").write_text("m")
    assert collect_outputs(job) == {"h1"}
    left = job.record.outputs_left
    assert left.hosts == ("h1",) and "longer than" in left.words(JOB)
    assert (job.head / "model").read_text() == "m"


@pytest.mark.parametrize("when_s", [1 << 33, 1 << 34, -(1 << 31), 0])
def test_files_of_any_time_come_home(job, when_s):
    """Their times need more than 62 bits of nanoseconds."""
    (job.host() / "model").write_text("m")
    os.utime(job.host() / "model", (when_s, when_s))
    assert collect_outputs(job) == set()
    assert (job.head / "model").read_text() == "m" and job.record.outputs_left is None


def test_a_lease_on_a_file_makes_nobody_wait(job):
    """The kernel would let who opens it wait for 45 s."""
    with (job.host() / "held").open("w") as file:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        began_s = time.monotonic()
        copy_outputs(job)
        assert time.monotonic() - began_s < 20
        assert not (job.head / "held").exists()
    copy_outputs(job)
    assert (job.head / "held").exists()
