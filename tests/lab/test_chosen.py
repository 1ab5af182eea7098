"""A program says what starts it, and it is started so, on real hosts."""

from __future__ import annotations

import pytest
from cluster import TINY

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
}  # fmt: skip


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "w").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "w" / name).write_text(text)
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
