"""Tests of one group share a lab, so one process runs them all: what the lab's tests rely on."""

from __future__ import annotations

import subprocess
import sys

MODULE = """
import os, pathlib, pytest
pytestmark = pytest.mark.xdist_group("{group}")

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    with pathlib.Path("ran").open("a") as stream:
        stream.write("{group} " + os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_one_process_runs_all_tests_of_a_group(tmp_path):
    for number, group in enumerate(["one", "two", "one"]):
        (tmp_path / f"test_{number}.py").write_text(MODULE.format(group=group))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    ran = (tmp_path / "ran").read_text().split("\n")[:-1]
    assert len(ran) == 18
    assert len({line for line in ran if line.startswith("one ")}) == 1, ran
    assert len({line for line in ran if line.startswith("two ")}) == 1, ran
