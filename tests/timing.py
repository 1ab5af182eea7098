"""Plugin: write what each test costs into a file, in each phase and in CPU time. `.ci/slowest.py` reads such files.

GPURUN_TIMES=build/times/unit.csv pytest …
"""

from __future__ import annotations

import csv
import os
import resource
from collections import defaultdict
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import pytest

LABS = ("cluster", "mended", "lab", "train_lab", "session_lab")
"""Fixtures with a lab that tests share."""
MOST_NAME = 200
"""Some parameters are texts of many kilobytes."""
MOST_WHY = 500


@dataclass
class Cost:
    """What one test costs.

    Attributes:
        setup_s, call_s, teardown_s: seconds of wall time. The first test that uses a shared fixture sets it up.
        cpu_s: CPU seconds of the test's process and of its child processes that have ended. Hosts of a lab and
            supervisors of jobs are other processes.
        shares: the lab that the test uses, and the group whose tests use the same one; empty for quick tests.
        failed: why it failed, in one line; else empty.
    """

    test: str
    setup_s: float = 0.0
    call_s: float = 0.0
    teardown_s: float = 0.0
    cpu_s: float = 0.0
    shares: str = ""
    failed: str = ""


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Timing:
    """In each process: measures CPU time. In the process that the person started: adds up and writes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.costs: dict[str, Cost] = defaultdict(lambda: Cost(""))
        self._before_s = _cpu_s()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        now_s = _cpu_s()
        report.cpu_s, self._before_s = now_s - self._before_s, now_s
        groups = [mark.args[0] for mark in item.iter_markers("xdist_group")]
        labs = [name for name in LABS if name in item.fixturenames] if item.get_closest_marker("lab") else []
        report.shares = " of ".join([*labs[:1], *groups[:1]])

    def pytest_runtest_logreport(self, report):
        if self.path is None:
            return
        cost = self.costs[report.nodeid]
        cost.test = report.nodeid[:MOST_NAME]
        if hasattr(report, "cpu_s"):  # the report on a test whose process has died has none, and no phase
            cost.shares, cost.cpu_s = report.shares, round(cost.cpu_s + report.cpu_s, 2)
            setattr(cost, f"{report.when}_s", round(report.duration, 2))
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            cost.failed = " ".join(str(crash or report.longrepr).split())[:MOST_WHY]

    def pytest_sessionfinish(self):
        if self.path is not None and self.costs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", newline="") as stream:
                table = csv.writer(stream)
                table.writerow([each.name for each in fields(Cost)])
                table.writerows(astuple(cost) for cost in self.costs.values())


def pytest_configure(config):
    wanted = os.environ.pop("GPURUN_TIMES", None)  # tests that run pytest have no file of their own
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Timing(Path(wanted) if wanted and not is_worker else None), "gpurun-timing")
