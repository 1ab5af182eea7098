"""A sample of the crash tests on every run; `benchmarks/bench_reliability.py` does all of them."""

from __future__ import annotations

import pytest
from cluster import Cluster
from crashing import SCENARIOS, build_image, check_invariants
from own_labs import own_lab

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("crash")]

SAMPLE = {
    "submit": (1, 4, 8, 12),
    "supervisor": (1, 5, 9, 13, 18, 25, 35),
    "supervisor, another job waits": (45,),
    "supervisor, cancelled while it starts": (12,),
    "supervisor, cancelled while it runs": (4, 9),
    "supervisor of an elastic gang": (12, 16, 20, 45, 60),
    "cancel": (1, 2),
    "cancel of a queued job": (2, 4),
    "recover": (1, 2),
    "status": (3,),
    "waiter": (2, 5, 9),
}


@pytest.fixture(scope="module")
def crash_lab(tmp_path_factory):
    with own_lab("crash", racks=1, gpus=2) as lab:
        build_image(tmp_path_factory.mktemp("image"))
        yield lab


@pytest.fixture
def cluster(crash_lab, tmp_path):
    return Cluster(crash_lab, tmp_path)


@pytest.mark.parametrize(("scenario", "point"), [(name, point) for name in SAMPLE for point in SAMPLE[name]])
def test_killed(cluster, scenario, point):
    SCENARIOS[scenario](cluster, point)
    check_invariants(cluster)
