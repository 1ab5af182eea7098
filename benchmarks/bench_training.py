"""Compare training speed under gpurun's rank environment and in a plain script that does the same by hand.

    python benchmarks/bench_training.py --python /opt/torch/bin/python3   # a machine with a GPU: 6 to 8 minutes
    python benchmarks/bench_training.py --python PYTHON                   # without one: tiny networks on the CPU

For each network, two processes measure `--seconds` each, one behind the other: the synthetic benchmark with the
environment of a rank of ``torchrun``, reporting each step to gpurun; and a loop of twenty lines. Both use bf16,
channels last and ``torch.compile`` where there is a GPU, and the batch that the benchmark chose. Each compiles once;
the second finds Inductor's cache warm. Goal: gpurun's rate is at least 0.95 of the plain rate. Exit code 1 if it is
not, on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_gpu import RECIPE, TCP, rank_environment

import gpurun.runtime

GPU_MODELS, CPU_MODELS = "resnet-50,vgg-16,gpt2", "tiny,gpt2-tiny"
GOAL = 0.95
WARM_UP = 15
LEAST_S = 60.0
"""A network is left out if less time than this remains for it."""

PLAIN = """
import argparse, json, sys, time, torch
recipe, model, batch, seconds, warm_up, compiled = sys.argv[1:]
sys.path.insert(0, recipe)
import models, torch_network  # for the network alone; a rank of the recipe trains the same one
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu, chosen = device.type == "cuda", argparse.Namespace(model=model, sequence=models.sequence(model, None))
torch.set_num_threads(1)
torch.manual_seed(7)
torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
torch.set_float32_matmul_precision("high")
net = torch_network.network(chosen).to(device)
inputs, classes = torch_network.synthetic(chosen, int(batch), device)
if on_gpu and inputs.ndim == 4:
    net, inputs = (each.to(memory_format=torch.channels_last) for each in (net, inputs))
if model in models.TRANSFORMERS:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=on_gpu)
else:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
net = torch.compile(net) if compiled == "True" else net

def step():
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        loss = torch.nn.functional.cross_entropy(net(inputs), classes)
    loss.backward()
    optimizer.step()

def wait():
    if on_gpu:
        torch.cuda.synchronize()

def rate(steps):
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return steps / (time.perf_counter() - began)

rate(int(warm_up))
count = max(2, round(float(seconds) * rate(5)))
print(json.dumps({"steps_per_s": rate(count)}))
"""


@dataclass(frozen=True)
class Pair:
    """The rates of one network in items (images or tokens) per second."""

    model: str
    batch: int
    precision: str
    compiled: bool
    unit: str
    by_gpurun: float
    by_hand: float
    mfu: float | None
    device: str
    took_s: float

    @property
    def ratio(self) -> float:
        """gpurun's rate over the plain rate."""
        return self.by_gpurun / self.by_hand


def run(argv: list[str], deadline_s: float, **options: Any) -> str:
    """Run a command and return its stdout."""
    limit_s = max(1.0, deadline_s - time.monotonic())
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=limit_s, **options)
    if done.returncode:
        sys.exit(f"{' '.join(argv[:2])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def rank_figures(chosen: argparse.Namespace, model: str, deadline_s: float) -> dict[str, Any]:
    """Train as a rank of gpurun; returns what the rank wrote."""
    argv = [chosen.python, "benchmark.py", "--model", model, "--seconds", str(chosen.seconds)]
    argv += ["--warmup", str(WARM_UP), *(["--batch", str(chosen.batch)] if chosen.batch else [])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ranks/0/0").mkdir(parents=True)
        runtime = str(Path(gpurun.runtime.__path__[0]))
        own = {"GPURUN_RUN": folder, "GPURUN_RANK_ID": "0/0/0", "GPURUN_OUTPUTS": folder, "PYTHONPATH": runtime}
        run(argv, deadline_s, env=rank_environment(TCP) | own, cwd=RECIPE)
        if not (Path(folder) / "ranks/0/0/m").read_text():
            sys.exit("the rank has not reported to gpurun: the comparison would be wrong")
        found: dict[str, Any] = json.loads((Path(folder) / "rank-0.json").read_text())
        return found


def pair(chosen: argparse.Namespace, model: str, deadline_s: float) -> Pair:
    """Measure one network both ways."""
    began_s = time.monotonic()  # the rank first: it finds the batch
    mine = rank_figures(chosen, model, deadline_s)
    words = [str(RECIPE), model, str(mine["batch"]), str(chosen.seconds), str(WARM_UP), str(mine["compiled"])]
    plain = json.loads(run([chosen.python, "-c", PLAIN, *words], deadline_s))
    unit = "tokens" if "tokens_per_s" in mine else "images"
    items = mine["batch"] * (mine["sequence"] or 1)
    return Pair(
        model, mine["batch"], mine["precision"], mine["compiled"], unit,
        items * len(mine["steps_s"]) / sum(mine["steps_s"]), items * plain["steps_per_s"], mine["mfu"], mine["device"],
        round(time.monotonic() - began_s, 1),
    )  # fmt: skip


def line(found: Pair) -> str:
    """One network's line of the table."""
    way = f"{found.precision}{', compiled' if found.compiled else ''}, batch {found.batch}"
    mfu = "?" if found.mfu is None else f"{found.mfu:.1%}"
    rates = f"gpurun {found.by_gpurun:,.0f}, by hand {found.by_hand:,.0f} {found.unit}/s, ratio {found.ratio:.3f}"
    return f"{found.model} ({way}): {rates}, MFU {mfu}, took {found.took_s:.0f} s"


def main() -> int:
    """Measure all networks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch")
    parser.add_argument("--models", help=f"with commas; default {GPU_MODELS}, on a CPU {CPU_MODELS}")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--batch", type=int, help="default: what the memory holds")
    parser.add_argument(
        "--limit", type=float, default=480.0, help="seconds for all; networks that do not fit are named"
    )
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    chosen = parser.parse_args()
    deadline_s = time.monotonic() + chosen.limit
    asked = "import torch; print(torch.cuda.is_available())"
    on_gpu = run([chosen.python, "-c", asked], deadline_s).strip() == "True"
    if not on_gpu:
        print("no GPU here: tiny networks on the CPU show that this script works, and their ratio is not judged")
    pairs: list[Pair] = []
    for model in (chosen.models or (GPU_MODELS if on_gpu else CPU_MODELS)).split(","):
        if deadline_s - time.monotonic() < LEAST_S + 2 * chosen.seconds:
            print(f"{model}: not measured, {chosen.limit:.0f} s are over")
            continue
        pairs.append(pair(chosen, model, deadline_s))
        print(line(pairs[-1]), flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(each) for each in pairs], indent=1) + "\n")
    print(f"{pairs[0].device if pairs else 'nothing measured'}, {os.cpu_count()} cores; goal {GOAL}")
    return int(on_gpu and any(each.ratio < GOAL for each in pairs))


if __name__ == "__main__":
    sys.exit(main())
