"""How busy a gang's GPUs are, from a host's watch to the job's folder."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from gpurun.errors import StateDiskError, StateUnavailable
from gpurun.jobs.folder import read_use
from gpurun.jobs.record import MOST_POINTS, GpuUse, RankUse, thinned
from gpurun.node.gpus import UseTally
from gpurun.state import durable
from gpurun.supervisor.health import GpuUseMeter


def line(index=0, **changes):
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "samples": 30,
        "mean": 50.0,
        "most": 99,
        "memory_mib": 8000,
        **changes,
    }


def test_a_host_adds_up_half_a_minute_but_shorter_at_first():
    now = [0.0]
    tally = UseTally([(0, "GPU-a"), (3, "GPU-b")], clock=lambda: now[0])
    said = {"gpus": [{"index": 0, "use": 40, "memory_mib": 10}, {"index": 3, "use": None, "memory_mib": None}]}
    found = []
    for second in range(1, 80):
        now[0] = float(second)
        found += [(second, item) for item in tally.add(said)]
    assert [second for second, _ in found] == [5, 10, 20, 40, 70]
    assert found[4][1]["gpus"] == [
        {"index": 0, "uuid": "GPU-a", "samples": 30, "mean": 40.0, "most": 40, "memory_mib": 10}
    ]
    assert tally.add({"missing": "no driver"}) == []


def test_what_makes_a_gpu_slow_is_added_up():
    """The clock counts only while the GPU is busy, and a fault only if it holds the clock down most of the time."""
    now = [0.0]
    tally = UseTally([(0, "GPU-a")], clock=lambda: now[0], every_s=4.0)
    hot, link = ["power brake"], {"pcie_width": 8, "pcie_max_width": 16, "pcie_max_generation": 4}
    said = [(100, 1000, hot, 4), (100, 800, hot, 4), (10, 200, [], None), (90, 900, ["hardware slowdown"], 1)]
    for second, (use, clock, throttle, generation) in enumerate(said, 1):
        now[0] = float(second)
        gpu = {"index": 0, "use": use, "memory_mib": 1, "sm_mhz": clock, "throttle": throttle, **link}
        found = tally.add({"gpus": [{**gpu, "pcie_generation": generation}]})
    (item,) = found[0]["gpus"]
    assert (item["sm_mhz"], item["throttle"], item["samples"]) == (900, hot, 4)
    assert [item[key] for key in ("pcie_width", "pcie_max_width", "pcie_generation", "pcie_max_generation")] == [
        8, 16, 1, 4,
    ]  # fmt: skip


def test_ranks_are_added_up_and_survive_a_new_supervisor(carry):
    job = carry(gpus=4)
    meter = GpuUseMeter(job)
    first, second = job.hosts
    meter.add(first, {"gpus": [line(0), line(1, mean=10.0)]})
    meter.add(second, {"gpus": [line(1, mean=70.0)]})
    meter.write()
    again = GpuUseMeter(job)
    again.add(first, {"gpus": [line(0, mean=100.0, samples=90, memory_mib=9000)]})
    again.write()
    use = read_use(job.folder, 1)
    assert [(rank.rank, rank.host, rank.gpu, rank.mean) for rank in use.ranks] == [
        (0, first, 0, 87.5), (1, first, 1, 10.0), (3, second, 1, 70.0),
    ]  # fmt: skip
    assert use.memory_mib == 9000
    assert use.slowest.rank == 1


@pytest.mark.parametrize("error", [StateUnavailable("too many open files"), StateDiskError("the disk failed")])
def test_a_read_that_fails_once_wipes_nothing_out(carry, monkeypatch, error):
    job = carry(gpus=4)
    meter = GpuUseMeter(job)
    meter.add(job.hosts[0], {"gpus": [line(0), line(1)]})
    with monkeypatch.context() as patch:
        patch.setattr(durable, "read_record", Mock(side_effect=error))
        again = GpuUseMeter(job)
        again.add(job.hosts[0], {"gpus": [line(0, mean=0.0)]})
        again.write()
    again.add(job.hosts[0], {"gpus": [line(0, mean=100.0)]})
    again.write()
    assert [(rank.rank, rank.mean) for rank in read_use(job.folder, 1).ranks] == [(0, 75.0), (1, 50.0)]


@pytest.mark.parametrize(
    "said",
    [
        {}, {"gpus": None}, {"gpus": [1]}, {"gpus": [{"index": 0}]}, {"gpus": [line(99)]}, {"gpus": [line(-1)]},
        {"gpus": [line(samples=10**9)]}, {"gpus": [line(samples=0)]}, {"gpus": [line(mean="x")]},
        {"gpus": [line(10**30)]},
    ],
)  # fmt: skip
def test_what_a_host_cannot_mean_is_left_out(carry, said):
    job = carry()
    meter = GpuUseMeter(job)
    meter.add(job.hosts[0], said)
    meter.add("elsewhere", {"gpus": [line()]})
    meter.write()
    assert read_use(job.folder, 1) is None


def test_numbers_beyond_their_range_are_cut(carry):
    job = carry()
    meter = GpuUseMeter(job)
    meter.add(job.hosts[0], {"gpus": [line(mean=float("nan"), most=1e300, memory_mib=-5)]})
    meter.add(job.hosts[0], {"gpus": [line(1, mean=-1e300, uuid="x" * 9999)]})
    meter.write()
    use = read_use(job.folder, 1)
    assert [(rank.mean, rank.most, rank.memory_mib) for rank in use.ranks] == [(0.0, 100.0, 0), (0.0, 99.0, 8000)]
    assert len(use.ranks[1].uuid) == 80


def test_the_series_stays_short():
    series = ()
    for step in range(5000):
        series = thinned([*series, (float(step), 50.0)])
    assert MOST_POINTS // 2 <= len(series) <= MOST_POINTS
    assert {value for _, value in series} == {50.0}


@pytest.mark.parametrize(
    ("percents", "slowest"), [((90, 90, 90, 12), 3), ((50, 45, 60, 55), None), ((10,), None), ((), None)]
)
def test_only_a_clearly_idler_rank_is_named(percents, slowest):
    ranks = tuple(RankUse(rank, "h", rank, "", 10, float(percent), 99.0, 1) for rank, percent in enumerate(percents))
    found = GpuUse(ranks).slowest
    assert (found and found.rank) == slowest
