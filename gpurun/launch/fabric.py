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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpurun.facts.hardware import Hardware
from gpurun.inventory.model import Fabric, FabricKind, Host
from gpurun.launch.fabric_hcas import ChosenPort, choose_ports
from gpurun.launch.fabric_roce import choose_gid

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

    def as_dict(self) -> dict[str, str]:
        """Return names and values only."""
        return {setting.name: setting.value for setting in self.environment}

    def beside(self, others: Sequence[Setting]) -> FabricSettings:
        """Return the same with variables that are not the fabric's."""
        return replace(self, environment=(*self.environment, *others))


def settings(
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
