"""Choose the RDMA ports of jobs on one host: the working ports of the fabric. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpurun.facts.hardware import Gpu, Hardware, Hca, HcaPort
from gpurun.inventory.model import Fabric, FabricKind
from gpurun.launch.fabric_roce import common_kind, has_gid, kinds_of

LINK_LAYER = {FabricKind.INFINIBAND: "InfiniBand", FabricKind.ROCE: "Ethernet"}


@dataclass(frozen=True)
class ChosenPort:
    """One port for the job.

    Attributes:
        port: None if the inventory names no port and there is no probe.
        probed: the port in the probe; None without one.
        uverbs: its device file in /dev/infiniband, if known.
    """

    device: str
    port: int | None
    reason: str
    probed: HcaPort | None = None
    uverbs: str | None = None

    @property
    def nccl_name(self) -> str:
        """Return the name for NCCL_IB_HCA; without a port it means all ports of the device."""
        return self.device if self.port is None else f"{self.device}:{self.port}"

    @property
    def ucx_name(self) -> str:
        """Return the name for UCX_NET_DEVICES. UCX always needs a port, and single-port devices have port 1."""
        return f"{self.device}:{self.port or 1}"


def choose_ports(fabric: Fabric, facts: Hardware | None) -> tuple[ChosenPort, ...]:
    """Return the ports that every job on the host uses, in the inventory's order, else in the names' natural order.

    They do not depend on the job's GPUs. NCCL and UCX themselves take the ports nearest to a GPU (NCCL guide,
    NCCL_NET_GDR_LEVEL). Gangs on parts of hosts must meet on the same ports, because some fabrics connect each port
    only with its like on other hosts, and NCCL cannot find out (NVIDIA/nccl issues 366, 836).

    If the inventory names no HCAs, these are the ports that work, of HCAs that are the nearest of some GPU of the host:
    a NIC for storage or logins is farther away. On RoCE, ports without an address of their own are left out if others
    have one: the kernel gives each interface that is up a link-local one, which reaches no port that has another kind
    (NVIDIA/nccl issue 769). Without facts, or if none of the fabric's ports works, exactly what the
    inventory says.
    """
    if facts is None:
        return _named(fabric, "hcas of fabric")
    fitting = tuple(_fitting(fabric, facts))
    working = [(hca, port) for hca, port in fitting if _works(fabric, facts, hca, port)]
    reason = "active"
    if not fabric.hcas:
        near = _nearest({hca.name: hca for hca, _ in fitting}.values(), facts.gpus)
        if any(hca.name in near for hca, _ in working):
            working = [(hca, port) for hca, port in working if hca.name in near]
        reason = "active ports, nearest to the host's GPUs" if len(near) < len(facts.hcas) else reason
    if not working:
        return _named(fabric, "no port works on this host, so gpurun uses all hcas of fabric")
    if fabric.kind is FabricKind.ROCE and fabric.gid_index is None:
        kind = common_kind([port.gids for _, port in working], fabric)
        working = [(hca, port) for hca, port in working if kind in kinds_of(port.gids, fabric)]
    return tuple(ChosenPort(hca.name, port.number, reason, port, hca.uverbs) for hca, port in working)


def _fitting(fabric: Fabric, facts: Hardware) -> Iterator[tuple[Hca, HcaPort]]:
    """Yield the ports of the fabric's kind, of the devices that the inventory names (of all, if it names none)."""
    wanted = [split_name(name) for name in fabric.hcas] or [(hca.name, None) for hca in facts.hcas]
    seen = set()
    for device, number in wanted:
        hca = facts.hca(device)
        for port in hca.ports if hca else ():
            fits = number in (None, port.number) and port.link_layer == LINK_LAYER[fabric.kind]
            if hca and fits and (device, port.number) not in seen:
                seen.add((device, port.number))
                yield hca, port


def _works(fabric: Fabric, facts: Hardware, hca: Hca, port: HcaPort) -> bool:
    """Return whether a job can send through a port: it is up, has a device file and, for RoCE, the address to use."""
    if not port.active or hca.uverbs not in facts.infiniband_nodes:
        return False
    return fabric.kind is not FabricKind.ROCE or has_gid(port.gids, fabric)


def split_name(name: str) -> tuple[str, int | None]:
    """``mlx5_0:1`` → (``mlx5_0``, 1); ``mlx5_0`` → (``mlx5_0``, None)."""
    device, _, port = name.partition(":")
    return device, int(port) if port.isdecimal() else None


def distance(gpu: Gpu, hca: Hca) -> tuple[int, int]:
    """Return the distance of a GPU from an HCA; smaller is nearer.

    The classes are NCCL's (NCCL_NET_GDR_LEVEL): PIX and PXB (PCI switches only, fewer hops first), PHB (same
    host bridge), NODE (same NUMA node), SYS (across sockets, and whatever is not known).
    """
    shared = 0
    for one, other in zip(gpu.pci_path, hca.pci_path, strict=False):
        if one != other:
            break
        shared += 1
    if shared > 1:
        return 0, len(gpu.pci_path) + len(hca.pci_path) - 2 * shared
    if shared == 1:
        return 1, 0
    if gpu.numa_node is not None and gpu.numa_node == hca.numa_node:
        return 2, 0
    return 3, 0


def _nearest(hcas: Iterable[Hca], gpus: Iterable[Gpu]) -> frozenset[str]:
    """Return the HCAs that are the nearest of at least one GPU; all, if the place of no GPU is known."""
    candidates = tuple(hcas)
    near: set[str] = set()
    for gpu in gpus:
        if not candidates or (not gpu.pci_path and gpu.numa_node is None):
            continue
        best = min(distance(gpu, hca) for hca in candidates)
        near.update(hca.name for hca in candidates if distance(gpu, hca) == best)
    return frozenset(near or (hca.name for hca in candidates))


def _named(fabric: Fabric, why: str) -> tuple[ChosenPort, ...]:
    return tuple(ChosenPort(*split_name(name), f"{why} {fabric.name}") for name in fabric.hcas)
