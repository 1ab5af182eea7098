"""Elastic gangs whose launcher cannot add hosts: gpurun stops them and starts them again at the available size."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import time

import pytest
from cluster import TORCH, TRAIN
from faulting import wait_until

from gpurun.node.agent.processes import list_processes

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("elastic")]

PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import gpurun_runtime as gpurun

dist.init_process_group("gloo")
rank, size, last = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
path = gpurun.outputs() + "/step"
first = int(open(path).read()) if os.path.exists(path) else 0
gpurun.stopping()
for step in range(first + 1, last + 1):
    time.sleep(0.25)
    told = torch.tensor([1.0, float(gpurun.stopping())])
    dist.all_reduce(told)
    assert told[0] == size
    if rank == 0:
        print("step", step, "with", size, flush=True)
        if step % 10 == 0 or told[1]:
            open(path + ".tmp", "w").write(str(step))
            os.replace(path + ".tmp", path)
            gpurun.checkpointed(step)
    if told[1]:
        dist.barrier()
        sys.exit(143)
"""


@pytest.fixture
def cluster(mended):
    return mended


def submit(cluster, hosts, steps, *flags):
    """Four ranks on two hosts, or two on one."""
    args = cluster.submit_args(
        "--min-gpus", "2", "--outputs", "/out", "--host", ",".join(hosts), *flags,
        "--gpus-per-host", "2", gpus=4, image=TORCH,
    )  # fmt: skip
    done = cluster.gpurun(*args, "--", "torchrun", "--no-python", "python3", "-u", "-c", PROGRAM, str(steps))
    assert done.code == 0, done.err
    return done.out.strip()


def steps(cluster, job):
    """(step, size) as rank 0 has told them."""
    return [(int(a), int(b)) for a, b in re.findall(r"step (\d+) with (\d+)", cluster.log(job))]


def sizes(cluster, job):
    """The sizes that the gang has had, one after the other."""
    found = []
    for _, size in steps(cluster, job):
        if not found or found[-1] != size:
            found.append(size)
    return found


def wait_for_sizes(cluster, job, wanted):
    """Wait until the gang has had these sizes; how many seconds it took."""
    began = time.monotonic()
    wait_until(lambda: sizes(cluster, job)[: len(wanted)] == wanted)
    return round(time.monotonic() - began, 1)


def done_again(cluster, job):
    """Return for each change of size how many steps the gang repeated."""
    pairs = itertools.pairwise(steps(cluster, job))
    return [before + 1 - after for (before, old), (after, new) in pairs if old != new]


def test_it_loses_a_host_trains_on_with_fewer_and_grows_back(cluster):
    hosts = [host.name for host in cluster.lab.hosts][1:3]
    job = submit(cluster, hosts, 800)
    wait_until(lambda: len(steps(cluster, job)) >= 25)
    victim = cluster.job(job)["hosts"][1]
    cluster.lab.crash(victim)
    shrunk_s = wait_for_sizes(cluster, job, [4, 2])
    assert cluster.job(job)["hosts"] == [host for host in hosts if host != victim]
    for process in list_processes():  # also that of the first attempt, which waits for the lost host's proof
        if f"gpurun.supervisor {job} " in process.command:
            os.kill(process.pid, signal.SIGKILL)
    cluster.lab.boot(victim)
    assert cluster.status()  # commands adopt
    grown_s = wait_for_sizes(cluster, job, [4, 2, 4])
    cluster.wait_for(job, "SUCCEEDED")
    assert steps(cluster, job)[-1] == (800, 4)
    shrinking, growing = done_again(cluster, job)
    assert 0 <= shrinking <= 20, "what was done since the last checkpoint that was copied is done again"
    assert growing == 0, "it saved before it left"
    logging.getLogger(__name__).info("smaller: %s s, %s steps; larger: %s s", shrunk_s, shrinking, grown_s)


def test_a_drained_host_leaves_and_the_gang_trains_elsewhere_or_smaller(cluster):
    hosts = [host.name for host in cluster.lab.hosts][1:3]
    job = submit(cluster, hosts, 120)
    wait_until(lambda: len(steps(cluster, job)) >= 10)
    drained = cluster.job(job)["hosts"][0]
    assert cluster.gpurun("inventory", "drain", drained, "-i", str(cluster.inventory)).code == 0
    try:
        wait_until(lambda: sizes(cluster, job) == [4, 2])
        assert drained not in cluster.job(job)["hosts"]
        cluster.wait_for(job, "SUCCEEDED")
    finally:
        cluster.gpurun("inventory", "uncordon", drained, "-i", str(cluster.inventory))
    assert steps(cluster, job)[-1] == (120, 2) and done_again(cluster, job) == [0]


def test_a_program_that_fails_everywhere_is_not_started_for_ever(cluster):
    hosts = [host.name for host in cluster.lab.hosts][1:3]
    args = cluster.submit_args("--launcher", "tasks", "--min-gpus", "2", "--host", ",".join(hosts), gpus=2, image=TRAIN)
    done = cluster.gpurun(*args, "--follow", "--", "sh", "-c", "exit 3")
    (record,) = cluster.status()["jobs"]
    assert (done.code, record["state"], record["exit_code"], record["restarts"]) == (1, "FAILED", 3, 0)
