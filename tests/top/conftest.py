"""A source of moments that a test changes, and what keys did."""

from __future__ import annotations

import pytest

from gpurun.facts import GpuSample, HostSample
from gpurun.inventory.folding import fold
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import Grant
from gpurun.views.picture import FREE, HostCells, WaitingJob, picture_of
from gpurun.views.rows import Moment


class Cluster:
    """Four hosts; n1 and n2 run j-00000001, n3 runs j-00000002 and does not answer, j-00000003 waits."""

    def __init__(self):
        self.names = {1: "resnet", 2: "bert", 3: "llm"}
        self.states = {1: State.RUNNING, 2: State.RUNNING, 3: State.QUEUED}
        self.percent = 97
        self.silent = {"n3": "the connection timed out"}
        self.problems = ()
        self.logs = {}
        self.hurried = 0
        self.now_s = 100.0

    def record(self, number):
        held = {1: ("n1", "n2"), 2: ("n3",)}.get(number, ())
        granted = tuple(Grant(name, (0, 1)) for name in held)
        return JobRecord(
            id=f"j-{number:08x}", name=self.names[number], owner="ada", owner_uid=1, inventory="/i",
            gpus=4 if number == 1 else 2, state=self.states[number], submitted_s=float(number), queued_s=1.0,
            granted=granted,
        )  # fmt: skip

    def latest(self):
        jobs = {"n1": "j-00000001", "n2": "j-00000001", "n3": "j-00000002", "n4": FREE}
        hosts = [
            HostCells(name, "r1", "pascal", 2, 2 * (job == FREE), "ok", "ok", (job, job)) for name, job in jobs.items()
        ]
        samples = {
            name: HostSample(problem=self.silent[name]) if name in self.silent else HostSample(gpus=tuple(
                GpuSample(at, utilization_percent=self.percent, memory_used_mib=8192, memory_mib=16384, power_w=200.0,
                          temperature_c=61)
                for at in range(2)
            ))
            for name in ("n1", "n2", "n3")
        }  # fmt: skip
        waiting = WaitingJob(
            "j-00000003", self.names[3], "ada", 64, 1, None, 0, "/i", 90.0, "waits for 60 more GPUs", None
        )
        queue = (waiting,) if self.states[3] is State.QUEUED else ()
        picture = picture_of(hosts, [self.record(number) for number in self.names], self.now_s, fold)
        return Moment(picture, queue, samples, self.problems)

    def hurry(self):
        self.hurried += 1

    def log(self, job):
        return self.logs.get(job, [])

    def log_stamp(self, job):
        return tuple(self.logs.get(job, []))


@pytest.fixture
def cluster():
    return Cluster()
