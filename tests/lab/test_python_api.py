"""Functions of this process run on real hosts, and their values come back; also from a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import CancelledError
from pathlib import Path

import nbformat
import pytest
from cluster import TINY, TORCH
from nbclient import NotebookClient

import gpurun

pytestmark = [
    pytest.mark.lab, pytest.mark.xdist_group("python_api"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="a function needs the Python of the images, 3.11"),
]  # fmt: skip

NOTEBOOK = Path(__file__).parents[2] / "recipes/notebook/allreduce.ipynb"


@pytest.fixture
def here(cluster, monkeypatch):
    """This process uses the lab, as a notebook would."""
    for name, value in {**cluster.environ, "GPURUN_INVENTORY": str(cluster.inventory)}.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.mark.train
def test_each_rank_calls_the_function_and_returns_to_this_process(here):
    def reduced(scale):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print("rank", dist.get_rank(), "is done")  # noqa: T201  the log of the job
        return {"rank": dist.get_rank(), "sum": total.item() * scale}

    job = gpurun.submit(reduced, (10,), gpus=2, gpus_per_host=1, launcher="torchrun", image=TORCH)
    assert job.result(240) == {"rank": 0, "sum": 30.0}
    assert job.results() == [{"rank": 0, "sum": 30.0}, {"rank": 1, "sum": 30.0}]
    assert "[1] rank 1 is done\n" in job.logs()
    assert gpurun.job(job.id).result(10) == job.result()


def test_what_one_rank_raises_is_raised_here_and_a_cancel_ends_the_others(here):
    def one_fails():
        import time

        import gpurun_runtime

        if gpurun_runtime.gang().rank == 1:
            raise ValueError("only here")
        time.sleep(600)

    job = gpurun.submit(one_fails, gpus=2, gpus_per_host=1, launcher="tasks", image=TINY)
    with pytest.raises(gpurun.RemoteError, match="rank 1: ValueError: only here") as caught:
        job.result(300)
    assert "in one_fails" in caught.value.trace

    def forever():
        import time

        time.sleep(600)

    job = gpurun.submit(forever, gpus=1, image=TINY)
    here.wait_for(job.id, "RUNNING")
    assert job.running() and job.cancel()
    with pytest.raises(CancelledError):
        job.result(60)


@pytest.mark.train
def test_the_notebook_runs_from_top_to_bottom(here):
    client = NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=300, kernel_name="python3")
    cells = [cell for cell in client.execute(env=dict(os.environ)).cells if cell.cell_type == "code"]
    told = ["".join(str(out.get("text", out.get("data", ""))) for out in cell.outputs) for cell in cells]
    assert "rank 1 of 2 has 3.0" in told[2] and "{'ranks': 2, 'sum': 30.0}" in told[2]
    assert "[4, 9]" in told[3]
    assert "rank 0: ValueError: no such learning rate" in told[4] and "in fails" in told[4]


def test_a_job_outlives_the_process_that_submitted_it(here):
    program = f"import gpurun; print(gpurun.submit(lambda: 6 * 7, gpus=1, image={TINY!r}).id)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert gpurun.job(done.stdout.strip()).result(300) == 42
