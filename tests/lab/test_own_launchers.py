"""Launch lines as people type them train over all hosts of a gang: each program prints the size of its world.

Stand-ins take the place of packages that the image lacks. Each says what it is made from. With the real torchrun of
PyTorch 2.13 and the real Accelerate 1.12, the same lines gave the same worlds on one machine with two "hosts".
"""

from __future__ import annotations

import re
import shlex

import pytest
from at_once import finish, hosts_of
from cluster import TINY, TRAIN

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("launchers")]

MEET = """
import os, socket, sys
rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
if rank == 0:
    server = socket.create_server(address)
    others = [server.accept()[0] for _ in range(size - 1)]
    total = sum(int(one.makefile().readline()) for one in others)
else:
    while True:
        try:
            link = socket.create_connection(address)
            break
        except OSError:
            pass
    link.sendall(f'{rank}\\n'.encode())
names = ('ACCELERATE_MIXED_PRECISION', 'ACCELERATE_USE_FSDP', 'SLURM_PROCID', 'SLURM_NTASKS')
print('rank', rank, 'of', size, *(os.environ.get(name, '-') for name in names), *sys.argv[1:], flush=True)
"""
TORCHRUN = """#!/usr/bin/env python3
# From torch.distributed.run of PyTorch 2.13: flags have their defaults from PET_* (argparse_util.env).
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
for name, value in (('nnodes', '1'), ('node_rank', '0'), ('nproc_per_node', '1'), ('master_addr', '127.0.0.1'),
                    ('master_port', '29500')):
    value = os.environ.get('PET_' + name.upper(), value)
    parser.add_argument('--' + name, '--' + name.replace('_', '-'), default=value)
parser.add_argument('script')
parser.add_argument('words', nargs=argparse.REMAINDER)
said = parser.parse_args()
each = int(said.nproc_per_node)
ranks = [subprocess.Popen([sys.executable, said.script, *said.words], env={
    **os.environ, 'RANK': str(int(said.node_rank) * each + local), 'WORLD_SIZE': str(int(said.nnodes) * each),
    'LOCAL_RANK': str(local), 'MASTER_ADDR': said.master_addr, 'MASTER_PORT': said.master_port,
}) for local in range(each)]
sys.exit(max(rank.wait() for rank in ranks))
"""
ACCELERATE = """#!/usr/bin/env python3
# From accelerate.commands.launch and accelerate.utils.launch (prepare_multi_gpu_env) of Accelerate 1.12: a flag wins
# over the configuration file; without a kind of training, one process trains alone.
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument('verb')
for name in ('num_machines', 'machine_rank', 'num_processes', 'main_process_ip', 'main_process_port', 'gpu_ids',
             'mixed_precision', 'config_file', 'deepspeed_multinode_launcher'):
    parser.add_argument('--' + name)
parser.add_argument('--multi_gpu', action='store_true')
parser.add_argument('script')
parser.add_argument('words', nargs=argparse.REMAINDER)
said = parser.parse_args()
lines = open(said.config_file).read().splitlines() if said.config_file else []
config = dict(line.split(': ') for line in lines)
kind = 'MULTI_GPU' if said.multi_gpu else config.get('distributed_type', 'NO')
def value(name):
    return getattr(said, name) or config[name]
os.environ['ACCELERATE_MIXED_PRECISION'] = said.mixed_precision or config.get('mixed_precision', 'no')
if kind == 'FSDP':
    os.environ['ACCELERATE_USE_FSDP'] = 'true'
if kind == 'NO':
    os.execvp('python3', ['python3', said.script, *said.words])
each = int(value('num_processes')) // int(value('num_machines'))
os.execvp('torchrun', ['torchrun', '--nnodes', value('num_machines'), '--node_rank', value('machine_rank'),
    '--nproc_per_node', str(each), '--master_addr', value('main_process_ip'), '--master_port',
    value('main_process_port'), said.script, *said.words])
"""
LLAMAFACTORY = """#!/usr/bin/env python3
# From llamafactory.cli of LLaMA-Factory 0.9.3 (main).
import os, sys
if os.environ.get('FORCE_TORCHRUN', '0').lower() not in ('true', 'y', '1'):
    os.execvp('python3', ['python3', 'meet.py'])
def told(name, otherwise):
    return os.environ.get(name, otherwise)
os.execvp('torchrun', ['torchrun', '--nnodes', told('NNODES', '1'), '--node_rank', told('NODE_RANK', '0'),
    '--nproc_per_node', told('NPROC_PER_NODE', '1'), '--master_addr', told('MASTER_ADDR', '127.0.0.1'),
    '--master_port', told('MASTER_PORT', '29500'), 'meet.py', *sys.argv[2:]])
"""
ALL_REDUCE_PERF = """#!/usr/bin/env python3
# From src/common.cu of nccl-tests: with MPI, one rank for each process; it prints the number of ranks.
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
print('rank', world.rank, 'of', world.size, os.environ['NCCL_IB_QPS_PER_CONNECTION'], *sys.argv[1:], flush=True)
"""
FILES = {
    "meet.py": MEET, "bin/torchrun": TORCHRUN, "bin/accelerate": ACCELERATE, "bin/llamafactory-cli": LLAMAFACTORY,
    "bin/all_reduce_perf": ALL_REDUCE_PERF, "train.sh": "#!/bin/sh\nexec torchrun meet.py by-script\n",
    "fsdp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 4\nmachine_rank: 3\n"
    "num_processes: 16\nmain_process_ip: 192.0.2.1\nmain_process_port: 29501\n",
}  # fmt: skip
PATH = "PATH=/workspace/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LINES = {
    "accelerate launch meet.py --lr 1": "no - - - --lr 1",
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank 0 --main_process_ip n1 "
    "--mixed_precision bf16 meet.py": "bf16 - - -",
    "accelerate launch --config_file fsdp.yaml meet.py": "bf16 true - -",
    "python3 -m torch.distributed.launch --use_env --nnodes=2 --nproc_per_node=1 --master_addr=n1 meet.py": "- - - -",
    "NNODES=2 NODE_RANK=0 llamafactory-cli train x.yaml": "- - - - x.yaml",
    "deepspeed --hostfile hostfile --no_local_rank meet.py": "- - - -",
    "./train.sh": "- - - - by-script",
    "sh -c 'cd /workspace && torchrun meet.py'": "- - - -",
    "srun -N 2 python3 meet.py": "- - {rank} 2",
    "torchrun --standalone meet.py": "- - - -",
}
NCCL_TESTS = (
    "mpirun --allow-run-as-root -np 2 --timestamp-output --mca btl_tcp_if_include enp25s0np0 "
    "-x NCCL_IB_QPS_PER_CONNECTION=4 bin/all_reduce_perf -b 1M -e 20G -g 1 -f 2"
)


@pytest.fixture
def submit(cluster):
    folder = cluster.folder / "code"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def submitted(line, *flags, image=TINY):
        args = ("-i", str(cluster.inventory), "-n", "2", "--gpus-per-host", "1", "--image", image, *flags)
        done = cluster.gpurun("submit", *args, "--workdir", str(folder), "-e", PATH, "--", *shlex.split(line))
        assert done.code == 0, done.err
        return done.out.strip()

    return submitted


def test_each_line_trains_over_both_hosts(cluster, submit):
    jobs = {line: submit(line) for line in LINES}
    itself = "torchrun --standalone --nproc_per_node=8 meet.py"
    jobs[itself] = submit(itself, "--one-per-host")
    wanted = {**LINES, itself: "- - - -"}
    for line, job in jobs.items():
        assert len(hosts_of(finish(cluster, job, "SUCCEEDED", 0))) == 2, line
        found = sorted(re.findall(r"rank (\d of \d .*)", cluster.log(job)))
        assert found == [f"{rank} of 2 {wanted[line].format(rank=rank)}".rstrip() for rank in range(2)], line


def test_nccl_tests_run_over_both_hosts_as_their_readme_has_it(cluster, submit):
    job = submit(NCCL_TESTS, image=TRAIN)
    finish(cluster, job, "SUCCEEDED", 0)
    found = sorted(re.findall(r"rank (\d of \d .*)", cluster.log(job)))
    assert found == [f"{rank} of 2 4 -b 1M -e 20G -g 1 -f 2" for rank in range(2)]
