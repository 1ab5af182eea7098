"""Choose the RDMA ports of a job on one host: working ports of the fabric, nearest to its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpurun.facts.hardware import Gpu, Hardware, Hca, HcaPort
from gpurun.inventory.model import Fabric, FabricKind

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


def choose_ports(fabric: Fabric, grant_gpus: tuple[int, ...], facts: Hardware | None) -> tuple[ChosenPort, ...]:
    """The ports to use, in the inventory's order, else in the device names' natural order.

    Without facts, or if the probe found none of the fabric's ports working, exactly what the inventory says.
    """
    if facts is None:
        return _named(fabric, "hcas of fabric")
    working = tuple(working_ports(fabric, facts))
    if not working:
        return _named(fabric, "none of them works here; hcas of fabric")
    near = _nearest({hca.name: hca for hca, _ in working}.values(), grant_gpus, facts)
    reason = "active and nearest to the job's GPUs" if len(near) < len(facts.hcas) else "active"
    return tuple(
        ChosenPort(hca.name, port.number, reason, port, hca.uverbs) for hca, port in working if hca.name in near
    )


def working_ports(fabric: Fabric, facts: Hardware) -> Iterable[tuple[Hca, HcaPort]]:
    """Active ports of the fabric's kind, among the devices the inventory names (all, if it names none)."""
    layer = LINK_LAYER[fabric.kind]
    wanted = [split_name(name) for name in fabric.hcas] or [(hca.name, None) for hca in facts.hcas]
    seen = set()
    for device, number in wanted:
        hca = facts.hca(device)
        for port in hca.ports if hca else ():
            fits = number in (None, port.number) and port.active and port.link_layer == layer
            if hca and fits and (device, port.number) not in seen:
                seen.add((device, port.number))
                yield hca, port


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


def _nearest(hcas: Iterable[Hca], grant_gpus: tuple[int, ...], facts: Hardware) -> frozenset[str]:
    candidates = tuple(hcas)
    gpus = [gpu for gpu in facts.gpus if gpu.index in grant_gpus]
    if len(gpus) < len(set(grant_gpus)) or not gpus:
        return frozenset(hca.name for hca in candidates)
    near: set[str] = set()
    for gpu in gpus:
        best = min(distance(gpu, hca) for hca in candidates)
        near.update(hca.name for hca in candidates if distance(gpu, hca) == best)
    return frozenset(near)


def _named(fabric: Fabric, why: str) -> tuple[ChosenPort, ...]:
    return tuple(ChosenPort(*split_name(name), f"{why} {fabric.name}") for name in fabric.hcas)
