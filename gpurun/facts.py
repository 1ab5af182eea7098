"""Facts that hosts report: hardware, samples of GPUs, lines of the kernel's log. Checked, frozen values.

Pure: `gpurun.node` finds the facts on the host, `gpurun.doctor` requests and judges them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from gpurun.errors import HostNotReady
from gpurun.msgspec_types import ready
from gpurun.node.claim_rules import Claimant, Refused, Seen, read_claimant, why_live

# Convert a host's JSON documents to values. A host is not trusted: every type is checked.


T = TypeVar("T")


def convert(host: str, kind: type[T], document: object) -> T:
    """Convert a host's JSON document to a dataclass of this kind.

    Ignores unknown keys, so that the head can read a newer node's answer. Missing keys take their defaults.

    Raises:
        HostNotReady: a value has the wrong type; the message names its path.
    """
    try:
        return msgspec.convert(document, ready(kind))
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # a lone surrogate raises ValueError
        raise HostNotReady(f"the host's answer is not valid: {error}", host=host) from None


# The hardware that a probe found on one host, as frozen values, to compare with the inventory.


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
        retirement_pending: whether bad pages or rows of its memory wait for a GPU reset.
        remap_failed: whether bad rows could not be replaced, because no spare rows are left.
        throttle: why clocks are held down now, hardware reasons only.
        pcie_width, pcie_max_width: lanes of its link to the host, and the most that it and its slot allow.
        pcie_generation: the generation of that link; None while the GPU is not busy.
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
    remap_failed: bool | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None


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


# Read a host's report about claims on its GPUs: who holds which GPU, and the evidence. A host is not trusted.


_MOST_TEXT = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}\Z")


@dataclass(frozen=True)
class HeldGpus:
    """Everything that one attempt holds on one host.

    Attributes:
        gpus: the GPUs' indices.
        why: the evidence that the attempt still needs them; "" if there is none: the claim is stale.
        volumes: the names of its claims.
        containers: the ids of its containers.
        since_s: when the first claim was made, by the host's clock, seconds since the epoch; 0 if unknown.
    """

    claimant: Claimant
    gpus: tuple[int, ...] = ()
    why: str = ""
    volumes: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    since_s: int = 0


@dataclass
class _Gathered:
    claimant: Claimant
    gpus: set[int] = field(default_factory=set)
    why: str = ""
    volumes: list[str] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)
    since_s: set[int] = field(default_factory=set)


def held(host: str, document: object) -> tuple[HeldGpus, ...]:
    """Return who holds GPUs of a host, from its answer to ``claims.list``.

    Raises:
        HostNotReady: the answer is not valid.
    """
    seen = convert(host, Seen, document)
    found: dict[tuple[str, str, int], _Gathered] = {}
    for volume in seen.volumes:
        who = _said(volume.claimant)
        one = found.setdefault(who.key, _Gathered(who))
        one.gpus.add(volume.card[0])
        one.volumes.append(_name(host, volume.name))
        one.why = one.why or printable(why_live(volume, seen))
        one.since_s.add(volume.since_s)
    for container in seen.containers:
        who = _said(container.claimant)
        one = found.setdefault(who.key, _Gathered(who))
        one.gpus.update(index for index, _ in container.cards)
        one.containers.append(_name(host, container.id))
        one.why = one.why or printable(f"the job's container {container.id[:12]} is {container.status or 'present'}")
    return tuple(_shown(one) for one in found.values())


def refused(host: str, document: object) -> Iterator[HeldGpus]:
    """Yield the holders of GPUs that a host refused, each once, from the detail of its error ``claimed``.

    Raises:
        HostNotReady: the answer is not valid.
    """
    done = set()
    for each in convert(host, list[Refused], document):
        who = _said(each.holder)
        if who.key not in done:
            done.add(who.key)
            yield _shown(_Gathered(who, {index for index, _ in (each.card, *each.cards)}, printable(each.why)))


def printable(text: str) -> str:
    """Return a host's text without control characters, and shortened."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_TEXT])


def _name(host: str, said: str) -> str:
    """Return a valid name of a Docker volume or container. gpurun shows people commands with such names.

    Raises:
        HostNotReady: the name is not valid.
    """
    if not _NAME.match(said):
        raise HostNotReady(f"the host's answer is not valid: {printable(said)!r} is not a name in Docker", host=host)
    return said


def _said(claimant: Claimant) -> Claimant:
    """Read a claimant as untrusted text, like the labels of a container."""
    return read_claimant(claimant.labels())


def _shown(one: _Gathered) -> HeldGpus:
    gpus = tuple(sorted(index for index in one.gpus if index >= 0))
    since_s = min((each for each in one.since_s if each > 0), default=0)
    return HeldGpus(one.claimant, gpus, one.why, tuple(one.volumes), tuple(one.containers), since_s)


# Samples of a host's GPUs. Pure.


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; None = the GPU does not report this value."""

    index: int
    utilization_percent: int | None = None
    memory_used_mib: int | None = None
    memory_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class HostSample:
    """The samples of one host's GPUs.

    Attributes:
        problem: why the host sent no sample.
        heard_s: the head's monotonic clock when the sample arrived.
    """

    gpus: tuple[GpuSample, ...] = ()
    problem: str = ""
    heard_s: float = 0.0


def sample_from_document(host: str, document: object, heard_s: float) -> HostSample:
    """Convert what ``probe.sample`` yields. Raises HostNotReady if the document is not valid."""
    return replace(convert(host, HostSample, document), heard_s=heard_s)


# Parse lines of the kernel's log that explain why a gang ended: Xid errors, lost GPUs, killed processes, links. Pure.


_ADDRESS = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_XID = re.compile(rf"NVRM: Xid \({_ADDRESS}(?:[. ][^)]{{0,40}})?\): (\d{{1,4}})\b")
_FELL_OFF = re.compile(rf"NVRM: GPU(?: at)? {_ADDRESS}\.[0-7]:? (?:GPU )?has fallen off the bus")
_OOM = re.compile(
    r"oom-kill:constraint=(CONSTRAINT_[A-Z_]+),.*?(?:oom_memcg=([^,]*),)?task_memcg=([^,]*),task=.*,pid=(\d+),uid=\d+"
    r"\s*\Z",
    re.DOTALL,
)
_KILLED = re.compile(r"(Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (\d+) \(")
_LINK_DOWN = re.compile(
    r"[a-z][\w-]{0,30}(?: [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])?:? (?:[\w-]{1,30}: )?([\w.@-]{1,30}): "
    r"(?:NIC )?[Ll]ink (?:is )?[Dd](?:own|OWN)\b"
)
_UNPLUGGED = re.compile(
    r"mlx5_core ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): Port module event(?:\[error\])?: module \d+, "
    r"Cable (?:unplugged|error)"
)
_CONTAINER = re.compile(r"(?:docker-|/docker/)([0-9a-f]{64})(?:\.scope)?(?:/|\Z)")


@dataclass(frozen=True)
class XidLine:
    """The driver reports an error of the GPU at this PCI address: domain, bus, device, such as ``0000:3b:00``."""

    pci: str
    number: int


@dataclass(frozen=True)
class OomLine:
    """The kernel killed a process because memory ran out.

    Attributes:
        limit: the memory limit of the process's container was reached; otherwise the host had no memory left, or the
            group that contains all containers.
        container: the Docker container of the process; "" = the line does not say.
    """

    pid: int
    limit: bool
    container: str


@dataclass(frozen=True)
class LinkLine:
    """A driver reports that a network link went down.

    Attributes:
        device: the interface, or the adapter's PCI address.
    """

    device: str


def parse_kernel_line(text: str) -> XidLine | OomLine | LinkLine | None:
    """Return the meaning of a line of the kernel's log without its prefix; None if it is not relevant."""
    if found := _XID.match(text):
        return XidLine(_pci(found[1]), int(found[2]))
    if found := _FELL_OFF.match(text):
        return XidLine(_pci(found[1]), 79)
    if found := _OOM.match(text):
        container = _CONTAINER.search(found[3])
        has_own = found[2] is None or container is None or container[1] in found[2]
        limit = found[1] == "CONSTRAINT_MEMCG" and has_own
        return OomLine(int(found[4]), limit, container[1] if container else "")
    if found := _KILLED.match(text):
        return OomLine(int(found[2]), found[1].startswith("Memory cgroup"), "")
    if found := _LINK_DOWN.match(text) or _UNPLUGGED.match(text):
        return LinkLine(found[1])
    return None


def same_gpu(pci: str, bus: str) -> bool:
    """Return whether the line's address is that of the GPU that inventory or NVML know as ``0000:3b:00.0``."""
    return bool(bus) and _pci(bus.rpartition(".")[0] or bus) == pci


def _pci(text: str) -> str:
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
