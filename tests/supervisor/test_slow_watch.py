"""A slow rank of a running gang is named once, with its host and reason; hosts and programs lie, and harm nobody."""

from __future__ import annotations

import json
import math
import os
import threading
from types import SimpleNamespace

import pytest

from gpurun.facts import Gpu, Hardware
from gpurun.jobs.events import warnings_of
from gpurun.jobs.spec import Roles, notify_wish
from gpurun.state.hosts import Machines
from gpurun.supervisor import slow
from gpurun.supervisor.slow import SlowWatch, for_s_in

STEP_S = 0.3


class World:
    """A gang of two hosts with two GPUs each, whose time passes a look at a time."""

    def __init__(self, job, monkeypatch):
        self.job, self.now_s = job, 1000.0
        self.ranks = {host: {} for host in job.hosts}
        self.gpus = {host: [] for host in job.hosts}
        monkeypatch.setattr(slow.time, "monotonic", lambda: self.now_s)
        links = SimpleNamespace(is_open=lambda _: True, each=self.each)
        job.__dict__["links"] = links
        self.watch = SlowWatch(job, threading.Event())
        self.steps = 0

    def each(self, ask, hosts):
        return SimpleNamespace(ok={host: {"age_s": 1.0, "ranks": self.ranks[host]} for host in hosts})

    def run(self, own, looks=24):
        """Let ranks report the times that `own` gives for rank and look; None = nothing new."""
        for at in range(looks):
            self.now_s += 30.0
            self.steps += 10
            for number, host in enumerate(self.job.hosts):
                for rank in (2 * number, 2 * number + 1):
                    if (took_s := own(rank, at)) is not None:
                        told = {"step": self.steps, "compute_s": took_s, "computed": self.steps}
                        self.ranks[host][str(rank)] = {"progress": told}
                self.watch.add_gpus(host, {"gpus": self.gpus[host]})
            self.watch.look()
        return list(warnings_of(self.job.folder.events, self.job.record.attempt))


@pytest.fixture
def world(carry, monkeypatch):
    return World(carry(gpus=4), monkeypatch)


def even(rank, _):
    return STEP_S


def third_is_slow(rank, _):
    return STEP_S * (1.3 if rank == 2 else 1.0)


def gpu(index, **changes):
    link = {"pcie_width": 16, "pcie_max_width": 16}
    line = {"index": index, "uuid": "", "samples": 30, "mean": 100.0, "most": 100, "memory_mib": 1, "sm_mhz": 1400}
    return {**line, **link, **changes}


def give(world, *, of_last=None):
    first, second = world.job.hosts
    world.gpus[first] = [gpu(0), gpu(1)]
    world.gpus[second] = [gpu(0, **(of_last or {})), gpu(1)]


def test_a_slow_rank_is_named_once_and_its_host_remembers(world, tmp_path):
    (text,) = world.run(third_is_slow, looks=60)
    host = world.job.hosts[1]
    assert text.startswith(f"rank 2 on {host} is slow: for 10m00s, its own work took 30 % longer")
    assert "NVML reports no reason" in text
    world.watch = SlowWatch(world.job, threading.Event())
    assert world.run(third_is_slow, looks=60) == [text], "a new supervisor reads whom the last one named"
    (known,) = Machines(tmp_path).read(os.getuid()).values()
    assert (known.name, known.slow_times, known.slow_why) == (host, 1, text)


def test_a_quiet_gang_names_nobody(world, tmp_path):
    give(world)
    assert world.run(even, looks=100) == [] and Machines(tmp_path).read(os.getuid()) == {}


def test_nobody_is_named_before_the_time(world):
    assert world.run(third_is_slow, looks=20) == [] and world.run(third_is_slow, looks=2) != []


@pytest.mark.parametrize(
    ("state", "said"),
    [({"sm_mhz": 980, "throttle": ["hardware thermal slowdown"]}, "hardware thermal slowdown; the GPU runs at 980 MHz"),
     ({"pcie_width": 8}, "PCIe link uses 8 of 16 lanes"),
     ({"pcie_generation": 1, "pcie_max_generation": 4}, "PCIe link runs at generation 1 of 4")],
    ids=["hot", "x8", "generation"],
)  # fmt: skip
def test_the_reason_is_what_nvml_says_about_its_gpu(world, state, said):
    give(world, of_last=state)
    (text,) = world.run(third_is_slow)
    assert text.startswith(f"rank 2 on {world.job.hosts[1]} is slow") and said in text


def test_rows_that_wait_for_a_reset_are_a_reason(world):
    give(world)
    host = world.job.hosts[1]
    world.job.hardware[host] = Hardware(host, gpus=(Gpu(0, retirement_pending=True), Gpu(1)))
    (text,) = world.run(third_is_slow)
    assert "bad rows of the GPU's memory wait for a GPU reset" in text


def test_a_throttled_gpu_is_named_without_any_mark_of_the_program(world):
    give(world, of_last={"sm_mhz": 980, "throttle": ["hardware thermal slowdown"]})
    (text,) = world.run(lambda *_: None)
    assert text.startswith(f"rank 2 on {world.job.hosts[1]} is slow: for 10m00s, the clock of GPU 0 was 30 % lower")
    assert "hardware thermal slowdown" in text


@pytest.mark.parametrize(
    "state",
    [{"sm_mhz": 980}, {"throttle": ["power brake"]}, {"sm_mhz": 300, "mean": 3.0, "throttle": ["power brake"]},
     {"sm_mhz": 1300, "throttle": ["power brake"]}, {"pcie_width": 8}],
    ids=["a low clock without a fault: a power cap", "a fault that lowers no clock", "idle", "hardly lower", "x8"],
)  # fmt: skip
def test_what_need_not_slow_a_gang_names_nobody(world, state):
    give(world, of_last=state)
    assert world.run(even) == []


def test_all_throttled_alike_name_nobody(world):
    for host in world.job.hosts:
        world.gpus[host] = [gpu(index, sm_mhz=980, throttle=["power brake"]) for index in range(2)]
    assert world.run(even) == []


LIES = [
    None, 7, "x", [], {"compute_s": math.nan, "computed": 1}, {"compute_s": 1e300, "computed": 1},
    {"compute_s": -1.0, "computed": 1}, {"compute_s": 0.39, "computed": "x"}, {"compute_s": 0.39, "computed": True},
    {"compute_s": "0.39", "computed": 1}, {"compute_s": 10**400, "computed": 10**400},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_what_a_program_writes_instead_of_durations_hides_no_other_rank(world, lie):
    def own(rank, at):
        if rank == 0:
            world.ranks[world.job.hosts[0]]["0"] = {"progress": lie}
            return None
        return third_is_slow(rank, at)

    (text,) = world.run(own)
    assert text.startswith("rank 2 ")


def test_a_host_is_believed_only_about_its_own_ranks(world):
    """The second host says that the ranks of the first are slow, and so are ranks that nobody has."""

    def own(rank, _):
        forged = {"progress": {"step": world.steps, "compute_s": 99.0, "computed": world.steps}}
        world.ranks[world.job.hosts[1]].update({"0": forged, "1": forged, "77": forged})
        return STEP_S

    assert world.run(own) == []


def test_a_host_that_says_that_all_of_it_is_slow_is_named_itself(world):
    """Three hosts would name only it; of two, either may be right, and the slower one is named."""
    texts = world.run(lambda rank, _: 5.0 if rank >= 2 else STEP_S)
    assert all(f"on {world.job.hosts[1]} is slow" in text for text in texts)


@pytest.mark.parametrize(
    "item",
    [{}, {"gpus": None}, {"gpus": [1]}, {"gpus": [{}]}, {"gpus": [gpu(10**30)]}, {"gpus": [gpu(0, sm_mhz="x")]},
     {"gpus": [gpu(0, throttle=7)]}, {"gpus": [gpu(99, sm_mhz=1)]}, {"gpus": [gpu(0, sm_mhz=-5)]}],
)  # fmt: skip
def test_what_a_host_cannot_mean_about_gpus_names_nobody(world, item):
    world.watch.add_gpus("elsewhere", item)
    for host in world.job.hosts:
        world.gpus[host] = item.get("gpus", ())
    assert world.run(even) == []


def test_ranks_with_other_roles_are_no_equals(carry, monkeypatch):
    """Rank 4 is a parameter server without a GPU, and works for longer."""
    world = World(carry(gpus=4, roles=Roles(ps=1)), monkeypatch)

    def own(rank, at):
        told = {"step": world.steps, "compute_s": 9.0, "computed": world.steps}
        for host in world.job.hosts:
            world.ranks[host]["4"] = {"progress": told}
        return even(rank, at)

    assert world.run(own) == []


def test_the_job_and_its_targets_are_told(carry, monkeypatch, tmp_path):
    out = tmp_path / "told"
    job = carry(gpus=4, notify=(notify_wish(f"slow=command:cp /dev/stdin {out}"), notify_wish("end=command:false")))
    (text,) = World(job, monkeypatch).run(third_is_slow)
    for thread in threading.enumerate():
        if thread.name == "notify":
            thread.join(20)
    document = json.loads(out.read_text())
    assert (document["event"], document["reason"]) == ("slow", text)
    assert "has a slow rank: rank 2 on" in document["text"]


def test_which_jobs_are_watched(carry):
    assert SlowWatch(carry(gpus=1), threading.Event()).threads() == []
    assert len(SlowWatch(carry(gpus=2), threading.Event()).threads()) == 1


def test_the_time_can_only_be_shortened():
    assert [for_s_in({"GPURUN_SLOW_FOR_S": text}) for text in ("30", "1", "9999", "x", "nan", "-inf")] == [
        30.0, 10.0, 600.0, 600.0, 600.0, 10.0,
    ]  # fmt: skip
    assert for_s_in({}) == 600.0
