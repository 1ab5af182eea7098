"""The simulated hardware of a host: its GPUs, its HCA, and its kernel log, in one folder that the host sees."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpurun.lab import rdma
from gpurun.lab.gpus import state
from gpurun.lab.spec import LabHost

INSIDE = Path("/run/gpurun-lab")
SYSFS = "sys"
KERNEL_LOG = "kmsg"


def write(folder: Path, lab: str, host: LabHost) -> None:
    """Create the folder again: a host starts with healthy hardware."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    state.save(state.healthy(lab, host), folder / state.FILE)
    rdma.write_sysfs(folder / SYSFS, host)
    (folder / KERNEL_LOG).touch()
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def devices(host: LabHost) -> tuple[str, ...]:
    """Return the device nodes below ``/dev`` that Docker's ``--device`` and users of the NVIDIA driver need."""
    gpus = [f"nvidia{index}" for index in range(host.gpus)]
    return (*gpus, "nvidiactl", "nvidia-uvm", f"infiniband/{rdma.UVERBS}", "infiniband/rdma_cm")
