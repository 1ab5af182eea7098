"""GPU models by generation, as NVML describes them (NVIDIA's data sheets; names as ``nvidia-smi -L`` prints)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """The properties that all GPUs of a model share.

    Attributes:
        pci_device: PCI device id, as in pci.ids.
        architecture: NVML's number, ``NVML_DEVICE_ARCH_*`` in nvml.h.
        capability: CUDA compute capability, major and minor.
        links: NVLink links per GPU; 0 = no NVLink.
        link_version: NVLink generation.
        numa_nodes: CPU sockets of the usual machine for this model.
        power_limit_w: board power.
    """

    name: str
    pci_device: int
    architecture: int
    capability: tuple[int, int]
    memory_mib: int
    links: int
    link_version: int
    numa_nodes: int
    power_limit_w: int
    driver: str
    cuda: int


MODELS = {
    "pascal": GpuModel("Tesla P100-SXM2-16GB", 0x15F9, 4, (6, 0), 16384, 4, 1, 2, 300, "535.183.06", 12020),
    "volta": GpuModel("Tesla V100-SXM2-32GB", 0x1DB5, 5, (7, 0), 32768, 6, 2, 2, 300, "535.183.06", 12020),
    "turing": GpuModel("Tesla T4", 0x1EB8, 6, (7, 5), 15360, 0, 0, 1, 70, "535.183.06", 12020),
    "ampere": GpuModel("NVIDIA A100-SXM4-80GB", 0x20B2, 7, (8, 0), 81920, 12, 3, 2, 400, "550.127.08", 12040),
    "hopper": GpuModel("NVIDIA H100 80GB HBM3", 0x2330, 9, (9, 0), 81559, 18, 4, 2, 700, "550.127.08", 12040),
    "blackwell": GpuModel("NVIDIA B200", 0x2901, 10, (10, 0), 183359, 18, 5, 2, 1000, "570.124.06", 12080),
}
