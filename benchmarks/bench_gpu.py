"""Check gpurun's code for GPUs on the GPU of this machine, and measure it: no Docker, no SSH, one GPU.

    .venv/bin/python benchmarks/bench_gpu.py                                  # what NVML answers, and who holds the GPU
    .venv/bin/python benchmarks/bench_gpu.py --python /opt/torch/bin/python3  # also NCCL and the synthetic benchmark

`--python` names a Python with PyTorch for CUDA. The processes that hold the GPU use the driver alone
(``libcuda.so.1``). Ranks have exactly the environment that gpurun gives a rank of ``torchrun``. Without a GPU, it says
so and measures nothing.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpurun.inventory.model import Fabric, FabricKind, Host
from gpurun.jobs.spec import Grant
from gpurun.launch.fabric import fabric_settings
from gpurun.launch.launchers import PlacedGang
from gpurun.launch.launchers.direct import TORCHRUN, environment
from gpurun.node.gpus import find_holders
from gpurun.node.nvml_apart import Nvml
from gpurun.node.probe import probe

RECIPE = Path(__file__).parents[1] / "recipes/synthetic-benchmark"
MODELS = ("resnet-50", "resnet-101", "inception-v3", "vgg-16")
CARD = [(0, "")]

HOLD = """
import ctypes, os, sys, time
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
failed = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context)
if failed or cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 << 30)):
    sys.exit("CUDA does not work here")
import warnings; warnings.simplefilter("ignore")
child = os.fork() if "fork" in sys.argv else None
if child != 0:
    print(child or 0, flush=True)
time.sleep(600)
"""
"""Takes 4 GiB; with ``fork`` it leaves a child behind, as a data loader does."""

ALL_REDUCE = """
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
dist.all_reduce(torch.ones(1 << 20, device="cuda"))
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--python", default=sys.executable, help="a Python with PyTorch for CUDA")
    options.add_argument("--models", default=",".join(MODELS), help="of the synthetic benchmark; with commas")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--interface", default="lo", help="of the fabric")
    options.add_argument("--json", action="store_true", help="one JSON document on stdout, without UUIDs")
    chosen = options.parse_args()
    found = probe.probe_document()
    if not found.get("gpus"):
        print(f"nothing measured, there is no GPU here: {found.get('gpu_problem') or 'NVML knows none'}")
        return
    report: dict[str, Any] = {"machine": machine(found), "nvml": questions(), "holders": held()}
    if run([chosen.python, "-c", "import torch; torch.zeros(1, device='cuda')"]).returncode:
        print(f"{chosen.python} has no PyTorch that works with this GPU: no NCCL, no images/s", file=sys.stderr)
    else:
        report["nccl"] = nccl(chosen.python, chosen.interface)
        report["training"] = [
            trained(chosen, model, tf32) for tf32 in (True, False) for model in chosen.models.split(",") if model
        ]
    print(json.dumps(report, indent=2) if chosen.json else table(report))


def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=300, **options)


# -- NVML ----------------------------------------------------------------------------------------------------


def machine(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe says, without names and numbers of this one machine."""
    kept = ("model", "generation", "memory_mib", "ecc", "ecc_uncorrected", "nvlink_peers", "throttle", "problem")
    gpus = [{key: gpu[key] for key in kept} for gpu in found["gpus"]]
    same = {key: found.get(key) for key in ("driver", "cuda", "kernel", "dmabuf", "peermem", "elapsed_s", "problems")}
    return {**same, "gpus": gpus}


def timed_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return round((time.perf_counter() - began) * 1e3, 2)


def questions() -> dict[str, Any]:
    """How long NVML takes: a new process with its first answer, and questions to one that stands."""

    def first() -> None:
        with Nvml() as nvml:
            nvml.ask(CARD)

    with Nvml() as nvml:
        (idle,) = nvml.ask(CARD)["gpus"]
        warm = [timed_ms(lambda: nvml.ask(CARD)) for _ in range(50)]
    return {"first_ms": min(timed_ms(first) for _ in range(3)), "warm_ms": statistics.median(warm), "idle": idle}


@contextmanager
def holding(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the GPU, and the pid of its child."""
    with subprocess.Popen([sys.executable, "-c", HOLD, *words], stdout=subprocess.PIPE, text=True) as process:
        child = 0
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline() or sys.exit("CUDA does not work here"))
            yield process, child
        finally:
            process.kill()
            if child:
                os.kill(child, 9)


def held() -> dict[str, Any]:
    """Whether gpurun names who holds the GPU, and how soon it is free."""
    found: dict[str, Any] = {}
    with Nvml() as nvml:
        before = pids(nvml)
        with holding() as (process, _):
            found["a process"] = pids(nvml) - before == {process.pid}
            process.kill()
            found["free_ms"] = timed_ms(lambda: until(lambda: pids(nvml) == before))
        with holding("fork") as (process, child):
            process.kill()
            process.wait()
            found["the child of a killed process"] = pids(nvml) - before == {child}
        until(lambda: pids(nvml) == before)
    return found


def pids(nvml: Nvml) -> set[int]:
    users = find_holders(nvml, CARD)
    return {int(one["pid"]) for one in users.holders} | ({-1} if users.problem else set())


def until(is_done: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline:
            sys.exit("the GPU is not free, although nobody of ours holds it")
        time.sleep(0.002)


# -- ranks ---------------------------------------------------------------------------------------------------


def rank_environment(fabric: Fabric) -> dict[str, str]:
    """The environment of the only rank of a gang on this fabric."""
    host = Host(name="here", rack="r1", generation="hopper", gpus=1, fabric=fabric.name)
    gang = PlacedGang(
        "j-00000001.1", (Grant("here", (0,)),), {"here": fabric.interface}, {"here": "127.0.0.1"}, 23022,
        is_tcp=fabric.kind is FabricKind.TCP,
    )  # fmt: skip
    ours = fabric_settings(fabric, host).as_dict() | environment(TORCHRUN, gang, gang.places[0])
    return {**os.environ, **ours}


TCP = Fabric("tcp", FabricKind.TCP, "lo")


def nccl(python: str, interface: str) -> dict[str, Any]:
    """What NCCL makes of each of gpurun's variables: on TCP it must train, on RoCE without HCAs it must refuse."""
    fabrics = {
        "tcp": Fabric("tcp", FabricKind.TCP, interface),
        "roce": Fabric(
            "roce", FabricKind.ROCE, interface, ("none_0",), traffic_class=106, service_level=3, gid_index=3
        ),
    }
    known = known_names(python)
    found: dict[str, Any] = {"version": "", "variables": {}}
    for name, fabric in fabrics.items():
        environ = {**rank_environment(fabric), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET"}
        done = run([python, "-c", ALL_REDUCE], env=environ)
        said = done.stdout + done.stderr
        found[name] = "all_reduce done" if done.returncode == 0 else (re.findall(r"NCCL WARN (.*)", said) or [said])[0]
        version = re.search(r"NCCL version (\S+)", said)
        found["version"] = version[1] if version else found["version"]
        for variable in (each for each in fabric_settings(fabric, Host("h", "r", "g", 1, name)).as_dict()):
            if variable.startswith("NCCL_"):
                printed = re.search(rf"{variable} set (?:by environment )?to", said) is not None
                found["variables"].setdefault(variable, {"known": variable in known, "printed": False})
                found["variables"][variable]["printed"] |= printed
    return found


def known_names(python: str) -> frozenset[str]:
    """The variables that PyTorch's NCCL library contains."""
    code = "import nvidia.nccl as n; print(list(n.__path__)[0])"
    place = run([python, "-c", code]).stdout.strip()
    data = b"".join(file.read_bytes() for file in Path(place or "/nowhere").glob("lib/libnccl.so*"))
    return frozenset(name.decode() for name in re.findall(rb"NCCL_[A-Z0-9_]+", data))


def trained(chosen: argparse.Namespace, model: str, tf32: bool) -> dict[str, Any]:
    """One network's figures as in 2017, with and without TF32."""
    environ = rank_environment(TCP)
    argv = [chosen.python, "benchmark.py", "--model", model, "--batch", str(chosen.batch), "--steps", str(chosen.steps)]
    argv += ["--as-2017", "--precision", "tf32" if tf32 else "fp32"]
    with tempfile.TemporaryDirectory() as outputs:
        environ["GPURUN_OUTPUTS"] = outputs
        done = run([*argv, "--warmup", "15"], env=environ, cwd=RECIPE)
        if done.returncode:
            return {"model": model, "tf32": tf32, "failed": done.stderr[-500:]}
        said = json.loads((Path(outputs) / "rank-0.json").read_text())
    kept = ("images_per_s", "step_s", "step_s_spread", "compute_s", "gpu_memory_mib", "device", "versions")
    return {"model": model, "tf32": tf32, **{key: said[key] for key in kept}}


# -- the table -----------------------------------------------------------------------------------------------


def table(report: Mapping[str, Any]) -> str:
    at, nvml = report["machine"], report["nvml"]
    lines = [f"{gpu['model']}, {gpu['memory_mib']} MiB, {gpu['problem'] or 'no problem'}" for gpu in at["gpus"]]
    lines += [f"driver {at['driver']}, CUDA {at['cuda']}; the probe took {at['elapsed_s']} s"]
    lines += [f"NVML: {nvml['first_ms']:.0f} ms with its process, then {nvml['warm_ms']:.2f} ms a question"]
    lines += [f"holders: {key}: {value}" for key, value in report["holders"].items()]
    if "nccl" in report:
        said = report["nccl"]
        lines += [f"NCCL {said['version']}: on tcp {said['tcp']}; on roce without HCAs: {said['roce']}"]
        lines += [
            f"  {name}: {'known' if state['known'] else 'UNKNOWN'}{', printed' if state['printed'] else ''}"
            for name, state in said["variables"].items()
        ]
        lines += [f"{'images/s':>32} {'step ms':>8} {'p10-p90':>15} {'MiB':>7}"]
        lines += [row(each) for each in report["training"]]
    return "\n".join(lines)


def row(each: Mapping[str, Any]) -> str:
    name = f"{each['model']} {'TF32' if each['tf32'] else 'fp32'}"
    if "failed" in each:
        return f"{name:<20} failed: {each['failed'].strip().splitlines()[-1:]}"
    low, high = (f"{1e3 * value:.1f}" for value in each["step_s_spread"])
    step_ms, memory = 1e3 * each["step_s"], each["gpu_memory_mib"]
    return f"{name:<20} {each['images_per_s']:>11.0f} {step_ms:>8.1f} {low + '-' + high:>15} {memory:>7}"


if __name__ == "__main__":
    main()
