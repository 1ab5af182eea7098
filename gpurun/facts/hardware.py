"""The hardware that a probe found on one host, as frozen values, to compare with the inventory.

`gpurun.node.probe.probe` makes the JSON document on the host. `hardware_from_document` checks it and converts it to
these values. Fields here and keys there have the same names. This module reads no file and no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpurun.facts.documents import convert


@dataclass(frozen=True)
class Gid:
    """One entry in use of a port's GID table.

    Attributes:
        address: the GID as an IPv6 address; ``::ffff:a.b.c.d`` is an IPv4 address's GID.
        kind: ``IB/RoCE v1`` or ``RoCE v2``, as the kernel writes it.
        interface: the network interface it belongs to; None on InfiniBand.
    """

    index: int
    address: str
    kind: str = ""
    interface: str | None = None


@dataclass(frozen=True)
class HcaPort:
    """One port of an RDMA device.

    Attributes:
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``.
        link_layer: ``InfiniBand`` or ``Ethernet`` (then it speaks RoCE).
        rate_gbit: the link's present rate, Gbit/s.
        counters: error counters since the driver was loaded, such as ``symbol_error``.
    """

    number: int
    state: str
    link_layer: str
    rate_gbit: float | None = None
    physical_state: str = ""
    gids: tuple[Gid, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Return whether traffic can flow."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Hca:
    """An RDMA device.

    Attributes:
        pci_path: PCI addresses from the root port down to the device itself.
        numa_node: None when the machine does not say.
        uverbs: its node in /dev/infiniband, such as ``uverbs0``.
        interfaces: network interfaces on the same PCI function.
    """

    name: str
    ports: tuple[HcaPort, ...] = ()
    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
    uverbs: str | None = None
    firmware: str = ""
    board: str = ""
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nic:
    """A network interface.

    Attributes:
        speed_mbit: as the driver reports it; None when it has none (down, or virtual).
        addresses: with prefix length, such as ``10.0.0.1/24``.
        driver: empty for a virtual interface, whose speed means nothing.
        trust: what decides a frame's priority, ``dscp`` or ``pcp``; empty = not known.
        pfc: priorities with flow control switched on; None = not known.
    """

    name: str
    state: str = ""
    mtu: int | None = None
    speed_mbit: int | None = None
    mac: str = ""
    addresses: tuple[str, ...] = ()
    driver: str = ""
    numa_node: int | None = None
    trust: str = ""
    pfc: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    memory_mib: int | None = None
    user: str = ""
    command: str = ""
    container: str = ""
    job: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML numbers it.

    Attributes:
        generation: NVIDIA's architecture name in lower case, such as ``pascal``.
        nvlink_peers: indices of the GPUs that active NVLinks (or an NVSwitch) lead to.
        retired_pages: pages out of use because of memory errors; None = not supported.
        throttle: why clocks are held down now, hardware reasons only.
        problem: what NVML refused to say and why, such as ``GPU is lost``.
    """

    index: int
    model: str = ""
    generation: str = ""
    memory_mib: int | None = None
    uuid: str = ""
    pci_bus: str = ""
    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
    nvlink_peers: tuple[int, ...] = ()
    nvlink_inactive: tuple[int, ...] = ()
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    throttle: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class DockerFacts:
    """The host's container engine.

    Attributes:
        socket: the engine's socket.
        architecture: the architecture of its containers, as ``uname -m`` writes it.
        gpu_support: how containers get GPUs: ``runtime``, ``cdi``, ``hook``, or empty for not at all.
        is_rootless: the engine runs as a user; uid 0 in its containers is that user.
        has_own_network: containers with the "host's" network do not have this host's; None = not known.
        memlock_bytes, nofile: the engine's own hard limits; -1 = unlimited, None = not known.
        may_raise_limits: whether the engine can give containers more than that (CAP_SYS_RESOURCE).
        memory_bytes, cores: all memory and all cores that the engine has for containers; None = not known.
        limits_memory: whether the engine can limit the memory of containers; None = not known.
        problem: why nothing is known, if nothing is.
    """

    version: str = ""
    storage_driver: str = ""
    root: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    gpu_support: str = ""
    socket: str = ""
    architecture: str = ""
    is_rootless: bool = False
    has_own_network: bool | None = None
    memlock_bytes: int | None = None
    nofile: int | None = None
    may_raise_limits: bool | None = None
    memory_bytes: int | None = None
    cores: int | None = None
    limits_memory: bool | None = None
    problem: str = ""

    def can_grant(self, hard_limit: int | None, wanted: int) -> bool:
        """Return whether a container can have this limit (-1 = unlimited). Assumes yes if the answer is not known."""
        if self.may_raise_limits is not False or hard_limit is None or hard_limit == -1:
            return True
        return 0 <= wanted <= hard_limit


@dataclass(frozen=True)
class Limits:
    """Resource limits of an SSH session of the training user; -1 = unlimited.

    Attributes:
        machine_may_raise: whether any process on this host may raise limits; not in most containers.
    """

    memlock_bytes: int | None = None
    nofile: int | None = None
    machine_may_raise: bool | None = None


@dataclass(frozen=True)
class Hardware:
    """One host at one moment.

    Attributes:
        machine_id: what the machine calls itself, whatever its host is called; empty = it does not say.
        clock_s: the host's clock when the probe ran, seconds since 1970.
        clock_offset_s: host's clock minus the head's; None = not measured (stand-alone run).
        clock_error_s: half the round trip that the offset was measured in.
        resolves_to: the addresses the host's own name resolves to on that host.
        gpu_problem: why there is no GPU list: no driver, hung driver, version mismatch.
        peermem: version of the ``nvidia_peermem`` module; empty = not loaded.
        dmabuf: whether driver and kernel can do GPUDirect by DMA-BUF; None = not known.
        infiniband_nodes: names in /dev/infiniband.
        gdrdrv: whether there is /dev/gdrdrv, by which GDRCopy copies small messages of GPUs.
        folder: where gpurun keeps its files there.
        folder_kind: the type of file system that holds it, such as ``ext4`` or ``nfs4``.
        folder_fault: why a job can keep no files there: ``denied``, ``read-only``, ``full``, ``hangs`` or ``broken``.
        folder_problem: the same for people, with the path; empty = a small file could be written there.
        folder_free_bytes, folder_free_inodes: of its file system, for this user; None = not known, or without limit.
        folder_sign: the file that this probe made there.
        folder_signs: all such files there: a host that sees another's has the same folder.
        problems: section → what could not be read and why.
        elapsed_s: how long the probe took on the host.
    """

    host: str
    hostname: str = ""
    machine_id: str = ""
    kernel: str = ""
    python: str = ""
    clock_s: float | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    resolves_to: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    peermem: str = ""
    dmabuf: bool | None = None
    hcas: tuple[Hca, ...] = ()
    nics: tuple[Nic, ...] = ()
    infiniband_nodes: tuple[str, ...] = ()
    gdrdrv: bool = False
    docker: DockerFacts = DockerFacts()
    limits: Limits = Limits()
    folder: str = ""
    folder_kind: str = ""
    folder_fault: str = ""
    folder_problem: str = ""
    folder_free_bytes: int | None = None
    folder_free_inodes: int | None = None
    folder_sign: str = ""
    folder_signs: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    elapsed_s: float | None = None

    def nic(self, name: str) -> Nic | None:
        """The interface of that name, if the host has it."""
        return next((nic for nic in self.nics if nic.name == name), None)

    def hca(self, name: str) -> Hca | None:
        """The RDMA device of that name, if the host has it."""
        return next((hca for hca in self.hcas if hca.name == name), None)


def hardware_from_document(host: str, document: object) -> Hardware:
    """Convert a probe's JSON document. Unknown keys are ignored; missing keys take their defaults.

    Raises:
        HostNotReady: a value has the wrong type; the message names its path.
    """
    return convert(host, Hardware, {**document, "host": host} if isinstance(document, Mapping) else document)


def document_from_hardware(hardware: Hardware) -> dict[str, object]:
    """The JSON document that `hardware_from_document` reads back as the same value."""
    return dataclasses.asdict(hardware)
