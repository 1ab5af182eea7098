"""Which lab tests a change needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tiers

import gpurun

TESTS = Path(__file__).parent


def test_each_file_of_lab_tests_says_what_it_is_about():
    files = {
        path.stem
        for path in TESTS.rglob("test_*.py")
        if "pytest.mark.lab" in path.read_text() and path != Path(__file__)
    }
    assert set(tiers.ROOMS) == files
    packages = {path.parent.name for path in Path(gpurun.__file__).parent.glob("*/__init__.py")}
    assert {room for rooms in tiers.ROOMS.values() for room in rooms.split()} <= {
        *packages,
        "recipes",
        "ci",
        "facts",
        "faults",
    }


@pytest.mark.parametrize(
    ("path", "room"),
    [("gpurun/leases/store.py", "leases"), ("gpurun/node/job/gang.py", "node"), ("gpurun/faults.py", "faults"),
     ("recipes/images/build.py", "recipes"), (".ci/fresh.py", "ci"), ("tests/lab/faulting.py", "faulting"),
     ("README.md", ""), ("docs/lab.md", ""), ("a 'b'\n.py", "")],
)  # fmt: skip
def test_a_changed_file_belongs_to_a_room(path, room):
    assert tiers.room_of(path) == room


def test_a_file_of_tests_is_needed_for_its_rooms_itself_and_what_it_imports():
    text = "import pytest\nfrom scene import Scene\n"
    for touched, needed in [("leases", True), ("test_claims", True), ("scene", True), ("web", False), ("", False)]:
        assert tiers.is_touched("test_claims", text, {touched, "none"}) is needed
        assert tiers.is_touched("test_claims", text, {touched}, alone=True) is (needed and touched != "leases")


MODULE = '"""About it."""\n\nX = 1\n"""One."""\n\ndef f():\n    """Return it."""\n    return X\n'


@pytest.mark.parametrize(
    ("now", "same"),
    [(MODULE.replace("One.", "1."), True), (MODULE.replace("X = 1", "X = 1  # one"), True),
     (MODULE.replace('    """Return it."""\n', ""), True), (MODULE.replace("X = 1", "X = 2"), False),
     (MODULE.replace("return X", "return 'X'"), False), ("", False), (None, False), ("print 1", False),
     ("\0", False)],
)  # fmt: skip
def test_comments_and_docstrings_are_no_change(now, same):
    assert tiers.does_the_same(MODULE, now) is same and tiers.does_the_same(now, MODULE) is same


def test_a_file_that_comes_or_goes_is_a_change(tmp_path):
    def git(*argv):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, *argv], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("gpurun/leases/store.py", "gpurun/head/spawn.py", "gpurun/web/page.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"X = 1\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    (tmp_path / "gpurun/leases/store.py").rename(tmp_path / "gpurun/jobs.py")
    (tmp_path / "gpurun/head/spawn.py").write_text("# Says more.\nX = 1\n")
    (tmp_path / "gpurun/web/page.bin").write_bytes(b"\xff")
    git("add", "-A")
    git("commit", "-qm", "second")
    assert tiers.rooms_changed(tmp_path, "HEAD~1") == {"leases", "jobs", "web"}


def test_five_changes_run_each_test():
    names = [f"tests/lab/test_x.py::test_{number}" for number in range(1000)]
    counts = [sum(tiers.fifth_of(name) == turn for name in names) for turn in range(tiers.FIFTHS)]
    assert sum(counts) == 1000 and min(counts) > 150


def test_without_a_base_a_change_is_what_a_session_committed(tmp_path):
    def git(*argv, day="2026-01-01", hour=0):
        date = {"GIT_COMMITTER_DATE": f"{day}T{hour:02}:00:00+00:00"}
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", *who, *argv], cwd=tmp_path, env=date, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "--allow-empty", "-qm", "first", hour=1)
    assert tiers.base_of(tmp_path) == git("rev-parse", "HEAD")
    git("commit", "--allow-empty", "-qm", "before", hour=9)
    before = git("rev-parse", "HEAD")
    for hour in (16, 17, 18):
        git("commit", "--allow-empty", "-qm", "now", hour=hour)
    assert tiers.base_of(tmp_path) == before
