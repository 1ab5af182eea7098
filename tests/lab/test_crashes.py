"""A sample of the crash tests; `benchmarks/bench_reliability.py` does all of them.

Simulated histories kill supervisors, waiters and commands anywhere: `tests/ownership`, `tests/leases/test_machine.py`,
`tests/power`, `tests/gangs`. These tests show the same with real hosts, engines and processes.
"""

from __future__ import annotations

import pytest
from cluster import Cluster
from crashing import SCENARIOS, build_image, check_invariants, fails
from own_labs import own_lab

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("crashes")]

STORIES = {
    "submit": 8,
    "supervisor": 18,
    "supervisor, cancelled while it runs": 4,
}
SAMPLE = {
    "supervisor": (5, 35),
    "supervisor, cancelled while it starts": (12,),
    "supervisor of an elastic gang": (45,),
    "cancel": (1,),
    "cancel of a queued job": (2,),
    "recover": (1,),
    "waiter": (5,),
    "campaign": (12,),
    "conductor": (7,),
}


@pytest.fixture(scope="module")
def crash_lab(tmp_path_factory):
    with own_lab("crash", racks=1, gpus=2) as lab:
        build_image(tmp_path_factory.mktemp("image"))
        yield lab


@pytest.fixture
def cluster(crash_lab, tmp_path):
    return Cluster(crash_lab, tmp_path)


@pytest.mark.story
@pytest.mark.parametrize(("scenario", "point"), STORIES.items())
def test_killed_while_a_job_starts_runs_or_stops(cluster, scenario, point):
    crash = SCENARIOS[scenario](cluster, point)
    check_invariants(cluster)
    assert crash.died


@pytest.mark.parametrize(("scenario", "point"), [(name, point) for name in SAMPLE for point in SAMPLE[name]])
def test_killed(cluster, scenario, point):
    SCENARIOS[scenario](cluster, point)
    check_invariants(cluster)


FAILS = {"supervisor": (40, 300, 700), "waiter": (30, 250)}
"""Which call fails. `gpurun.failing` says what counts; `tests/ownership/test_fail_once.py` tries each of them."""


@pytest.mark.parametrize(("role", "number"), [(role, number) for role in FAILS for number in FAILS[role]])
def test_a_call_fails_and_the_process_lives_on(cluster, role, number):
    assert fails(cluster, role, number) is not None
    check_invariants(cluster)
