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
