"""A lab for whoever needs one: ``lab`` is up, whole and healthy at the start of every test that asks for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.lab import Lab, LabSpec
from gpurun.lab.paths import RUNTIME

_SLOTS = 9


def pytest_collection_modifyitems(items):
    """Without root there is no lab: say so once, and run the rest."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="a lab needs root"))


@contextmanager
def own_lab(kind: str, **options) -> Iterator[Lab]:
    """A lab of this test process alone: workers of xdist and other sessions get others.

    The names KIND-1, KIND-2 … are taken in turn, so that the hosts' disks, with the images on them, are found
    again by the next session.
    """
    RUNTIME.mkdir(parents=True, exist_ok=True)
    for slot in range(1, _SLOTS + 1):
        with (RUNTIME / f"pytest-{kind}-{slot}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            lab = Lab(f"{kind}-{slot}")
            lab.down()
            lab.up(LabSpec(lab.name, **options))
            yield lab
            lab.down()
            return
    raise AssertionError(f"{_SLOTS} test sessions are running on this machine already")


@pytest.fixture(scope="session")
def session_lab():
    """A 2 × 2 × 4 lab of this test process alone."""
    with own_lab("test") as lab:
        yield lab


@pytest.fixture(scope="session")
def train_lab():
    """Four hosts with disks of their own, on which the training image stays from session to session."""
    with own_lab("train", gpus=2, disk_mib=8 << 10) as lab:
        yield lab


@pytest.fixture
def lab(session_lab):
    """The session's lab with every host on and every cable in."""
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
