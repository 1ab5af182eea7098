"""The table of what tests cost is written whatever happens to the processes that run them."""

from __future__ import annotations

import csv

import pytest
from timing import Timing


def test_a_test_whose_process_died_has_a_row(tmp_path):
    """Its report has neither a phase nor CPU time; an error here ended the whole run, and hid what else had failed."""
    timing = Timing(tmp_path / "times.csv")
    where = ("tests/test_x.py", 1, "test_x")
    timing.pytest_runtest_logreport(pytest.TestReport("tests/test_x.py::test_x", where, {}, "failed", "it died", "???"))
    timing.pytest_sessionfinish()
    with timing.path.open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["test"], row["failed"], row["call_s"]) == ("tests/test_x.py::test_x", "it died", "0.0")
