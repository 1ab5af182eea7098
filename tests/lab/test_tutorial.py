"""The tutorial, typed as it is written, with one epoch of training instead of three.

Its own lab is replaced by that of the tests, which has half as many GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("tutorial")]

TOP = Path(__file__).parents[2]
TYPED = re.compile(r"^\$ (.*)$", re.MULTILINE)
LEFT_OUT = ("make ", "python recipes/images/", ". .venv/", "export ", "gpurun lab ")
TRAINING = "gpurun submit recipes/fashion-mnist --follow"
SHORTER = f"{TRAINING} -- python3 train.py --epochs 1 --accuracy 0.7"


def typed():
    """What the tutorial's reader types, without what makes a machine ready."""
    lines = TYPED.findall((TOP / "docs/tutorial.md").read_text().replace("\\\n", " "))
    return [
        SHORTER if line == TRAINING else line.replace("-n 16", "-n 8")
        for line in lines
        if not line.startswith(LEFT_OUT)
    ]


def test_each_command_does_what_the_tutorial_says(cluster, tmp_path):
    (tmp_path / "recipes").symlink_to(TOP / "recipes")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**cluster.environ, "GPURUN_INVENTORY": str(cluster.inventory), "PATH": path}
    said = {}
    for line in typed():
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
        said.setdefault(line.split(" -- ")[0].strip(), done.stdout + done.stderr)
    (hello,) = (text for line, text in said.items() if "--name hello" in line)
    assert all(f"[{rank}] rank {rank} of 4" in hello for rank in range(4))
    assert said["gpurun logs @last --rank 3"] == "rank 3 of 4\n"
    assert "hello" in said["gpurun history"]
    assert "settings, each with its source:" in said["gpurun submit recipes/fashion-mnist --dry-run"]
    accuracy = re.search(r"test accuracy (0\.\d+)", said[TRAINING])
    assert float(accuracy[1]) >= 0.7
    assert list((tmp_path / "checkpoints").iterdir())
    assert "big" in said["gpurun why small"], "the job that holds the GPUs"
