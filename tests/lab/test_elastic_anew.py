"""Elastic gangs whose launcher cannot add hosts: gpurun stops them and starts them again at the available size."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal

import pytest
from cluster import TINY, TORCH
from faulting import events, hosts_of, stopping_reason

from gpurun.node.agent.processes import list_processes

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("elastic_anew")]

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
TASKS = (f"image: {TINY}", "launcher: tasks")
RING = ("ring", "--steps", "100000", "--step-s", "0.25")


@pytest.fixture
def cluster(mended):
    return mended


def submit(cluster, folder, *lines, command=RING, grace_s=3):
    """Start four ranks on two hosts, or two on one; the job's id and the hosts."""
    hosts = [host.name for host in cluster.lab.hosts][1:3]
    recipe = [
        *lines,
        "gpus: 4",
        "min_gpus: 2",
        "outputs: /out",
        f"grace: {grace_s}s",
        f"command: {json.dumps(command)}",
    ]
    recipe.append(f"constraints: {{gpus_per_host: 2, hosts: {json.dumps(hosts)}}}")
    (folder / "recipe.yaml").write_text("\n".join(recipe) + "\n")
    done = cluster.gpurun("submit", str(folder / "recipe.yaml"), "-i", str(cluster.inventory))
    assert done.code == 0, done.err
    return done.out.strip(), hosts


def steps(cluster, job):
    """(step, size) as rank 0 has told them."""
    return [(int(a), int(b)) for a, b in re.findall(r"\[0\]<stdout>:step (\d+) with (\d+)", cluster.log(job))]


def sizes(cluster, job):
    """The sizes that the gang has had, one after the other."""
    return [size for size, _ in itertools.groupby(size for _, size in steps(cluster, job))]


def wait_for_steps(cluster, job, count):
    """Wait until the gang has made so many steps."""
    cluster.wait_until(job, lambda: len(steps(cluster, job)) >= count)


def done_again(cluster, job):
    """Return for each change of size how many steps the gang repeated."""
    pairs = itertools.pairwise(steps(cluster, job))
    return [before + 1 - after for (before, old), (after, new) in pairs if old != new]


def test_it_loses_a_host_trains_on_with_fewer_and_grows_back(cluster, tmp_path):
    job, hosts = submit(cluster, tmp_path, *TASKS)
    wait_for_steps(cluster, job, 25)
    victim = hosts_of(cluster, job)[1]
    cluster.lab.crash(victim)
    cluster.wait_until(job, lambda: sizes(cluster, job) == [4, 2])
    assert hosts_of(cluster, job) == [host for host in hosts if host != victim]
    for process in list_processes():  # also that of the first attempt, which waits for the lost host's proof
        if f"gpurun.supervisor {job} " in process.command:
            os.kill(process.pid, signal.SIGKILL)
    cluster.lab.boot(victim)
    assert cluster.status()  # commands adopt
    cluster.wait_until(job, lambda: sizes(cluster, job) == [4, 2, 4])
    shrinking, growing = done_again(cluster, job)
    assert shrinking >= 0, "a step is missing"
    assert growing == 0, "it saved before it left"


def test_a_drained_host_leaves_and_the_gang_trains_with_fewer(cluster, tmp_path):
    job, _ = submit(cluster, tmp_path, *TASKS)
    wait_for_steps(cluster, job, 10)
    drained = hosts_of(cluster, job)[0]
    assert cluster.gpurun("inventory", "drain", drained, "-i", str(cluster.inventory)).code == 0
    try:
        cluster.wait_until(job, lambda: sizes(cluster, job) == [4, 2])
        assert drained not in hosts_of(cluster, job)
    finally:
        cluster.gpurun("inventory", "uncordon", drained, "-i", str(cluster.inventory))
    assert done_again(cluster, job) == [0]


def test_torch_ranks_that_fail_with_their_neighbour_are_not_blamed_and_all_save_when_told(cluster, tmp_path):
    """A container is killed, and Docker reports it 8 s later: by then the other ranks and torchrun have failed."""
    program = ("torchrun", "--no-python", "python3", "-u", "-c", PROGRAM, "100000")
    job, _ = submit(cluster, tmp_path, f"image: {TORCH}", command=program, grace_s=14)
    wait_for_steps(cluster, job, 15)
    victim = hosts_of(cluster, job)[1]
    main = json.loads(cluster.lab.run(victim, ["cat", f"/home/train/.gpurun/jobs/{job}/main.json"]).stdout)["pid"]
    late = f"kill -STOP $(pidof dockerd); kill -KILL {main}; sleep 8; kill -CONT $(pidof dockerd)"
    cluster.lab.run(victim, ["sh", "-c", late])
    cluster.wait_until(job, lambda: (cluster.record(job)["state"], cluster.record(job)["attempt"]) == ("RUNNING", 2))
    assert stopping_reason(cluster, job).startswith(f"{victim}: the job's container ended"), events(cluster, job)
    wait_for_steps(cluster, job, len(steps(cluster, job)) + 3)
    told = [step for step, _ in steps(cluster, job)]
    (resumed,) = [after for before, after in itertools.pairwise(told) if after != before + 1] or [told[-1]]
    assert resumed > 10, "it began again from the beginning"
    assert cluster.gpurun("cancel", job).code == 0
    saved = (cluster.home / "jobs" / job / "outputs" / "step").read_text()
    assert int(saved) == steps(cluster, job)[-1][0], "the ranks were killed before they had saved"
