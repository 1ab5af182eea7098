"""Decide the environment and Docker flags that a job's container needs on one host, for its fabric. Pure.

The user's own value has precedence, then the inventory's, then the probe of *that* host, then a documented default.
Each setting has its reason and its source, so that a person can understand and override it. Without a probe, the
inventory alone gives working settings.

Hosts of one gang may need different values (HCA names, GID indices). But horovodrun sends rank 0's environment to every
rank, which overrides the environment of the other containers (`gloo_run._slot_info_to_command_fn`, ``mpirun -x``), and
puts its own ``NCCL_SOCKET_IFNAME`` and ``HOROVOD_GLOO_IFACE`` last. `gpurun.launch.rank` solves this: every rank has
the same argv prefix, a script on each host that exports that host's values at the very end.

Sources: NCCL user guide, "Environment Variables" and "Troubleshooting"; Horovod 0.28.1 `runner/gloo_run.py`,
`runner/mpi_run.py` and docs "Horovod with MPI"; UCX FAQ (`docs/source/faq.md`); Open MPI FAQ on TCP; Docker `docker
run` reference. Each function names the part it follows.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpurun.facts import Gid, Gpu, Hardware, Hca, HcaPort
from gpurun.inventory.model import Fabric, FabricKind, Host

# Which GID the RoCE ports of a host should use. Pure.


ROCE_V2 = "RoCE v2"
_KINDS = ("ipv4", "ipv6")
"""Kinds of addresses that are a port's own, the one that reaches most hosts first."""
_ORDER = (*_KINDS, "link-local")


@dataclass(frozen=True)
class GidChoice:
    """What NCCL and UCX are told about GIDs on one host; nothing, if all fields are empty.

    Attributes:
        index: the index for all ports.
        address_family: the kind of address that NCCL looks for itself, if no index fits all ports.
        ucx_too: UCX's own automatic choice would miss this GID as well.
    """

    index: int | None = None
    address_family: str = ""
    reason: str = ""
    ucx_too: bool = False


def choose_gid(fabric: Fabric, tables: Sequence[tuple[Gid, ...]]) -> GidChoice:
    """Choose for one host.

    Before 2.21, NCCL uses index 0, which is RoCE v1 on most hosts. Since 2.21 it finds an index itself, the first
    RoCE v2 entry of NCCL_IB_ADDR_FAMILY, also that of a VLAN, and skips link-local addresses (`net_ib/connect.cc`,
    `ncclUpdateGidIndex`, `validGid`). An image does not say which NCCL runs in it: its ``NCCL_VERSION`` is the base
    image's, and PyTorch brings its own. The right index harms no version, so gpurun always sets it.

    ``NCCL_IB_GID_INDEX`` is one number for all ports. If they need different ones, only NCCL since 2.21 can do it.

    Args:
        tables: the GIDs of each port that the job uses.
    """
    best = [candidates(gids, fabric.interface) for gids in tables]
    if not best or not all(best):
        return GidChoice()
    common = common_kind(tables, fabric)
    first = next((gid for gid in best[0] if address_kind(gid.address) == common), best[0][0])
    kind = address_kind(first.address)
    indices = [{gid.index for gid in gids if address_kind(gid.address) == kind} for gids in best]
    shared = set.intersection(*indices)
    if not shared and kind != "link-local":
        why = "the ports need different GID indices, which NCCL before 2.21 cannot use"
        return GidChoice(address_family="AF_INET6" if kind == "ipv6" else "AF_INET", reason=why)
    index = first.index if first.index in shared or not shared else min(shared)
    address = next((gid.address for gid in best[0] if gid.index == index), first.address)
    return GidChoice(index, reason=f"RoCE v2 GID {address} is at index {index}", ucx_too=kind == "link-local")


def has_gid(gids: tuple[Gid, ...], fabric: Fabric) -> bool:
    """Return whether a port has a GID that a job can use: at the inventory's index, if it fixes one."""
    if fabric.gid_index is None:
        return bool(candidates(gids, fabric.interface))
    return any(gid.index == fabric.gid_index and gid.kind == ROCE_V2 for gid in gids)


def kinds_of(gids: tuple[Gid, ...], fabric: Fabric) -> frozenset[str]:
    """Return the kinds of addresses by which a job can use a port."""
    return frozenset(address_kind(gid.address) for gid in candidates(gids, fabric.interface))


def common_kind(tables: Sequence[tuple[Gid, ...]], fabric: Fabric) -> str:
    """Return the kind of address of their own that most ports of a host have; link-local if none has one.

    Where all rails have IPv6 addresses, one port may have an IPv4 address, too: it leads to none of the others.
    """
    found = Counter(kind for gids in tables for kind in kinds_of(gids, fabric))
    most = max(_KINDS, key=lambda kind: found[kind])
    return most if most in found else next(iter(found), "")


def candidates(gids: tuple[Gid, ...], interface: str) -> tuple[Gid, ...]:
    """RoCE v2 entries, best first: the fabric's interface, then IPv4, IPv6, link-local, then lowest index.

    Entries of other interfaces count only if the fabric's own has none: it may be a bond over the HCAs.
    """
    v2 = [gid for gid in gids if gid.kind == ROCE_V2 and address_kind(gid.address)]
    own = [gid for gid in v2 if gid.interface == interface]
    return tuple(sorted(own or v2, key=lambda gid: (_ORDER.index(address_kind(gid.address)), gid.index)))


def address_kind(address: str) -> str:
    """``ipv4`` (mapped), ``ipv6`` or ``link-local``; empty for what is no address."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return ""
    if parsed.ipv4_mapped:
        return "ipv4"
    return "link-local" if parsed.is_link_local else "ipv6"


# Choose the RDMA ports of jobs on one host: the working ports of the fabric. Pure.


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


Source = Literal["inventory", "probe", "default", "user"]

NOFILE = 1_048_576
"""Open files of a container: the kernel's default upper bound (``fs.nr_open``)."""

LOOPBACK, LOOPBACK_ADDRESS = "lo", "127.0.0.1"
"""The interface that ranks of one host use, and its address: each Linux host has them, whatever its network is."""

USER_PREFIXES = ("NCCL_", "UCX_", "OMPI_MCA_", "HOROVOD_GLOO_IFACE")
"""A user's variables with these names count as fabric settings and are shown with them."""


@dataclass(frozen=True)
class Setting:
    """One environment variable, its reason, and its source."""

    name: str
    value: str
    reason: str
    source: Source


@dataclass(frozen=True)
class FabricSettings:
    """The settings of one host's container of a job for its fabric.

    Attributes:
        environment: every variable once, in a stable order.
        docker_flags: devices, capabilities and ulimits for ``docker run``. The plan adds network, shared memory, GPUs
            and
            ``--init``. Never ``--privileged``.
    """

    environment: tuple[Setting, ...]
    docker_flags: tuple[str, ...]

    def beside(self, others: Sequence[Setting]) -> FabricSettings:
        """Return the same with variables that are not the fabric's."""
        return replace(self, environment=(*self.environment, *others))


def fabric_settings(
    fabric: Fabric,
    host: Host,
    facts: Hardware | None = None,
    overrides: Mapping[str, str] | None = None,
) -> FabricSettings:
    """Return the settings of one host for one job.

    Args:
        fabric: the host's fabric in the inventory.
        host: the host; its name appears in reasons that come from its probe.
        facts: the result of this host's probe; None = never probed.
        overrides: the user's own variables; each replaces gpurun's variable of that name.

    Returns:
        Always the same value for the same arguments. Raises nothing: `gpurun.doctor` finds hosts that cannot work
        before a gang starts, and ``NCCL_NET=IB`` makes NCCL itself refuse them.
    """
    if fabric.kind is FabricKind.TCP:
        ports: tuple[ChosenPort, ...] = ()
        chosen = [*_sockets(fabric), *_tcp_only(fabric)]
    else:
        ports = choose_ports(fabric, facts)
        chosen = [*_sockets(fabric), *_rdma(fabric, ports), *_gid(fabric, ports)]
        chosen = [_with_host(setting, host) for setting in chosen]
    return FabricSettings(
        environment=tuple(_apply(chosen, overrides or {})),
        docker_flags=(*_limits(fabric, facts), *_devices(fabric, ports, facts)),
    )


def for_gang(fabric: Fabric, *, is_alone: bool) -> Fabric:
    """Return the part of a fabric that a gang uses: sockets on the loopback, if it is on one host and cannot grow.

    Ranks of one host exchange data over NVLink, PCIe or shared memory, whatever the state of the HCAs is. To force NCCL
    to RDMA would make it fail where no HCA works. They find each other over the loopback, so the fabric's interface
    need not work either; horovodrun itself chooses the loopback for one host (`driver_service.get_common_interfaces`).
    """
    return replace(fabric, kind=FabricKind.TCP, hcas=(), interface=LOOPBACK) if is_alone else fabric


def _why(fabric: Fabric, otherwise: str) -> str:
    return "the gang is on one host" if fabric.interface == LOOPBACK else otherwise


def _with_host(setting: Setting, host: Host) -> Setting:
    if setting.source != "probe":
        return setting
    return replace(setting, reason=f"{setting.reason} (probe of {host.name})")


def _sockets(fabric: Fabric) -> list[Setting]:
    """Set the socket interface for every library that would otherwise choose one itself.

    NCCL "IP network interfaces": an interface that is up but has no route makes NCCL fail or hang; ``=`` matches
    exactly this name, without it `eth1` also matches `eth10`. Horovod 0.28.1 `create_run_envs` sets HOROVOD_GLOO_IFACE
    to the first NIC. Horovod "Hangs due to non-routed network interfaces" recommends the same for Open MPI's
    ``btl_tcp``; Open MPI's FAQ names ``oob_tcp_if_include`` for its own daemons.
    """
    nic = fabric.interface
    why = _why(fabric, f"fabric {fabric.name} uses {nic}")
    return [
        Setting("NCCL_SOCKET_IFNAME", f"={nic}", f"{why}; NCCL uses exactly this interface", "inventory"),
        Setting("HOROVOD_GLOO_IFACE", nic, why, "inventory"),
        Setting("OMPI_MCA_btl_tcp_if_include", nic, f"{why}; for Open MPI's messages", "inventory"),
        Setting("OMPI_MCA_oob_tcp_if_include", nic, f"{why}; for Open MPI's daemons", "inventory"),
    ]


def _tcp_only(fabric: Fabric) -> list[Setting]:
    """Disable RDMA on a TCP fabric, even if there is an RDMA device.

    NCCL_IB_DISABLE: "prevents the IB/RoCE transport from being used by NCCL. Instead, NCCL will fall back to using IP
    sockets". UCX FAQ: ``UCX_NET_DEVICES=eth0`` restricts it to that interface.
    """
    why = _why(fabric, f"fabric {fabric.name} is tcp")
    return [
        Setting("NCCL_IB_DISABLE", "1", why, "inventory"),
        Setting("UCX_NET_DEVICES", fabric.interface, why, "inventory"),
    ]


def _rdma(fabric: Fabric, ports: tuple[ChosenPort, ...]) -> list[Setting]:
    """Set devices, traffic class and service level, and forbid the fallback to sockets.

    NCCL_NET: "Forces NCCL to use a specific network"; otherwise a broken HCA makes it "automatically fall back" to
    sockets, slower by an order of magnitude. NCCL_IB_HCA: "always recommended to add the = prefix", because `mlx5_1`
    alone also matches `mlx5_10`. NCCL_IB_TC and NCCL_IB_SL (both default to 0): the class that the switches are
    configured for; NCCL_IB_FIFO_TC follows NCCL_IB_TC by itself. UCX FAQ has the same as UCX_NET_DEVICES,
    UCX_IB_TRAFFIC_CLASS and UCX_IB_SL.
    """
    found = [
        Setting(
            "NCCL_NET",
            "IB",
            f"fabric {fabric.name} is {fabric.kind.value}: NCCL must not fall back to slow sockets",
            "default",
        )
    ]
    if ports:
        source: Source = "probe" if any(port.probed for port in ports) else "inventory"
        why = "; ".join(dict.fromkeys(port.reason for port in ports))
        found += [
            Setting("NCCL_IB_HCA", "=" + ",".join(port.nccl_name for port in ports), why, source),
            Setting("UCX_NET_DEVICES", ",".join(port.ucx_name for port in ports), why, source),
        ]
    if fabric.traffic_class is not None:
        value, why = str(fabric.traffic_class), f"traffic_class of fabric {fabric.name} (DSCP << 2, ECN bits)"
        found += [Setting(name, value, why, "inventory") for name in ("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS")]
    if fabric.service_level is not None:
        value, why = str(fabric.service_level), f"service_level of fabric {fabric.name}"
        found += [Setting(name, value, why, "inventory") for name in ("NCCL_IB_SL", "UCX_IB_SL")]
    return found


def _gid(fabric: Fabric, ports: tuple[ChosenPort, ...]) -> list[Setting]:
    """Set the GID index on RoCE, from the inventory or the probe (see `fabric_roce.choose_gid`)."""
    if fabric.kind is not FabricKind.ROCE:
        return []
    if fabric.gid_index is not None:
        why = f"gid_index of fabric {fabric.name}"
        names = ("NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX")
        return [Setting(name, str(fabric.gid_index), why, "inventory") for name in names]
    choice = choose_gid(fabric, [port.probed.gids for port in ports if port.probed])
    found = []
    if choice.address_family:
        found.append(Setting("NCCL_IB_ADDR_FAMILY", choice.address_family, choice.reason, "probe"))
    if choice.index is not None:
        found.append(Setting("NCCL_IB_GID_INDEX", str(choice.index), choice.reason, "probe"))
    if choice.index is not None and choice.ucx_too:
        found.append(Setting("UCX_IB_GID_INDEX", str(choice.index), choice.reason, "probe"))
    return found


def _apply(chosen: Iterable[Setting], overrides: Mapping[str, str]) -> Iterable[Setting]:
    ours = list(chosen)
    for setting in ours:
        if setting.name in overrides:
            why = f"set by the job, instead of {setting.value}"
            yield Setting(setting.name, overrides[setting.name], why, "user")
        else:
            yield setting
    known = {setting.name for setting in ours}
    for name in sorted(overrides):
        if name.startswith(USER_PREFIXES) and name not in known:
            yield Setting(name, overrides[name], "set by the job", "user")


def _limits(fabric: Fabric, facts: Hardware | None) -> tuple[str, ...]:
    """Return the limits of a distributed container.

    NCCL "Sharing Data": containers have "limited shared and pinned memory resources" and need ``--shm-size=1g --ulimit
    memlock=-1``. NVIDIA's container guide adds ``--ulimit stack=67108864``: the stack must be finite, because glibc
    falls back to 2 MiB thread stacks if it is unlimited (NCCL_SET_STACK_SIZE). Each queue pair is an open file, and so
    is each tensor that a data loader passes on, hence ``nofile`` on every fabric: the limit of an engine may be 1024.

    An engine without CAP_SYS_RESOURCE refuses to start a container with higher limits than its own hard limits. So
    gpurun does not request limits that the probe has found impossible (doctor reports them). Without a probe, a TCP
    gang requests none of these limits, because it can do without.
    """
    docker = facts.docker if facts is not None else None
    if docker is None:
        raised = [] if fabric.kind is FabricKind.TCP else ["memlock=-1:-1", f"nofile={NOFILE}:{NOFILE}"]
    else:
        raised = ["memlock=-1:-1"] if docker.can_grant(docker.memlock_bytes, -1) else []
        nofile = NOFILE if docker.can_grant(docker.nofile, NOFILE) else docker.nofile
        raised.append(f"nofile={nofile}:{nofile}")
    return tuple(flag for limit in (*raised, "stack=67108864:67108864") for flag in ("--ulimit", limit))


def _devices(fabric: Fabric, ports: tuple[ChosenPort, ...], facts: Hardware | None) -> tuple[str, ...]:
    """Return the device files of the job's own HCAs, and GDRCopy's, nothing else.

    With a folder, ``docker run --device`` passes every device in it. gpurun does that only without a probe, because it
    then does not know which ``uverbsN`` belongs to which HCA. IPC_LOCK lets verbs pin memory for a user who is not
    root.
    """
    if fabric.kind is FabricKind.TCP:
        return ()
    nodes = tuple(dict.fromkeys(port.uverbs for port in ports if port.uverbs))
    complete = bool(ports) and all(port.uverbs for port in ports)
    if facts is None or not complete:
        paths: tuple[str, ...] = ("/dev/infiniband",)
    else:
        shared = tuple(name for name in ("rdma_cm",) if name in facts.infiniband_nodes)
        paths = tuple(f"/dev/infiniband/{name}" for name in (*nodes, *shared))
    if facts is not None and facts.gdrdrv:
        paths = (*paths, "/dev/gdrdrv")
    flags = [flag for path in paths for flag in ("--device", path)]
    return (*flags, "--cap-add", "IPC_LOCK")
