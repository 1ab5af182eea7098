"""A sample of the crash tests on every run; `benchmarks/bench_reliability.py` does all of them."""

from __future__ import annotations

import pytest
from cluster import Cluster
from crashing import build_image, crash_once
from own_labs import own_lab

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("crash")]


@pytest.fixture(scope="module")
def crash_lab(tmp_path_factory):
    with own_lab("crash", racks=1, gpus=2) as lab:
        build_image(tmp_path_factory.mktemp("image"))
        yield lab


@pytest.fixture
def cluster(crash_lab, tmp_path):
    return Cluster(crash_lab, tmp_path)


@pytest.mark.parametrize("point", range(1, 14, 3))
def test_submit_dies(cluster, point):
    crash_once(cluster, "command", point)


@pytest.mark.parametrize("point", [1, 3, 5, 7, 9, 11, 13, 15, 17, 20, 25, 30, 35, 40])
def test_a_supervisor_dies(cluster, point):
    crash_once(cluster, "supervisor", point)
