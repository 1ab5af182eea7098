"""A gang hangs: which rank the others wait for, and in which line it stands, without any help of its script."""

from __future__ import annotations

import time

import pytest
from cluster import TINY, TORCH, TRAIN
from faulting import events

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("hang")]

LIMIT_S = 24
OF_TENSORFLOW_S = 45
"""On a busy machine, its import takes longer than `LIMIT_S`."""
TORCH_SCRIPT = """
import sys, time
import torch, torch.distributed as dist

def load_batch(step):
    if step == 100 and dist.get_rank() == 3:
        time.sleep(3600)

def train():
    gradients = torch.ones(1000)
    for step in range(1, 1000):
        load_batch(step)
        dist.all_reduce(gradients)
        if step == 99:
            print("99 steps", flush=True)

dist.init_process_group("gloo")
train()
"""
LAUNCHED = "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'train.py']))\n"
HOROVOD_SCRIPT = """
import time
import horovod.tensorflow as hvd, tensorflow as tf

def load_batch():
    if hvd.rank() == 1:
        time.sleep(3600)

hvd.init()
gradients = tf.ones(10)
for step in range(100):
    hvd.allreduce(gradients, name="g")
    if step == 50:
        print("99 steps", flush=True)
        load_batch()
"""
MPI_SCRIPT = """
import time
from mpi4py import MPI
world = MPI.COMM_WORLD
for step in range(100):
    world.allreduce(1)
print("99 steps", flush=True)
def load_batch():
    if world.rank == 1:
        time.sleep(3600)
load_batch()
world.allreduce(1)
"""
PLAIN_SCRIPT = """
import os, time
def load_batch():
    time.sleep(3600)
def wait():
    time.sleep(3600)
print("99 steps", flush=True)
load_batch() if os.environ["GPURUN_RANK"] == "2" else wait()
"""


def hang(cluster, folder, script, *flags, image, gpus, limit_s=LIMIT_S):
    """Submit a job whose ranks run a script; return its id when all have made 99 steps, and since when they hang."""
    (folder / "w").mkdir()
    (folder / "w" / "train.py").write_text(script)
    (folder / "w" / "launch.py").write_text(LAUNCHED)
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "--image", image, "--gpus", str(gpus),
        "--gpus-per-host", str(gpus // 2), "--workdir", str(folder / "w"), "--hang-timeout", f"{limit_s}s",
        "--grace", "2s", *flags,
    )  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "99 steps", times=gpus)
    return job, time.time(), limit_s


def judged(cluster, job, since_s, limit_s):
    """Wait for the end of a gang that hangs; return its first failure. It ends in time, and was told before."""
    cluster.wait_until(job, lambda: cluster.job(job)["warnings"], "no warning while it hangs")
    assert "no rank has printed" in cluster.job(job)["warnings"][0]
    record = cluster.wait_for(job, "FAILED")
    named_s = next(each["t"] for each in events(cluster, job) if each.get("state") == "STOPPING") - since_s
    assert limit_s - 1 < named_s < limit_s + 15
    failure = record["first_failure"]
    assert failure["kind"] == "hang"
    return failure


def test_torch_of_an_unmodified_script(cluster, tmp_path):
    flags = ("--launcher", "torchrun", "--", "python3", "train.py")
    failure = judged(cluster, *hang(cluster, tmp_path, TORCH_SCRIPT, *flags, image=TORCH, gpus=4))
    assert failure["rank"] == 3, failure
    where = f"rank 3 on {failure['host']} did not come to all_reduce, in which the others wait"
    assert f"{where}: it is at /workspace/train.py:7 in load_batch" in failure["reason"], failure
    inner, outer = failure["excerpt"][0].split(" < ")[:2]
    assert inner == "rank 3: /workspace/train.py:7 in load_batch" and outer == "/workspace/train.py:12 in train"
    assert failure["excerpt"][1].startswith("ranks 0-2: /workspace/train.py:13 in train (in all_reduce)"), failure


def test_torch_below_a_script_that_starts_it(cluster, tmp_path):
    """The rank's own process only waits for its child."""
    flags = ("--launcher", "torchrun", "--", "python3", "launch.py")
    failure = judged(cluster, *hang(cluster, tmp_path, TORCH_SCRIPT, *flags, image=TORCH, gpus=4))
    assert failure["rank"] == 3 and "/workspace/train.py:7 in load_batch" in failure["reason"], failure


def test_horovod(cluster, tmp_path):
    flags = ("--launcher", "horovod", "--", "python3", "train.py")
    failure = judged(
        cluster, *hang(cluster, tmp_path, HOROVOD_SCRIPT, *flags, image=TRAIN, gpus=2, limit_s=OF_TENSORFLOW_S)
    )
    assert failure["rank"] == 1, failure
    assert "rank 1 on " in failure["reason"] and "/workspace/train.py:7 in load_batch" in failure["reason"], failure


def test_mpi_and_ranks_that_nothing_connects(cluster, tmp_path):
    """Nothing says who waits for whom: where the ranks stand is told all the same, and who stands apart from most."""
    flags = ("--launcher", "mpirun", "--", "python3", "train.py")
    failure = judged(cluster, *hang(cluster, tmp_path, MPI_SCRIPT, *flags, image=TRAIN, gpus=4))
    assert failure["rank"] == 1 and "stands apart: it is at /workspace/train.py:10 in load_batch" in failure["reason"]
    (tmp_path / "plain").mkdir()
    flags = ("--launcher", "tasks", "--", "python3", "train.py")
    failure = judged(cluster, *hang(cluster, tmp_path / "plain", PLAIN_SCRIPT, *flags, image=TINY, gpus=4))
    assert failure["rank"] == 2 and failure["excerpt"][0].startswith("rank 2: /workspace/train.py:4 in load_batch")
