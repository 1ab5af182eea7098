"""The file that the NVML stand-in reads: the properties and the state of each GPU of a host. Edit it to inject faults.

The file is in ini format: one section ``[driver]``, and one section ``[gpu N]`` per GPU. Its path is
``/run/gpurun-lab/gpus.ini`` in the host, and ``hosts/HOST/hardware/gpus.ini`` in the lab's folder on the machine. The
stand-in reads it at every NVML call, so an edit takes effect immediately. ``docs/lab.md`` lists the keys.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path

from gpurun.lab.gpus.models import MODELS
from gpurun.lab.gpus.topology import link_ends, numa_node, pci_address
from gpurun.lab.spec import LabHost

FILE = "gpus.ini"


def healthy(lab: str, host: LabHost) -> ConfigParser:
    """Return the state of a host's GPUs without faults and without load."""
    model = MODELS[host.generation]
    state = ConfigParser(interpolation=None)
    state["driver"] = {"version": model.driver, "cuda": str(model.cuda)}
    for index in range(host.gpus):
        address = pci_address(index)
        state[f"gpu {index}"] = {
            "name": model.name,
            "uuid": _uuid(lab, host.name, index),
            "serial": str(1_320_000_000_000 + host.number * 16 + index),
            "pci": address,
            "pci_id": f"0x{model.pci_device:04x}10de",
            "architecture": str(model.architecture),
            "capability": "{}.{}".format(*model.capability),
            "memory_mib": str(model.memory_mib),
            "numa": str(numa_node(model, index, host.gpus)),
            "nvlink": " ".join(link_ends(model, index, host.gpus)),
            "nvlink_version": str(model.link_version),
            "utilisation": "0",
            "temperature_c": "34",
            "power_w": str(model.power_limit_w // 8),
            "power_limit_w": str(model.power_limit_w),
        }
    return state


def load(path: Path) -> ConfigParser:
    """Read the file of a host."""
    state = ConfigParser(interpolation=None)
    state.read_string(path.read_text())
    return state


def save(state: ConfigParser, path: Path) -> None:
    """Write the file of a host atomically: a reader sees the old state or the new state."""
    draft = path.with_name(f".{path.name}")
    with draft.open("w") as file:
        state.write(file)
    draft.chmod(0o644)
    draft.rename(path)


def change(path: Path, gpu: int, facts: Mapping[str, str]) -> None:
    """Set keys of one GPU, such as ``{"ecc_uncorrected": "3"}`` or ``{"processes": "4711:512"}``."""
    state = load(path)
    state[f"gpu {gpu}"].update(facts)
    save(state, path)


def _uuid(lab: str, host: str, index: int) -> str:
    """Return a GPU's UUID: always the same for the same host and index, like that of a real card."""
    return f"GPU-{uuid.UUID(bytes=hashlib.sha256(f'{lab}/{host}/{index}'.encode()).digest()[:16], version=4)}"
