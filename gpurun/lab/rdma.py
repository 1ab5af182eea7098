"""The RDMA stand-in: the part of sysfs for a RoCE HCA and for the places of GPUs, as a tree of regular files.

The machine's kernel has no RDMA and ``/sys`` is not writable. So programs that read sysfs in the host use another
root, ``$GPURUN_SYSFS``. Tests edit the tree to inject faults. Layout and wording: the kernel's
Documentation/ABI/stable/sysfs-class-infiniband and sysfs-bus-pci.
"""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path

from gpurun.lab.gpus.models import MODELS
from gpurun.lab.gpus.topology import numa_node, pci_address
from gpurun.lab.spec import LabHost

HCA = "mlx5_0"
UVERBS = "uverbs0"
_HCA_PCI = "0000:0f:00.0"
_INTERFACE = "eth0"
_MLX5_CHARACTER_DEVICE = "231:192"  # IB_UVERBS_MAJOR:IB_UVERBS_BASE_MINOR
_GID_TABLE = 8  # entries here; real tables have 256 entries, nearly all empty
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_GPU_CLASS, _HCA_CLASS = "0x030200", "0x020700"
_PEERMEM_VERSION = "535.183.06"


def write_sysfs(root: Path, host: LabHost) -> None:
    """Write a host's tree: its HCA, its GPUs as PCI devices, and ``nvidia_peermem`` as a loaded module."""
    device = root / "devices/pci0000:00" / _HCA_PCI
    _pci_device(device, vendor="0x15b3", kind=_HCA_CLASS, numa=0)
    infiniband = device / "infiniband" / HCA
    _write(infiniband, {"node_type": "1: CA", "fw_ver": "22.36.1010", "hca_type": "MT4125"})
    _write(infiniband, {"node_guid": _guid(host), "sys_image_guid": _guid(host), "board_id": "MT_0000000436"})
    _link(infiniband / "device", device)
    _port(infiniband / "ports/1", host)
    uverbs = device / "infiniband_verbs" / UVERBS
    _write(uverbs, {"ibdev": HCA, "dev": _MLX5_CHARACTER_DEVICE, "abi_version": "1"})
    _link(uverbs / "device", device)
    _write(device / "net" / _INTERFACE, {"address": _mac(host), "addr_assign_type": "0"})
    _link(device / "net" / _INTERFACE / "device", device)
    _link(root / "class/net" / _INTERFACE, device / "net" / _INTERFACE)
    _link(root / "class/infiniband" / HCA, infiniband)
    _link(root / "class/infiniband_verbs" / UVERBS, uverbs)
    _link(root / "bus/pci/devices" / _HCA_PCI, device)
    _gpus(root, host)
    _write(root / "module/nvidia_peermem", {"version": _PEERMEM_VERSION})


def _port(port: Path, host: LabHost) -> None:
    _write(
        port,
        {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "link_layer": "Ethernet",
            "rate": "25 Gb/sec (1X EDR)",
            "lid": "0x0",
            "sm_lid": "0x0",
        },
    )
    mapped = IPv6Address(f"::ffff:{host.address}")
    local = IPv6Address(int(IPv6Address("fe80::")) + int.from_bytes(_interface_id(host), "big"))
    table = {
        0: (local, "IB/RoCE v1"),
        1: (local, "RoCE v2"),
        2: (mapped, "IB/RoCE v1"),
        3: (mapped, "RoCE v2"),
    }
    for index in range(_GID_TABLE):
        address, kind = table.get(index, (None, ""))
        _write(port / "gids", {str(index): address.exploded if address else _EMPTY_GID})
        if address:
            _write(port / "gid_attrs/types", {str(index): kind})
            _write(port / "gid_attrs/ndevs", {str(index): _INTERFACE})
    counters = ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
    _write(port / "counters", dict.fromkeys(counters, "0"))
    _write(port / "hw_counters", dict.fromkeys(("out_of_sequence", "np_cnp_sent", "packet_seq_err"), "0"))


def _gpus(root: Path, host: LabHost) -> None:
    model = MODELS[host.generation]
    for index in range(host.gpus):
        address = pci_address(index)
        numa = numa_node(model, index, host.gpus)
        bridge = "pci0000:00" if numa == 0 else "pci0000:80"
        device = root / "devices" / bridge / address
        _pci_device(device, vendor="0x10de", kind=_GPU_CLASS, numa=numa)
        _link(root / "bus/pci/devices" / address, device)


def _pci_device(device: Path, *, vendor: str, kind: str, numa: int) -> None:
    facts = {"vendor": vendor, "class": kind, "numa_node": str(numa)}
    _write(device, {**facts, "current_link_speed": "16.0 GT/s PCIe", "current_link_width": "16"})


def _interface_id(host: LabHost) -> bytes:
    """Return the EUI-64 of a Mellanox MAC address that ends in the host's number."""
    return bytes((0x0E, 0x42, 0xA1, 0xFF, 0xFE)) + host.number.to_bytes(3, "big")


def _mac(host: LabHost) -> str:
    return "0c:42:a1:" + ":".join(f"{byte:02x}" for byte in host.number.to_bytes(3, "big"))


def _guid(host: LabHost) -> str:
    digits = _interface_id(host).hex()
    return ":".join(digits[place : place + 4] for place in range(0, 16, 4))


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def _link(link: Path, target: Path) -> None:
    """Create a relative link, as in sysfs, because the tree may be mounted anywhere."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(_relative(target, link.parent))


def _relative(target: Path, start: Path) -> str:
    common = next(parent for parent in (start, *start.parents) if target.is_relative_to(parent))
    ups = len(start.relative_to(common).parts)
    return str(Path(*[".."] * ups, target.relative_to(common)))
