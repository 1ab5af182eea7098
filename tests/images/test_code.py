"""A job's code is what its submission saw, whatever becomes of the folder."""

from __future__ import annotations

import errno
import io
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from gpurun.content import workdir
from gpurun.content.tree import scan
from gpurun.content.workdir import Code, CodeStore, write_code
from gpurun.errors import BadInput, StateDiskError, StateError
from gpurun.jobs.folder import CODES
from gpurun.jobs.store import sweep
from gpurun.state.paths import StatePath


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def work(tmp_path):
    top = tmp_path / "work"
    (top / "pkg").mkdir(parents=True)
    (top / "train.py").write_text("v1")
    (top / "same").write_text("v1")
    (top / "empty").touch()
    (top / "link").symlink_to("/etc/passwd")
    (top / os.fsdecode(b"caf\xe9 '\n")).write_bytes(b"\xff\0\n")
    (top / "pkg/large").write_bytes(os.urandom(5 << 20))
    return top


@pytest.fixture
def kept(work, tmp_path):
    path = StatePath(tmp_path) / "code"
    write_code(path, scan(work))
    return path


def contents(tree):
    return {entry.path: b"".join(tree.content(digest)) for digest, entry in tree.files.items()}


def test_it_holds_what_was_there_when_the_folder_is_gone(work, kept):
    before = scan(work)
    entries, all_of_it = before.entries, contents(before)
    shutil.rmtree(work)
    code = Code(kept)
    assert code.entries == entries
    assert contents(code) == all_of_it
    assert code.digest == before.digest
    assert all_of_it[os.fsdecode(b"caf\xe9 '\n")] == b"\xff\0\n"


def test_nobody_else_reads_it(kept):
    assert kept.stat().st_mode & 0o777 == 0o600


def touched(work):
    os.utime(work / "train.py", (1, 1))


def written(work):
    (work / "train.py").write_text("v2")


def executable(work):
    (work / "train.py").chmod(0o755)


def led_elsewhere(work):
    (work / "link").unlink()
    (work / "link").symlink_to("/etc/shadow")


def moved(work):
    (work / "train.py").rename(work / "other.py")


@pytest.mark.parametrize(
    ("change", "is_same"),
    [(touched, True), (written, False), (executable, False), (led_elsewhere, False), (moved, False)],
)
def test_its_digest_names_all_but_the_times(work, change, is_same):
    before = scan(work).digest
    change(work)
    assert (scan(work).digest == before) is is_same


def test_a_file_that_changes_between_scan_and_copy_is_named(work, tmp_path):
    tree = scan(work)
    (work / "train.py").write_text("half")
    (work / "same").write_text("half")
    with pytest.raises(BadInput, match="changed while gpurun read it"):
        write_code(StatePath(tmp_path) / "code", tree)


@pytest.mark.parametrize(
    "first",
    [
        b"", b"\n", b"[1]\n", b"{}\n", b'[["a","file",420,0,"9","sha256:0",""]]\n', b'[["a"]]\n', b"\xff\n",
        b"[" * 200_000 + b"\n", b'[["a","file",420,0,1,"x","","more"]]\n',
    ],
)  # fmt: skip
def test_a_damaged_index_is_told(kept, first):
    Path(kept.plain).write_bytes(first)
    with pytest.raises(StateError, match="damaged"):
        Code(kept)


def test_a_damaged_content_is_told_and_never_sent_as_sound(kept):
    data = Path(kept.plain).read_bytes()
    for harmed in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data[: len(data) - (5 << 20)]):
        Path(kept.plain).write_bytes(harmed)
        with pytest.raises(StateError, match="differs from the submitted file"):
            contents(Code(kept))


def test_a_link_in_its_place_is_not_followed(work, kept, tmp_path):
    Path(kept.plain).rename(tmp_path / "elsewhere")
    Path(kept.plain).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="link"):
        Code(kept)


def test_a_full_disk_is_an_error_with_a_next_step(work, tmp_path, monkeypatch):
    monkeypatch.setattr("gpurun.state.durable.os.write", full)
    with pytest.raises(StateDiskError, match="disk of the state directory is full"):
        write_code(StatePath(tmp_path) / "code", scan(work))


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture
def jobs(tmp_path):
    """The folder of all jobs."""
    (tmp_path / "home/jobs").mkdir(parents=True)
    return StatePath(tmp_path / "home") / "jobs"


def add(jobs, tree, name):
    (jobs / name).mkdir()
    CodeStore(jobs.home).add(jobs / name / "code", tree)
    return jobs / name / "code"


def stored(jobs):
    """Path of each stored code."""
    return [jobs / name / each for name in jobs.names() if name.startswith(CODES) for each in (jobs / name).names()]


def cleaned(jobs):
    sweep(jobs, jobs / "live", now_s=0.0)
    return stored(jobs)


def inode(path):
    return path.stat().st_ino


def test_equal_code_is_kept_once_and_only_for_its_user(work, jobs):
    one, two = add(jobs, scan(work), "1"), add(jobs, scan(work), "2")
    (kept,) = stored(jobs)
    assert inode(one) == inode(two) == inode(kept)
    assert (one.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    written(work)
    assert inode(add(jobs, scan(work), "3")) != inode(one)
    assert len(cleaned(jobs)) == 2


def test_code_without_a_job_goes_and_code_with_one_stays(work, jobs):
    one, two = add(jobs, scan(work), "1"), add(jobs, scan(work), "2")
    one.unlink()
    assert len(cleaned(jobs)) == 1
    two.unlink()
    assert cleaned(jobs) == [] and not [name for name in jobs.names() if name.startswith(CODES)]
    assert contents(Code(add(jobs, scan(work), "3"))) == contents(scan(work))


def test_code_that_cannot_be_removed_keeps_no_other(work, jobs, monkeypatch):
    """As an immutable file (chattr +i)."""
    for number in range(4):
        (work / "train.py").write_text(f"v{number}")
        add(jobs, scan(work), str(number)).unlink()
    real, stays = os.unlink, sorted(path.name for path in stored(jobs))[:3]

    def unlink(name, **options):
        if name in stays:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real(name, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    assert sorted(path.name for path in cleaned(jobs)) == stays


@pytest.mark.parametrize("harm", ["content", "index", "cut", "other", "folder", "link", "pipe"])
def test_a_job_never_gets_stored_code_that_is_damaged(work, jobs, tmp_path, harm):
    add(jobs, scan(work), "1")
    (kept,) = stored(jobs)
    path, data = Path(kept.plain), Path(kept.plain).read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "link":
        (tmp_path / "far").write_bytes(data)
        path.symlink_to(tmp_path / "far")
    elif harm == "pipe":
        os.mkfifo(path)
    else:
        told = {"content": data[:-1] + bytes([data[-1] ^ 1]), "index": b"[]" + data, "cut": data[:-1]}
        other = scan(work / "pkg")
        path.write_bytes(told.get(harm, b""))
        if harm == "other":
            path.unlink()
            write_code(kept, other)
    two = add(jobs, scan(work), "2")
    assert contents(Code(two)) == contents(scan(work)) and Code(two).digest == scan(work).digest
    if harm != "folder":
        assert inode(add(jobs, scan(work), "3")) == inode(two), "what was damaged has made place for it"


def test_a_file_whose_change_its_times_do_not_show_never_gets_stored_code(work, jobs, monkeypatch):
    """As one that a program changes through a mapping: its times change only with the first write to a page."""
    monkeypatch.setattr("gpurun.content.tree.RACY_S", -1.0)
    monkeypatch.setattr("gpurun.content.tree._marks", lambda status: [status.st_size])
    add(jobs, scan(work), "1")
    data = (work / "train.py").read_bytes()
    (work / "train.py").write_bytes(data[:-1] + b"#")
    (jobs / "2").mkdir()
    with pytest.raises(BadInput, match="changed while gpurun read it"):
        CodeStore(jobs.home).add(jobs / "2" / "code", scan(work))
    assert stored(jobs) and (jobs / "2").names() == [], "what is stored is not at fault"
    assert contents(Code(add(jobs, scan(work), "3"))) == contents(scan(work)), "the next scan reads all files again"


def test_stored_code_on_a_failing_disk_is_not_used(work, jobs, monkeypatch):
    class Failing(io.BytesIO):
        def readline(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    one = add(jobs, scan(work), "1")
    with monkeypatch.context() as patch:
        patch.setattr(StatePath, "reader", lambda *_, **__: Failing())
        (jobs / "2").mkdir()
        CodeStore(jobs.home).add(jobs / "2" / "code", scan(work))
    assert inode(jobs / "2" / "code") != inode(one)
    assert contents(Code(jobs / "2" / "code")) == contents(scan(work))


def test_of_two_submissions_at_once_one_writes_what_stays(work, jobs, monkeypatch):
    real = write_code

    def slow(path, tree):
        monkeypatch.setattr(workdir, "write_code", real)
        add(jobs, scan(work), "quicker")
        real(path, tree)

    monkeypatch.setattr(workdir, "write_code", slow)
    late = add(jobs, scan(work), "late")
    assert inode(late) == inode(jobs / "quicker/code") and (jobs / "late").names() == ["code"]


def test_a_file_with_all_names_that_a_file_may_have_gets_a_successor(work, jobs, monkeypatch):
    one, real = add(jobs, scan(work), "1"), StatePath.link

    def full(path, to):
        if inode(path) == inode(one):
            raise StateError("cannot be linked: Too many links", where=str(to))
        real(path, to)

    monkeypatch.setattr(StatePath, "link", full)
    two = add(jobs, scan(work), "2")
    assert inode(two) != inode(one) and inode(add(jobs, scan(work), "3")) == inode(two)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_store_in_which_others_can_write_is_not_used(work, jobs, mode):
    Path((jobs / f"{CODES}{os.getuid()}").plain).mkdir()
    Path((jobs / f"{CODES}{os.getuid()}").plain).chmod(mode)
    add(jobs, scan(work), "1")
    assert stored(jobs) == []


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to somebody else")
def test_a_store_that_somebody_else_made_is_not_used(work, jobs):
    folder = Path((jobs / f"{CODES}0").plain)
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    write_code(jobs / f"{CODES}0" / scan(work).digest.removeprefix("sha256:"), scan(work))
    before = inode(stored(jobs)[0])
    assert inode(add(jobs, scan(work), "1")) != before and [inode(path) for path in stored(jobs)] == [before]


class Crash(BaseException):
    pass


@pytest.fixture(params=[[], ["1"], ["damaged"]], ids=["nothing", "a job", "damaged code"])
def before(request):
    """Jobs that had the code before."""
    return request.param


def begin(jobs, work, before):
    for name in before:
        add(jobs, scan(work), name)
    if "damaged" in before:
        Path(stored(jobs)[0].plain).write_bytes(b"[]")


@pytest.mark.parametrize("call", ["mkdir", "open", "link", "rename", "unlink", "fsync", "write"])
def test_a_crash_at_any_step_harms_no_job_and_leaves_nothing(work, jobs, monkeypatch, call, before):
    """Killed at the first call, then at the second, …; then the next submission, and all jobs are removed."""
    real = getattr(os, call)
    for dies_at in range(1, 100):
        begin(jobs, work, before)
        tree, calls = scan(work), [0]

        def dying(*arguments, calls=calls, dies_at=dies_at, **options):
            calls[0] += 1
            if calls[0] >= dies_at:
                raise Crash
            return real(*arguments, **options)

        with monkeypatch.context() as patch, suppress(Crash):
            patch.setattr(os, call, dying)
            add(jobs, tree, "2")
        three, four = add(jobs, scan(work), "3"), add(jobs, scan(work), "4")
        assert inode(three) == inode(four)
        for path in (three, four, *(jobs / name / "code" for name in before if name == "1")):
            assert contents(Code(path)) == contents(scan(work))
        for job in jobs.names():
            if not job.startswith(CODES):
                (jobs / job).rmtree()
        assert cleaned(jobs) == []
        if calls[0] < dies_at:
            break
    assert dies_at < 99
