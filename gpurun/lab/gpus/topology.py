"""Topology of a host's GPUs: PCI addresses, NUMA nodes, and NVLink connections."""

from __future__ import annotations

from gpurun.lab.gpus.models import GpuModel

SWITCH = "switch"

_FULL_MESH_MOST = 4  # without a switch (before NVLink 3), at most four GPUs are fully connected
_SWITCHED_SINCE = 3
_FIRST_BUS = 0x1A
_BUS_STEP = 0x0D


def bus(index: int) -> int:
    """Return the PCI bus number of a GPU: 1a, 27, 34, … so that sixteen GPUs fit."""
    return _FIRST_BUS + index * _BUS_STEP


def pci_address(index: int) -> str:
    """Return the PCI address in the kernel's format: ``0000:1a:00.0``."""
    return f"0000:{bus(index):02x}:00.0"


def numa_node(model: GpuModel, index: int, gpus: int) -> int:
    """Return the NUMA node of a GPU: node 0 for the first half of the GPUs, node 1 for the rest."""
    return index * model.numa_nodes // gpus if gpus > 1 else 0


def nvlink_groups(model: GpuModel, gpus: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of GPUs that NVLink connects fully: all GPUs behind a switch, otherwise groups of four."""
    if model.links == 0 or gpus < 2:
        return ()
    size = gpus if model.link_version >= _SWITCHED_SINCE else _FULL_MESH_MOST
    groups = (tuple(range(first, min(first + size, gpus))) for first in range(0, gpus, size))
    return tuple(group for group in groups if len(group) > 1)


def link_ends(model: GpuModel, index: int, gpus: int) -> tuple[str, ...]:
    """Return the end of each NVLink link of a GPU: ``switch``, or a peer's index, distributed evenly over the peers."""
    for group in nvlink_groups(model, gpus):
        if index in group:
            if model.link_version >= _SWITCHED_SINCE:
                return (SWITCH,) * model.links
            peers = [str(peer) for peer in group if peer != index]
            used = model.links // len(peers) * len(peers) or min(model.links, len(peers))
            return tuple(peers[link % len(peers)] for link in range(used))
    return ()
