"""Let a rank of an unmodified NCCL program hang on the GPU of this machine, and find out which rank it is.

    python benchmarks/bench_hang.py --python /opt/torch/bin/python3   # about a minute; a machine with a GPU

Two ranks share the GPU: NCCL takes two hosts' names for two machines. Each runs below gpurun's script for ranks, with
the environment of a rank of ``torchrun``. Rank 1 sleeps before its 100th all-reduce. No Docker, no SSH: the operation
of a host's agent is called here. Then the cost of what is on by default: all-reduces of 1 MiB with and without the
flight recorder and RAS, in turn. Without a GPU, it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpurun.runtime
from gpurun.jobs.spec import Grant
from gpurun.launch.launchers import PlacedGang
from gpurun.launch.launchers.direct import TORCHRUN, environment
from gpurun.launch.rank import rank_script
from gpurun.node.job import hang
from gpurun.supervisor.hang import seen_of
from gpurun.supervisor.ranks import Seating
from gpurun.supervisor.verdict.hang import explain

JOB, HOST, PORT = "j-0a1b2c3d", "here", 23100
HANGS_AT = 100
PROGRAM = """
import sys, time
import torch, torch.distributed as dist

def load_batch(step):
    if dist.get_rank() == 1 and step == int(sys.argv[1]):
        time.sleep(3600)

def train(steps):
    began = time.perf_counter()
    for step in range(1, steps + 1):
        load_batch(step)
        dist.all_reduce(gradients)
        torch.cuda.synchronize()
        if step == 20:
            began = time.perf_counter()
    return (time.perf_counter() - began) / (steps - 20)

torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
gradients = torch.ones(1 << 18, device="cuda")
print("began", flush=True)
print("ms", 1e3 * train(int(sys.argv[2])), flush=True)
dist.destroy_process_group()
"""
OFF = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "NCCL_RAS_ENABLE": "0"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--python", default=sys.executable, help="a Python with PyTorch for CUDA")
    options.add_argument("--steps", type=int, default=3000, help="all-reduces of each measured run")
    options.add_argument("--runs", type=int, default=5, help="how often each way is measured")
    options.add_argument("--keep", type=Path, help="a folder for the files of the recorder and for what RAS said")
    chosen = options.parse_args()
    if subprocess.run([chosen.python, "-c", "import torch; torch.zeros(1, device='cuda')"], check=False).returncode:
        print(f"nothing measured: {chosen.python} has no PyTorch that works with a GPU here")
        return
    print(json.dumps({"named": named(chosen), "cost": cost(chosen)}, indent=2))


def named(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what is said of a gang whose rank 1 sleeps, and how long it takes to find out."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPURUN_FOLDER"] = folder
        ranks = [start(chosen, Path(folder), rank, hangs_at=HANGS_AT, steps=2 * HANGS_AT) for rank in (0, 1)]
        try:
            until_both_began(Path(folder))
            time.sleep(5)
            began = time.perf_counter()
            told = hang.look(SimpleNamespace(wait=time.sleep), JOB, 1, PORT + 1)
            took_s = time.perf_counter() - began
            if chosen.keep:
                keep(chosen.keep, Path(folder), told)
        finally:
            for rank in ranks:
                os.killpg(rank.pid, 9)
                rank.wait()
        found = explain(seen_of({HOST: told}, Seating((Grant(HOST, (0, 1)),))), "silent")
        return {
            "took_s": round(took_s, 2), "reason": found.reason, "rank": found.rank, "lines": found.lines,
            "evidence": found.evidence,
        }  # fmt: skip


def cost(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the time of an all-reduce with gpurun's settings, and relative to one without recorder and RAS."""
    found: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(chosen.runs):
        for name, extra in (("on", {}), ("off", OFF)):
            found[name].append(all_reduce_ms(chosen, extra))
    on, off = (statistics.median(found[name]) for name in ("on", "off"))
    return {"all_reduce_ms": round(on, 4), "ratio": round(on / off, 3), "each": found}


def all_reduce_ms(chosen: argparse.Namespace, extra: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(chosen, Path(folder), rank, hangs_at=0, steps=chosen.steps, extra=extra) for rank in (0, 1)]
        for rank in ranks:
            rank.wait(timeout=120)
        text = next(Path(folder).glob(f"jobs/{JOB}/run/ranks/1/0.*/o")).read_text()
        return float(text.split("ms ")[1])


def start(
    chosen: argparse.Namespace,
    folder: Path,
    rank: int,
    *,
    hangs_at: int,
    steps: int,
    extra: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start gpurun's script for a rank, as the main process of a container would."""
    gang = PlacedGang(f"{JOB}.1", (Grant(HOST, (0, 1)),), {HOST: "lo"}, {HOST: "127.0.0.1"}, PORT, is_tcp=True)
    run = folder / "jobs" / JOB / "run"
    run.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    script = folder / "rank"
    command = [chosen.python, str(folder / "train.py"), str(hangs_at), str(steps)]
    script.write_text(rank_script([], TORCHRUN, command, grace_s=1.0))
    environ = os.environ | environment(TORCHRUN, gang, gang.places[rank]) | {
        "GPURUN_JOB": JOB, "GPURUN_ATTEMPT": "1", "GPURUN_RUN": str(run), "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONPATH": gpurun.runtime.__path__[0],
        "NCCL_RAS_ADDR": f"127.0.0.1:{PORT + 1}", "NCCL_HOSTID": f"host-{rank}",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", **(extra or {}),
    }  # fmt: skip
    return subprocess.Popen(["sh", str(script)], env=environ, start_new_session=True, stdin=subprocess.DEVNULL)


def until_both_began(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while sum("began" in file.read_text() for file in folder.glob(f"jobs/{JOB}/run/ranks/1/*/o")) < 2:
        if time.monotonic() > deadline:
            errors = [file.read_text()[-2000:] for file in folder.glob(f"jobs/{JOB}/run/ranks/1/*/e")]
            raise SystemExit("the ranks did not begin:\n" + "\n".join(errors))
        time.sleep(0.2)


def keep(into: Path, folder: Path, told: dict[str, Any]) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for file in folder.glob(f"jobs/{JOB}/run/recorder.1/dump_*"):
        shutil.copy(file, into)
    (into / "told.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
