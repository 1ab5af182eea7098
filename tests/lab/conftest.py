"""Fixtures with labs: ``lab`` is up, complete and healthy at the start of every test that uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cluster import Cluster
from faulting import wait_until
from own_labs import own_lab

from gpurun.lab import Lab, LabSpec


def pytest_collection_modifyitems(items):
    """Run long tests first, so that parallel processes finish at the same time.

    Without root there is no lab: report that once, and run the other tests.
    """
    here = Path(__file__).parent
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if here in item.path.parents and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="a lab needs root: sudo -E make test"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails says what its jobs did."""
    report = (yield).get_result()
    clusters = [each for each in getattr(item, "funcargs", {}).values() if isinstance(each, Cluster)]
    if report.failed and clusters:
        report.sections.append(("jobs", clusters[0].saw()))


@pytest.fixture(scope="session")
def session_lab():
    """A 2 × 2 × 4 lab that only this test process uses."""
    with own_lab("test") as lab:
        yield lab


@pytest.fixture(scope="session")
def train_lab():
    """Four hosts with their own disks, which keep the training image across sessions."""
    with own_lab("train", gpus=2, disk_mib=8 << 10) as lab:
        yield lab


@pytest.fixture
def lab(session_lab):
    """The session's lab with every host switched on and connected."""
    session_lab.up(LabSpec(session_lab.name))
    return session_lab


@pytest.fixture
def named_lab():
    """Make labs of other shapes; they are taken down and purged at the end of the test."""
    made = []

    def make(name: str) -> Lab:
        made.append(Lab(f"t{os.getpid()}-{name}"))
        return made[-1]

    yield make
    for each in made:
        each.down(purge=True)


@pytest.fixture
def cluster(train_lab, tmp_path):
    """A cluster with its own state directory. At the end, nothing of any job may be left."""
    made = Cluster(train_lab, tmp_path)
    yield made
    made.cancel_all()
    made.assert_nothing_left()
    made.end_processes()


@pytest.fixture
def mended(train_lab, tmp_path):
    """Like `cluster`, but switches on and connects all hosts at the end."""
    made = Cluster(train_lab, tmp_path)
    yield made
    for host in train_lab.hosts:
        train_lab.boot(host.name)
        train_lab.heal(host.name)
    made.cancel_all()
    wait_until(lambda: not list((made.home / "leases").glob("[!.]*")))
    made.assert_nothing_left()
    made.end_processes()
