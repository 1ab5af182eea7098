"""A program says what starts it, and it is started so, on real hosts."""

from __future__ import annotations

import pytest
from cluster import TINY
from test_launchers import MEET

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("chosen")]

PROGRAMS = {
    "joins.py": "import os\nfrom net import build\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n",
    "net.py": "def build():\n    import torch.distributed as dist\n    dist.init_process_group('nccl')\n",
    "alone.py": (
        "import os\n"
        "def build(model):\n    from torch import nn\n    return nn.DataParallel(model)\n"
        "print('rank', os.environ['GPURUN_RANK'], 'of', os.environ['GPURUN_SIZE'])\n"
    ),
    "plain.py": "print('hello')\n",
    "meet.py": MEET,
    "dist_train.sh": (
        "#!/bin/sh\nGPUS=$1\nNNODES=${NNODES:-1}\nNODE_RANK=${NODE_RANK:-0}\nPORT=${PORT:-29500}\n"
        "MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}\nPATH=/workspace:$PATH\n"
        "torchrun --nnodes=$NNODES --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --nproc_per_node=$GPUS \\\n"
        "    --master_port=$PORT $(dirname $0)/meet.py\n"
    ),
    "torchrun": """#!/usr/bin/env python3
# Stands in for `torch.distributed.run`, which is not in this image: each flag has its default in PET_*, and the workers
# of a host get their ranks from its number. They meet on the next port, as its agents listen on this one.
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
for name, default in {"nnodes": "1", "node_rank": "0", "nproc_per_node": "1", "master_addr": "127.0.0.1",
                      "master_port": "29500"}.items():
    parser.add_argument(f"--{name}", default=os.environ.get(f"PET_{name.upper()}", default))
parser.add_argument("command", nargs="+")
told = parser.parse_args()
each = int(told.nproc_per_node)
workers = [
    subprocess.Popen([sys.executable, *told.command], env={
        **os.environ, "RANK": str(int(told.node_rank) * each + local), "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(int(told.nnodes) * each), "MASTER_ADDR": told.master_addr,
        "MASTER_PORT": str(int(told.master_port) + 1),
    })
    for local in range(each)
]
sys.exit(max(worker.wait() for worker in workers))
""",
}  # fmt: skip


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "w").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "w" / name).write_text(text)
        (tmp_path / "w" / name).chmod(0o755)
    return str(tmp_path / "w")


def test_a_program_is_started_as_its_imports_say(cluster, workdir):
    refused = cluster.submit("--workdir", workdir, image=TINY, command=["python3", "plain.py"])
    assert refused.code == 2 and "--one-per-host -- python3 plain.py" in refused.err
    assert not (cluster.home / "jobs").exists() or not list((cluster.home / "jobs").glob("j-*"))
    joins = cluster.submit("--workdir", workdir, image=TINY, command=["python3", "joins.py"])
    assert joins.code == 0, joins.err
    assert "torchrun starts the ranks: net.py line 3 uses torch.distributed" in joins.err
    assert "rank 0 of 2" in joins.out and "rank 1 of 2" in joins.out
    flags = ("--workdir", workdir, "--gpus-per-host", "2")
    alone = cluster.submit(*flags, image=TINY, command=["python3", "alone.py"])
    assert alone.code == 0, alone.err
    assert "alone.py line 4 uses DataParallel" in alone.err
    assert "rank 0 of 1" in alone.out and "rank 1" not in alone.out


def test_a_script_or_a_shells_text_that_starts_a_launcher_is_one_gang_on_several_hosts(cluster, workdir):
    """The first sets the flags itself, from variables; the second leaves them to torchrun's own defaults."""
    text = "PATH=/workspace:$PATH; torchrun --nproc_per_node=2 meet.py"
    for command in (["./dist_train.sh", "2"], ["sh", "-c", text]):
        done = cluster.gpurun(
            "submit", "-i", str(cluster.inventory), "-n", "4", "--image", TINY, "--workdir", workdir, "--follow", "--",
            *command,
        )  # fmt: skip
        assert done.code == 0, done.err
        assert "starts torchrun, so gpurun runs " in done.err, done.err
        assert " once on each host, with 2 GPUs on each" in done.err, done.err
        for rank in range(4):
            assert f"rank {rank} of 4 local {rank % 2} has 6" in done.out, done.out + done.err
