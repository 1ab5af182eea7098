"""A job's outputs on their way to the head and back: real agents on folders of this machine."""

from __future__ import annotations

import errno
import os
import stat
from itertools import groupby, pairwise

import pytest
from outputs_world import JOB, meanwhile, outputs_job, removed_later, shape

from gpurun.errors import HostFailure, StateError, StateUnavailable
from gpurun.supervisor.outputs.listing import Unbrought
from gpurun.supervisor.outputs.outputs import collect_leaving, collect_outputs, copy_outputs, send_outputs


@pytest.fixture
def deep(tmp_path):
    yield from removed_later(tmp_path)


@pytest.fixture
def job(tmp_path, world):
    return outputs_job(tmp_path, world, "h1")


@pytest.fixture
def elastic(tmp_path, world):
    return outputs_job(tmp_path, world, "h1", "h2", elastic=True)


def files(job):
    return {str(path.relative_to(job.head)): path.read_bytes() for path in job.head.rglob("*") if path.is_file()}


def test_ordinary_folders_come_home(job):
    """Links that lead anywhere, folders that keep their owner from writing, names of any bytes, deep folders, holes."""
    (job.host() / "deep" / "er").mkdir(parents=True)
    (job.host() / "deep/er/old model").write_bytes(b"m" * 1_000_000)
    (job.host() / "latest").symlink_to("/checkpoints/5")
    (job.host() / "up").symlink_to("../../../etc/passwd")
    (job.host() / "itself").symlink_to("itself")
    (job.host() / os.fsdecode(b"caf\xe9 '\n$(x)")).write_text("no UTF-8")
    (job.host() / ("x" * 255)).write_text("long")
    (job.host() / "ro").mkdir()
    (job.host() / "ro/file").write_text("x")
    (job.host() / "ro/file").chmod(0o400)
    (job.host() / "ro").chmod(0o555)
    (job.host() / "empty").touch()
    with (job.host() / "sparse").open("wb") as file:
        file.seek(40 << 20)
        file.write(b"data in the middle")
        file.truncate(96 << 20)
    there = shape(job.host())
    assert collect_outputs(job) == set()
    assert shape(job.head) == there
    assert (job.head / "sparse").stat().st_blocks * 512 < 10 << 20
    assert job.record.outputs_left is None and job.notes == []
    assert not job.host().exists()
    assert sorted(path.name for path in job.folder.path.plain.iterdir()) == ["outputs", "outputs.lock"]


def test_what_is_no_file_is_left_out_and_named(job):
    (job.host() / "model").write_text("m")
    os.mkfifo(job.host() / "pipe")
    assert collect_outputs(job) == set()
    assert files(job) == {"model": b"m"}
    assert job.record.outputs_left.words(JOB) == "not all outputs are on the head: 'pipe' is a FIFO"
    assert not job.host().exists(), "a pipe has no content that could be lost"


KINDS = {
    "file": lambda path: path.write_text("content"),
    "folder": lambda path: (path.mkdir(), (path / "inner").write_text("content")),
    "link": lambda path: path.symlink_to("/etc"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_anything_may_become_anything(job, before, after):
    for kind in (before, after, before):
        os.system(f"rm -rf '{job.host()}'/*")
        (job.host() / "anchor").touch()
        KINDS[kind](job.host() / "it")
        copy_outputs(job)
        there = shape(job.host())
        if kind == "pipe":
            there.pop(b"it", None)
        assert shape(job.head) == there


def test_only_what_has_changed_is_sent_and_what_is_gone_goes(job, monkeypatch):
    asked = []
    stream = job.links.agent("h1").stream

    def counted(op, *, payload_in=None, **params):
        if op == "outputs.read":
            payload_in = list(payload_in)
            asked.append(b"".join(payload_in).count(b'{"p":'))
        return stream(op, payload_in=payload_in, **params)

    monkeypatch.setattr(job.links.agent("h1"), "stream", counted)
    (job.host() / "old").write_bytes(b"m" * 1_000_000)
    (job.host() / "step").write_text("1")
    copy_outputs(job)
    copy_outputs(job)
    (job.host() / "step.new").write_text("2")
    (job.host() / "step.new").rename(job.host() / "step")
    first = (job.head / "old").stat().st_ino
    copy_outputs(job)
    assert asked == [2, 1]
    assert (job.head / "old").stat().st_ino == first
    (job.host() / "old").unlink()
    copy_outputs(job)
    assert files(job) == {"step": b"2"}


def test_a_file_of_the_same_size_and_time_that_was_replaced_is_sent(job):
    (job.host() / "step").write_text("1")
    os.utime(job.host() / "step", ns=(5, 5))
    copy_outputs(job)
    (job.host() / "step").write_text("2")
    os.utime(job.host() / "step", ns=(5, 5))
    copy_outputs(job)
    assert files(job) == {"step": b"2"}


def letters_of(path):
    """The letters of a file's runs, in order."""
    return "".join(letter for letter, _ in groupby(path.read_text()))


def test_a_file_that_is_being_written_is_never_torn(job):
    """Each letter is written over the one before. A copy holds one letter, or what the writer had done at one moment.

    A writer can stop for as long as the machine is busy: then nothing tells its file from one that is whole.
    """
    path = job.host() / "model"
    path.write_bytes(b"a" * 3_000_000)
    copy_outputs(job)
    letters = iter("bcdefgh" * 10_000)
    moments = {*"abcdefgh", *(newer + older for older, newer in pairwise("abcdefghb"))}

    def write():
        with path.open("r+b") as file:
            letter = next(letters).encode()
            for _ in range(30):
                file.write(letter * 100_000)
                file.flush()

    with meanwhile(write):
        for _ in range(5):
            copy_outputs(job)
            assert letters_of(job.head / "model") in moments
    assert collect_outputs(job) == set()
    assert letters_of(job.head / "model") in set("bcdefgh") and job.record.outputs_left is None


def test_hard_links_stay_hard_links_and_travel_once(job):
    (job.host() / "a").write_bytes(os.urandom(500_000))
    os.link(job.host() / "a", job.host() / "b")
    copy_outputs(job)
    assert shape(job.head) == shape(job.host())
    assert (job.head / "a").stat().st_ino == (job.head / "b").stat().st_ino


def test_a_copy_that_was_removed_from_the_head_is_made_again(job):
    (job.host() / "a").write_text("1")
    copy_outputs(job)
    (job.head / "a").unlink()
    (job.host() / "b").write_text("1")
    copy_outputs(job)
    assert files(job) == {"a": b"1", "b": b"1"}


def test_a_cancelled_copy_leaves_the_one_before(job):
    (job.host() / "a").write_text("1")
    copy_outputs(job)
    (job.host() / "a").write_text("22")
    with pytest.raises(HostFailure, match="cancelled"):
        copy_outputs(job, cancelled=lambda: True)
    assert files(job) == {"a": b"1"}
    assert collect_outputs(job) == set()
    assert files(job) == {"a": b"22"}


def test_of_a_host_that_is_gone_the_head_keeps_what_it_has(elastic):
    (elastic.host("h2") / "newer").write_text("2")
    elastic.head.mkdir()
    (elastic.head / "older").write_text("1")
    elastic.links.silent = {"h1"}
    assert collect_outputs(elastic) == {"h1"}
    assert sorted(files(elastic)) == ["newer", "older"]
    assert elastic.record.outputs_left.hosts == ("h1",)
    assert elastic.host("h1").exists() and not elastic.host("h2").exists()


def test_when_rank_0_moves_to_another_host_the_first_ones_files_stay(elastic):
    (elastic.host("h1") / "metrics").write_text("of the first host")
    (elastic.host("h1") / "rotated").write_text("1")
    copy_outputs(elastic)
    (elastic.host("h1") / "rotated").unlink()
    copy_outputs(elastic)
    assert sorted(files(elastic)) == ["metrics"]
    elastic.hosts = elastic.members = ("h2",)
    (elastic.host("h2") / "model").write_text("m")
    copy_outputs(elastic)
    assert sorted(files(elastic)) == ["metrics", "model"]


def written(path, text, at_s):
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def test_of_a_host_that_leaves_the_head_has_everything_and_the_newest_has_the_name(elastic):
    written(elastic.host("h2") / "model", "older", 1_000_000)
    written(elastic.host("h2") / "profile", "of h2 alone", 1_000_000)
    written(elastic.host("h1") / "model", "newer", 2_000_000)
    elastic.members = ("h1",)
    assert collect_leaving(elastic, ["h2"]) == []
    assert files(elastic) == {"model": b"newer", "model.h2": b"older", "profile": b"of h2 alone"}
    assert elastic.host("h1").exists() and not elastic.host("h2").exists()
    assert set(elastic.outputs.listed) == {"h1"}, "nothing is remembered of hosts that have left"
    copy_outputs(elastic)
    assert files(elastic) == {"model": b"newer", "model.h2": b"older", "profile": b"of h2 alone"}


def test_a_member_that_does_not_answer_keeps_no_other_host_from_leaving(elastic):
    (elastic.host("h2") / "profile").write_text("of h2 alone")
    elastic.members, elastic.links.silent = ("h1",), {"h1"}
    assert collect_leaving(elastic, ["h2"]) == []
    assert files(elastic) == {"profile": b"of h2 alone"}


def breaks_off(*_, **__):
    raise HostFailure("it sent 1 of 2 files", host="h2")


def cannot_write(*_, **__):
    raise StateError("cannot be copied: File name too long", where="outputs")


@pytest.mark.parametrize("failing", [breaks_off, cannot_write])
def test_a_host_that_leaves_keeps_its_outputs_until_the_head_has_them(elastic, monkeypatch, failing):
    (elastic.host("h2") / "profile").write_text("of h2 alone")
    elastic.members = ("h1",)
    with monkeypatch.context() as patch:
        patch.setattr(elastic.outputs, "replace", failing)
        (left,) = collect_leaving(elastic, ["h2"])
        assert (left.host, left.path, left.may_come) == ("h2", "", True)
    assert (elastic.host("h2") / "profile").exists()
    assert collect_leaving(elastic, ["h2"]) == []
    assert files(elastic) == {"profile": b"of h2 alone"} and not elastic.host("h2").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENOMEM])
def test_a_head_whose_disk_is_full_or_that_is_short_removes_nothing_on_a_host_that_leaves(elastic, monkeypatch, number):
    """What may pass is no reason to give outputs up: the copy is tried again."""

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    (elastic.host("h2") / "profile").write_text("of h2 alone")
    elastic.members = ("h1",)
    monkeypatch.setattr(elastic.outputs, "_replace", fails)
    with pytest.raises(StateUnavailable):
        collect_leaving(elastic, ["h2"])
    assert (elastic.host("h2") / "profile").exists()


def test_a_host_that_leaves_keeps_its_outputs_when_the_copy_was_cancelled(elastic):
    (elastic.host("h2") / "profile").write_text("of h2 alone")
    elastic.members = ("h1",)
    assert collect_leaving(elastic, ["h2"], cancelled=lambda: True)
    assert (elastic.host("h2") / "profile").exists()


def test_what_a_host_that_leaves_does_not_give_is_named_and_stays_there(elastic, monkeypatch):
    (elastic.host("h2") / "profile").write_text("of h2 alone")
    (elastic.host("h2") / "\x1b[2J secret").write_text("of another account")
    replace = elastic.outputs.replace

    def without_one(agents, hosts, **options):
        return (*replace(agents, hosts, **options), Unbrought("h2", "\x1b[2J secret", "Permission denied"))

    monkeypatch.setattr(elastic.outputs, "replace", without_one)
    elastic.members = ("h1",)
    (left,) = collect_leaving(elastic, ["h2"])
    assert not left.may_come and "\x1b" not in left.words
    assert (elastic.host("h2") / "profile").exists(), "all of it stays, as at the end of a gang"


def test_a_host_that_leaves_and_does_not_answer_is_asked_again(elastic):
    elastic.members, elastic.links.silent = ("h1",), {"h2"}
    assert [(each.host, each.may_come) for each in collect_leaving(elastic, ["h2"])] == [("h2", True)]


def test_a_host_that_was_leaving_when_the_gang_ended_has_its_outputs_brought(elastic):
    (elastic.host("h2") / "profile").write_text("of h2 alone")
    elastic.members = ("h1",)
    assert collect_outputs(elastic) == set()
    assert files(elastic) == {"profile": b"of h2 alone"}
    assert not elastic.host("h2").exists()


def test_a_restart_sends_only_what_the_host_lacks_and_replaces_nothing_newer(job):
    (job.host() / "sub").mkdir()
    for name in ("same", "sub/newer there", "older there", "kind"):
        (job.host() / name).write_text("1")
    (job.host() / "link").symlink_to("/nowhere")
    (job.host() / "ro").mkdir(0o555)
    copy_outputs(job)
    there = shape(job.host())
    (job.host() / "sub/newer there").write_text("22")
    os.utime(job.host() / "older there", ns=(5, 5))
    (job.host() / "only there").write_text("3")
    (job.host() / "kind").unlink()
    (job.host() / "kind").mkdir()
    (job.host() / "link").unlink()
    (job.host() / "ro").rmdir()
    send_outputs(job)
    assert (job.host() / "sub/newer there").read_text() == "22"
    assert (job.host() / "only there").read_text() == "3"
    assert (job.host() / "kind").is_dir()
    sent = shape(job.host())
    assert [sent[name] for name in (b"older there", b"same", b"link", b"ro")] == [
        there[name] for name in (b"older there", b"same", b"link", b"ro")
    ]
    os.system(f"rm -rf {job.host()}")
    send_outputs(job)
    assert shape(job.host()) == there
    assert sorted(path.name for path in job.host().parent.iterdir()) == [JOB]


def test_an_attempt_that_ran_nothing_replaces_nothing_on_the_head(job):
    """It died while it was being prepared: the host has a part of what the head has."""
    (job.host() / "part").write_text("1")
    job.head.mkdir()
    (job.head / "whole").write_text("2")
    job.record.reached = "files"
    assert collect_outputs(job) == set()
    assert files(job) == {"whole": b"2"} and not job.host().exists()


def test_many_small_files(job):
    for folder in range(20):
        (job.host() / str(folder)).mkdir()
        for number in range(150):
            (job.host() / f"{folder}/{number}").write_bytes(b"%d" % number)
    copy_outputs(job)
    assert sum(1 for _ in job.head.rglob("*")) == 3_020
    assert (job.head / "19/149").read_bytes() == b"149"


def test_a_thousand_folders_deep(deep, job):
    here = os.open(job.host(), os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("deep", dir_fd=here)
        inner = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    assert collect_outputs(job) == set()
    assert job.record.outputs_left is None
    here, depth = os.open(job.head, os.O_RDONLY), 0
    while stat.S_ISDIR(os.stat(name := os.listdir(here)[0], dir_fd=here).st_mode):
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here, depth = inner, depth + 1
    os.close(here)
    assert (depth, name) == (1000, "bottom")
    assert not job.host().exists()
