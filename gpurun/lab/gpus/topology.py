"""Where the GPUs of a host sit: PCI addresses, NUMA nodes, and which of them NVLink joins."""

from __future__ import annotations

from gpurun.lab.gpus.models import GpuModel

SWITCH = "switch"

_FULL_MESH_MOST = 4  # without a switch chip (before NVLink 3) four GPUs can be wired each to each
_SWITCHED_SINCE = 3
_FIRST_BUS = 0x1A
_BUS_STEP = 0x0D


def bus(index: int) -> int:
    """PCI bus number of a GPU: 1a, 27, 34, … so that sixteen of them fit."""
    return _FIRST_BUS + index * _BUS_STEP


def pci_address(index: int) -> str:
    """PCI address as the kernel writes it: ``0000:1a:00.0``."""
    return f"0000:{bus(index):02x}:00.0"


def numa_node(model: GpuModel, index: int, gpus: int) -> int:
    """NUMA node of a GPU: the first half of the GPUs on node 0, the rest on node 1."""
    return index * model.numa_nodes // gpus if gpus > 1 else 0


def nvlink_groups(model: GpuModel, gpus: int) -> tuple[tuple[int, ...], ...]:
    """GPUs that NVLink joins each to each: all of them behind a switch chip, else by fours."""
    if model.links == 0 or gpus < 2:
        return ()
    size = gpus if model.link_version >= _SWITCHED_SINCE else _FULL_MESH_MOST
    groups = (tuple(range(first, min(first + size, gpus))) for first in range(0, gpus, size))
    return tuple(group for group in groups if len(group) > 1)


def link_ends(model: GpuModel, index: int, gpus: int) -> tuple[str, ...]:
    """What each NVLink link of a GPU leads to: ``switch``, or the index of a GPU, dealt out evenly to its peers."""
    for group in nvlink_groups(model, gpus):
        if index in group:
            if model.link_version >= _SWITCHED_SINCE:
                return (SWITCH,) * model.links
            peers = [str(peer) for peer in group if peer != index]
            used = model.links // len(peers) * len(peers) or min(model.links, len(peers))
            return tuple(peers[link % len(peers)] for link in range(used))
    return ()
