"""Read RDMA devices, PCI paths and driver state from sysfs.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-class-infiniband`` and
``Documentation/ABI/testing/sysfs-class-infiniband`` (``gid_attrs``). Every function takes the root of the tree,
``/sys`` on a real host, so that tests can read recorded trees.
"""

import ipaddress
import os
import re
from typing import Any, Dict, List, Optional, Union

_PCI = re.compile(r"(pci)?[0-9a-f]{4,}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-9a-f])?\Z")
# Counters that only rise when something goes wrong on the wire.
COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")


def read(*parts: str) -> Optional[str]:
    """A file's text without surrounding blanks; None if it is absent or the kernel refuses (an empty GID: EINVAL)."""
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 16).strip()
    except OSError:
        return None


def names(*parts: str) -> List[str]:
    """A folder's entries in natural order (mlx5_2 before mlx5_10); empty if there is no such folder."""
    try:
        entries = os.listdir(os.path.join(*parts))
    except OSError:
        return []
    return sorted(entries, key=_natural)


def _natural(name: str) -> "List[Union[int, str]]":
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def hcas(sysfs: str) -> List[Dict[str, Any]]:
    """Every RDMA device, as `gpurun.facts.hardware.Hca`."""
    nodes = uverbs(sysfs)
    return [_hca(sysfs, name, nodes.get(name)) for name in names(sysfs, "class/infiniband")]


def uverbs(sysfs: str) -> Dict[str, str]:
    """Return device name → its device file in /dev/infiniband."""
    found = {}
    for node in names(sysfs, "class/infiniband_verbs"):
        device = read(sysfs, "class/infiniband_verbs", node, "ibdev")
        if device:
            found[device] = node
    return found


def _hca(sysfs: str, name: str, node: Optional[str]) -> Dict[str, Any]:
    folder = os.path.join(sysfs, "class/infiniband", name)
    return {
        "name": name,
        "ports": [_port(folder, port) for port in names(folder, "ports") if port.isdigit()],
        "pci_path": pci_path(sysfs, os.path.join(folder, "device")),
        "numa_node": numa_node(os.path.join(folder, "device")),
        "uverbs": node,
        "firmware": read(folder, "fw_ver") or "",
        "board": read(folder, "board_id") or "",
        "interfaces": names(folder, "device/net"),
    }


def _port(folder: str, port: str) -> Dict[str, Any]:
    here = os.path.join(folder, "ports", port)
    counters = {name: read(here, "counters", name) for name in COUNTERS}
    return {
        "number": int(port),
        "state": _after_colon(read(here, "state")),
        "physical_state": _after_colon(read(here, "phys_state")),
        "link_layer": read(here, "link_layer") or "",
        "rate_gbit": _rate(read(here, "rate")),
        "gids": _gids(here),
        "counters": {name: int(value) for name, value in counters.items() if value and value.isdigit()},
    }


def _gids(port: str) -> List[Dict[str, Any]]:
    found = []
    for index in names(port, "gids"):
        address = read(port, "gids", index)
        if not index.isdigit() or not address or not set(address) - set("0:"):
            continue
        found.append(
            {
                "index": int(index),
                "address": compressed(address),
                "kind": read(port, "gid_attrs/types", index) or "",
                "interface": read(port, "gid_attrs/ndevs", index) or None,
            }
        )
    return found


def compressed(address: str) -> str:
    """Return a GID in short form: ``::ffff:10.0.0.1``, ``fe80::1``. Returns a text that is not an address as it is."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return "::ffff:%s" % parsed.ipv4_mapped if parsed.ipv4_mapped else parsed.compressed


def pci_path(sysfs: str, device: str) -> List[str]:
    """PCI addresses from the host bridge down to the device behind a sysfs link; empty if it is not on PCI."""
    real = os.path.realpath(device)
    inside = os.path.relpath(real, os.path.realpath(sysfs)).split(os.sep)
    return [part for part in inside if _PCI.match(part)]


def numa_node(device: str) -> Optional[int]:
    """Return the NUMA node; None if the machine has none or does not say (-1)."""
    text = read(device, "numa_node")
    return int(text) if text and text.isdigit() else None


def gpu_places(sysfs: str, gpus: List[Dict[str, Any]]) -> None:
    """Add each GPU's PCI path and NUMA node."""
    for gpu in gpus:
        device = os.path.join(sysfs, "bus/pci/devices", gpu["pci_bus"] or "none")
        gpu["pci_path"] = pci_path(sysfs, device)
        gpu["numa_node"] = numa_node(device)


def peermem(sysfs: str) -> str:
    """The version of the module for GPUDirect RDMA; empty if it is not loaded."""
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if os.path.isdir(os.path.join(sysfs, "module", module)):
            return read(sysfs, "module", module, "version") or "loaded"
    return ""


def dmabuf(proc: str, kernel: str) -> Optional[bool]:
    """Return whether GPUDirect works without that module: open GPU kernel modules and Linux 5.12 or newer.

    Source: NVIDIA GPU Operator documentation, "GPUDirect RDMA", DMA-BUF prerequisites. None without a driver.
    """
    version = read(proc, "driver/nvidia/version")
    if not version:
        return None
    numbers = [int(part) for part in re.findall(r"\d+", kernel)[:2]]
    return "Open Kernel Module" in version and numbers >= [5, 12]


def _after_colon(text: Optional[str]) -> str:
    """``4: ACTIVE`` → ``ACTIVE``."""
    return (text or "").partition(":")[2].strip()


def _rate(text: Optional[str]) -> Optional[float]:
    """``100 Gb/sec (4X EDR)`` → 100.0."""
    match = re.match(r"([0-9.]+) Gb/sec", text or "")
    return float(match.group(1)) if match else None
