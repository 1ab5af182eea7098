"""Compare training under gpurun and under ``torchrun`` by hand: PyTorch's DDP tutorial, two ranks on one host.

Each pair runs at the same moment in two containers of one lab host, with the same weight, so that other load slows
both down alike. The program measures itself, from its first epoch to its last.

    python benchmarks/bench_torchrun.py [--pairs 6] [--epochs 150] [--ahead 50]

`--ahead` is how many seconds both have to start. Needs the image ``gpurun/train:torch`` (`recipes/images/build.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GPURUN = [sys.executable, "-m", "gpurun"]
LAB, HOST, IMAGE = "torchrun-bench", "gpu-r1-01", "gpurun/train:torch"
PROGRAM = """
import json, os, sys, time, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    epochs, starts_s = int(sys.argv[1]), float(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    data = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    time.sleep(max(0.0, starts_s - time.time()))
    torch.distributed.barrier()
    late_s, began_s, cpu_s = time.time() - starts_s, time.monotonic(), time.process_time()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(source), targets).backward()
            optimizer.step()
        if epoch % 10 == 0 and os.environ["LOCAL_RANK"] == "0":
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "/tmp/snapshot.pt")
    found = {"wall_s": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_s, "late_s": late_s}
    print("MEASURED", json.dumps({**found, "load": os.getloadavg()[0]}), flush=True)
    torch.distributed.destroy_process_group()


main()  # not the module's own: PyTorch may abort at the end if a model lives longer than its process group
"""


def run(argv: list[str], **options: object) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, **options).stdout  # type: ignore


def in_host(*argv: str, **options: object) -> str:
    return run([*GPURUN, "lab", "run", "--name", LAB, HOST, "--", *argv], **options)


def measured(printed: str) -> dict[str, float]:
    """Return the slower rank's time, and the CPU time of both."""
    ranks = [json.loads(found) for found in re.findall(r"MEASURED (\{.*?\})", printed)]
    assert len(ranks) == 2, printed[-2000:]
    worst = {name: max(rank[name] for rank in ranks) for name in ("wall_s", "late_s", "load")}
    return {**worst, "cpu_s": sum(rank["cpu_s"] for rank in ranks)}


def by_hand(arguments: list[str]) -> dict[str, float]:
    options = ["--rm", "--network", "host", "--cpu-shares", "2048", "--shm-size", "1g", "--workdir", "/workspace"]
    options += ["--volume", "/tmp/tutorial:/workspace:ro"]
    torchrun = ["--entrypoint", "torchrun", IMAGE, "--nproc-per-node=2", "multinode.py"]
    return measured(in_host("docker", "run", *options, *torchrun, *arguments))


def by_gpurun(submit: list[str], arguments: list[str]) -> dict[str, float]:
    return measured(run([*submit, "--follow", "--", "multinode.py", *arguments]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--ahead", type=float, default=50.0)
    chosen = parser.parse_args()
    run([*GPURUN, "lab", "up", "--name", LAB, "--racks", "1", "--hosts", "1", "--gpus", "2"])
    try:
        inventory = json.loads(run([*GPURUN, "lab", "status", "--name", LAB, "--json"]))["inventory"]
        with tempfile.TemporaryDirectory() as folder:
            os.environ["GPURUN_HOME"] = f"{folder}/home"
            (Path(folder) / "work").mkdir()
            (Path(folder) / "work/multinode.py").write_text(PROGRAM)
            in_host("sh", "-c", "mkdir -p /tmp/tutorial; cat >/tmp/tutorial/multinode.py", input=PROGRAM)
            submit = [*GPURUN, "submit", "-n", "2", "-i", inventory, "--image", IMAGE, "--launcher", "torchrun"]
            submit += ["--workdir", f"{folder}/work"]
            by_gpurun(submit, ["1", "0"])  # ships the image
            measure(submit, chosen)
    finally:
        run([*GPURUN, "lab", "down", "--name", LAB, "--purge"])


def measure(submit: list[str], chosen: argparse.Namespace) -> None:
    ratios: dict[str, list[float]] = {"wall_s": [], "cpu_s": []}
    for _ in range(chosen.pairs):
        arguments = [str(chosen.epochs), str(time.time() + chosen.ahead)]
        with ThreadPoolExecutor() as pool:
            hand, mine = pool.submit(by_hand, arguments), pool.submit(by_gpurun, submit, arguments)
        told = {"by hand": hand.result(), "gpurun": mine.result()}
        print(
            {who: {name: round(value, 1) for name, value in found.items()} for who, found in told.items()}, flush=True
        )
        for name, values in ratios.items():
            values.append(mine.result()[name] / hand.result()[name])
    for name, values in ratios.items():
        print(f"{name}: gpurun / by hand, median of pairs {statistics.median(values):.2f}, each", end=" ")
        print(*(f"{value:.2f}" for value in values))


if __name__ == "__main__":
    main()
