"""Print this machine's GPUs in the order of NVML and of CUDA, beside the argv of a container that gpurun would start.

    .venv/bin/python benchmarks/gpu_order.py [--gpus 1,2] [--image IMAGE_WITH_NVIDIA_SMI]

Rank N of a host gets the N-th GPU that CUDA sees. So NVML (which numbers gpurun's grants), CUDA in a rank, and the
container's ``--gpus`` must agree: exit code 1 if they do not. Docker never pulls the image.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise

from gpurun.facts import hardware_from_document
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch.plan import make_plan
from gpurun.node.claim_rules import Claimant
from gpurun.node.probe import probe

CUDA = """
import ctypes, json, uuid
cuda, count, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
assert not cuda.cuInit(0) and not cuda.cuDeviceGetCount(ctypes.byref(count)), "CUDA does not work here"
found = []
for number in range(count.value):
    assert not cuda.cuDeviceGet(ctypes.byref(device), number) and not cuda.cuDeviceGetUuid(name, device)
    found.append("GPU-" + str(uuid.UUID(bytes=name.raw)))
print(json.dumps(found))
"""


def by_cuda(**environ: str) -> list[str] | str:
    """Return the UUIDs in CUDA's order, or why there are none."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    done = subprocess.run(
        [sys.executable, "-c", CUDA], env={**inherited, **environ}, capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout) if not done.returncode else (done.stderr.strip().splitlines() or ["?"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", help="of the grant; with commas. Default: all")
    parser.add_argument("--image", help="an image with nvidia-smi in this machine's Docker engine")
    chosen = parser.parse_args()
    found = hardware_from_document("here", probe.probe_document())
    if not found.gpus:
        print(f"nothing to compare, there is no GPU here: {found.gpu_problem or 'NVML knows none'}")
        return 0
    for gpu in found.gpus:
        print(f"NVML {gpu.index}  {gpu.uuid}  {gpu.pci_bus}  {gpu.model}")
    wanted = [int(word) for word in (chosen.gpus or ",".join(str(gpu.index) for gpu in found.gpus)).split(",")]
    grant = Grant("here", tuple(sorted(wanted)))
    host = Host("here", "r", found.gpus[0].generation or "none", len(found.gpus), "f")
    inventory = Inventory((host,), (Rack("r", ("here",)),), {"f": Fabric("f", FabricKind.TCP, "lo")})
    plan = make_plan(
        claimant=Claimant("j-00000000", 1, "", "nobody", 0, "here"),
        spec=JobSpec("order", "IMAGE", len(grant.gpus), ("nvidia-smi", "-L"), launcher="tasks"), grants=[grant],
        inventory=inventory, accounts={}, ssh_port=23022, hardware={"here": found},
    )  # fmt: skip
    argv = plan.first.run
    pairs = list(pairwise(argv))
    device = next(value for flag, value in pairs if flag == "--gpus")
    shown = ("gpurun.gpus", "gpurun.uuids", "CUDA_")
    kept = [(flag, value) for flag, value in pairs if flag == "--gpus" or value.startswith(shown)]
    print(f"grant {grant.gpus}, engine {found.docker.gpu_support or found.docker.problem or 'unknown'}:")
    for flag, value in kept:
        print(f"  {flag} {value}")
    nvml = [gpu.uuid for gpu in found.gpus]
    orders = {"PCI_BUS_ID": by_cuda(CUDA_DEVICE_ORDER="PCI_BUS_ID"), "CUDA's own": by_cuda()}
    granted = [uuid for at, uuid in enumerate(nvml) if found.gpus[at].index in grant.gpus]
    visible = by_cuda(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=",".join(granted))
    for name, order in orders.items():
        print(f"CUDA, order {name}: {order if isinstance(order, str) else ' '.join(order)}")
    agree = {"CUDA numbers all GPUs as NVML does": orders["PCI_BUS_ID"] == nvml,
             "ranks see the GPUs of the grant, in its order": visible == granted}  # fmt: skip
    if chosen.image:
        argv = ["docker", "run", "--rm", "--pull", "never", "--gpus", device, chosen.image, "nvidia-smi", "-L"]
        listed = subprocess.run(argv, capture_output=True, text=True, check=False)
        print(listed.stdout or listed.stderr, end="")
        seen = [word.strip("()") for word in listed.stdout.split() if word.startswith("GPU-")]
        agree["a container has the GPUs of the grant, in its order"] = seen == granted
    else:
        print("no --image: what Docker does with the argv is not tried")
    for what, holds in agree.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    return 0 if all(agree.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
