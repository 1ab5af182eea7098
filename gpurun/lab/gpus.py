"""GPU stand-ins: replacements for NVML and the NVIDIA container toolkit on a host without GPUs."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from gpurun.lab.process import lab_alone, run_command
from gpurun.lab.spec import MODELS, LabHost, cache, link_ends, numa_node, pci_address

# The file that the NVML stand-in reads: the properties and the state of each GPU of a host. Edit it to inject faults.


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
            "sm_mhz": str(model.sm_mhz),
            "pcie_width": "16",
            "pcie_max_width": "16",
            "pcie_max_generation": str(model.pcie_generation),
        }
    return state


def load_gpus(path: Path) -> ConfigParser:
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
    state = load_gpus(path)
    state[f"gpu {gpu}"].update(facts)
    save(state, path)


def _uuid(lab: str, host: str, index: int) -> str:
    """Return a GPU's UUID: always the same for the same host and index, like that of a real card."""
    return f"GPU-{uuid.UUID(bytes=hashlib.sha256(f'{lab}/{host}/{index}'.encode()).digest()[:16], version=4)}"


# Build the stand-ins for NVIDIA's software: ``libnvidia-ml.so.1`` from C, and the container hook.


LIBRARY = "libnvidia-ml.so.1"
HOOK = "nvidia-container-runtime-hook"
HOOK_TEXT = """\
#!/bin/sh
# gpurun lab: Docker looks for this program before it accepts --gpus. There is no driver to inject.
exit 0
"""
_SOURCES = Path(__file__).with_name("nvml")
_FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", f"-Wl,-soname,{LIBRARY}")


@dataclass(frozen=True)
class StandIn:
    """The library on this machine, and its path in a host, where the dynamic linker finds it by default."""

    library: Path
    library_in_host: str


def build_stand_in() -> StandIn:
    """Compile the library unless these exact sources are already compiled; takes about a second with gcc.

    Raises:
        LabFailed: gcc failed; the message contains its output.
    """
    sources = sorted(_SOURCES.glob("*.[ch]"))
    content = b"".join(source.read_bytes() for source in sources) + repr(_FLAGS).encode()
    folder = cache() / "lab-stand-in" / hashlib.sha256(content).hexdigest()[:16]
    library, where = folder / LIBRARY, folder / "triplet"
    with lab_alone(folder / "lock"):
        if not library.exists():
            where.write_text(run_command(["gcc", "-print-multiarch"]).strip())
            draft = folder / "draft.so"
            run_command(["gcc", *_FLAGS, *(str(each) for each in sources if each.suffix == ".c"), "-o", str(draft)])
            draft.rename(library)
    return StandIn(library, str(Path("/usr/lib") / where.read_text() / LIBRARY))
