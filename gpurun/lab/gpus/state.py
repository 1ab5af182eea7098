"""The file that the NVML stand-in reads: what each GPU of a host is and how it fares, edited to plant faults.

An ini file: one section ``[driver]``, one section ``[gpu N]`` per GPU. In the host it is
``/run/gpurun-lab/gpus.ini``, on the machine ``hosts/HOST/hardware/gpus.ini`` in the lab's folder. It is read
again at every NVML call, so an edit takes effect at once; ``docs/lab.md`` lists the keys.
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
    """All GPUs of a host as they are when nothing is wrong and nothing runs."""
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
    """Write the file of a host in one step: a reader sees the old state or the new one."""
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
    """A GPU's UUID: always the same one for the same place, as a card keeps its own."""
    return f"GPU-{uuid.UUID(bytes=hashlib.sha256(f'{lab}/{host}/{index}'.encode()).digest()[:16], version=4)}"
