"""The contents of an inventory as frozen values: hosts, racks, fabrics, pools.

Nothing here reads a file or a clock. `gpurun.inventory.read` makes these values from YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from gpurun.documents.plain import shown
from gpurun.quantities import count

SSH_PORT = 22
_NUMBER = re.compile(r"0x[0-9a-f]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,19}")


class FabricKind(str, Enum):
    """The network between ranks on different hosts."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    TCP = "tcp"


@dataclass(frozen=True)
class Fabric:
    """A network that gangs train over.

    Attributes:
        interface: network interface for sockets (Gloo, NCCL bootstrap), such as ``ens1f0``.
        hcas: RDMA devices in use, such as ``mlx5_0`` or ``mlx5_0:1`` (device:port); empty for tcp.
        traffic_class: ``NCCL_IB_TC``, that is DSCP << 2 with ECN bits; None leaves NCCL's default.
        gid_index: fixed ``NCCL_IB_GID_INDEX``; None lets the probe of each host or NCCL decide.
        host_to_host: False when hosts may not open connections to each other for image transfer.
        chains: how many chains of transfers from host to host run in parallel.
    """

    name: str
    kind: FabricKind
    interface: str
    hcas: tuple[str, ...] = ()
    traffic_class: int | None = None
    service_level: int | None = None
    gid_index: int | None = None
    host_to_host: bool = True
    chains: int = 1


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        gpus: number of GPUs, indexed 0 … gpus-1 in the order of NVML and Docker.
        nvlink: groups of GPU indices that NVLink connects, ``((0, 1, 2, 3), (4, 5, 6, 7))``; empty = unknown.
        near_hca: indices of GPUs on the PCI root or NUMA node of the HCA; empty = unknown.
        address: the address that SSH connects to; default: the host's name. ``~/.ssh/config`` may refine it.
        fabric_address: the address that ranks on other hosts use; None = the address of the fabric's interface as the
            host reports it.
        python: the interpreter that runs gpurun's agent on the host; None = ``python3``.
        docker_host: the socket of the host's Docker, ``unix:///…``; None = the default of the SSH user's ``docker``.
        ssh: ``paramiko``, or ``system`` for the ``ssh`` program of this machine; None = gpurun chooses.
        folder: a folder on a local disk of the host for gpurun's files; None = the user's home folder.
        system_memory_mib: the memory that jobs leave free on the host; None = 5 %, at least 1 GiB, at most half.
        data_quota_mib: the most disk space for data sets; None = a quarter of the disk.
        cache_quota_mib: the most disk space for each user's caches of models and kernels; None = jobs get none.
        health: the site's program that decides whether the host is healthy, with its arguments; empty = none.
        prolog: the site's program that runs before the containers of each attempt; empty = none.
        epilog: the site's program that runs after the containers, before the GPUs are free; empty = none.
        burn_in: how many passed checks in a row bring the host back when it was out; None = two.
    """

    name: str
    rack: str
    generation: str
    gpus: int
    fabric: str
    gpu_model: str | None = None
    gpu_memory_mib: int | None = None
    nvlink: tuple[tuple[int, ...], ...] = ()
    near_hca: tuple[int, ...] = ()
    user: str | None = None
    address: str | None = None
    port: int | None = None
    fabric_address: str | None = None
    python: str | None = None
    docker_host: str | None = None
    folder: str | None = None
    data_quota_mib: int | None = None
    health: tuple[str, ...] = ()
    prolog: tuple[str, ...] = ()
    epilog: tuple[str, ...] = ()
    ssh: Literal["paramiko", "system"] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    system_memory_mib: int | None = None
    cache_quota_mib: int | None = None
    burn_in: int | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def machine(self) -> str:
        """SSH's address and port, ``address:port``. Hosts with the same value are one machine, whatever their names."""
        return machine_at(self.address or self.name, self.port or SSH_PORT)


def machine_at(address: str, port: int = SSH_PORT) -> str:
    """Return `Host.machine` for an SSH address. All spellings of one IP address give the same machine."""
    name = address.rstrip(".").lower()
    if ":" in name:
        name = _ipv6(name)
    elif name[:1].isdigit():
        name = _ipv4(name)
    return f"{name}:{port}"


def _ipv6(text: str) -> str:
    from ipaddress import IPv6Address  # noqa: PLC0415  most inventories name their hosts

    try:
        address = IPv6Address(text)
    except ValueError:
        return text
    return str(address.ipv4_mapped or address)


def _ipv4(text: str) -> str:
    """Return ``10.0.0.7`` for each spelling that inet_aton(3) accepts, such as ``10.7``; return names unchanged."""
    numbers = [int(part, 0 if part[1:2] == "x" else 8 if part[0] == "0" else 10)
               for part in text.split(".") if _NUMBER.fullmatch(part)]  # fmt: skip
    missing = 4 - len(numbers)
    if len(numbers) != text.count(".") + 1 or missing < 0:
        return text
    *first, last = numbers
    if any(number > 255 for number in first) or last >= 256 ** (missing + 1):
        return text
    return ".".join(map(str, (*first, *last.to_bytes(missing + 1, "big"))))


@dataclass(frozen=True)
class Rack:
    """A switch domain. `hosts` are names, in the inventory's order."""

    name: str
    hosts: tuple[str, ...]


IdleAction = Literal["end", "preempt", "tell"]


@dataclass(frozen=True)
class Pool:
    """A team's share, in GPUs. `limit` None = no limit; `parent` None = the root.

    Attributes:
        idle_timeout_s: after so long without GPU use, the owner of a job is told; None = as in the pool above.
        idle_grace_s: so much later, `idle_action` follows.
        idle_action: end the job, preempt it, or only tell its owner.
        idle_longer: a job may have a longer time of its own.
    """

    name: str
    reservation: int = 0
    limit: int | None = None
    share: float = 1.0
    parent: str | None = None
    idle_timeout_s: float | None = None
    idle_grace_s: float = 600.0
    idle_action: IdleAction = "end"
    idle_longer: bool = False


def idle_rules(pools: Sequence[Pool], name: str | None) -> Pool:
    """Return the pool whose idle rules jobs of a pool have: the pool itself, or the next above with a time.

    Without such a pool, the rules are the defaults, without a time.
    """
    named, seen = {pool.name: pool for pool in pools}, set[str]()
    while name is not None and name in named and name not in seen:
        if named[name].idle_timeout_s is not None:
            return named[name]
        seen.add(name)
        name = named[name].parent
    return Pool("")


@dataclass(frozen=True)
class Inventory:
    """A whole cluster.

    Attributes:
        hosts: every host, in the file's order.
        ssh_config: an OpenSSH client configuration to use instead of ``~/.ssh/config``; absolute.
        docker_host: the head node's Docker, as in ``DOCKER_HOST``; None = Docker's default.
        outputs_limit_mib: the most outputs of one job that gpurun copies to the head; None = the free disk space of the
            head.
        source: the inventory's file, for messages.
    """

    hosts: tuple[Host, ...]
    racks: tuple[Rack, ...]
    fabrics: Mapping[str, Fabric]
    pools: tuple[Pool, ...] = ()
    ssh_config: str | None = None
    docker_host: str | None = None
    outputs_limit_mib: int | None = None
    source: str = ""

    @cached_property
    def by_name(self) -> Mapping[str, Host]:
        """Map each name to its host."""
        return {host.name: host for host in self.hosts}

    @property
    def total_gpus(self) -> int:
        """The number of GPUs on all hosts."""
        return sum(host.gpus for host in self.hosts)

    @property
    def generations(self) -> tuple[str, ...]:
        """The GPU generations in the inventory, sorted."""
        return tuple(sorted({host.generation for host in self.hosts if host.gpus}))

    def fabric_of(self, host: Host) -> Fabric:
        """Return the fabric that a host's ranks use."""
        return self.fabrics[host.fabric]


# The consistency rules of pools, for the inventory's validation and for the scheduler.


@dataclass(frozen=True)
class Contradiction:
    """A broken rule.

    Attributes:
        pool: the pool that breaks it; None = all pools together.
        allowed: valid values.
    """

    pool: str | None
    message: str
    allowed: tuple[str, ...] = ()


def contradictions(pools: Sequence[Pool], total_gpus: int) -> list[Contradiction]:
    """Return all errors in the pools. Checks the sums only if each single pool is valid.

    Args:
        total_gpus: GPUs of the whole inventory.
    """
    named = {pool.name: pool for pool in pools}
    return [found for pool in pools for found in _alone(pool, named)] or list(_sums(pools, total_gpus))


def _alone(pool: Pool, named: Mapping[str, Pool]) -> Iterator[Contradiction]:
    name = f"pool {pool.name}"
    if pool.parent is not None and pool.parent not in named:
        yield Contradiction(pool.name, f"{name}: there is no pool {shown(pool.parent)}", tuple(named))
    line, parent = [pool.name], pool.parent
    while parent is not None and parent in named and parent not in line:
        line.append(parent)
        parent = named[parent].parent
    if parent == pool.name:
        yield Contradiction(pool.name, f"{name} is its own parent: {' → '.join([*line, parent])}")
    if pool.reservation < 0 or (pool.limit is not None and pool.limit < 0) or not 0 <= pool.share < float("inf"):
        yield Contradiction(pool.name, f"{name}: reservation, limit and share must not be negative")
    elif pool.limit is not None and pool.reservation > pool.limit:
        yield Contradiction(pool.name, f"{name}: reservation {pool.reservation} is above its limit {pool.limit}")
    if pool.idle_timeout_s is None and pool != replace(pool, **_NO_IDLE):
        said = "idle_grace, idle_action and idle_longer need an idle_timeout of the same pool"
        yield Contradiction(pool.name, f"{name}: {said}", ("idle_timeout: 1h",))


_NO_IDLE: Mapping[str, Any] = {
    each.name: each.default for each in fields(Pool) if each.name.startswith("idle_")
}  # fmt: skip


def _sums(pools: Sequence[Pool], total_gpus: int) -> Iterator[Contradiction]:
    children: dict[str | None, list[Pool]] = {}
    for pool in pools:
        children.setdefault(pool.parent, []).append(pool)

    def reserved(pool: Pool) -> int:
        return max(pool.reservation, sum(map(reserved, children.get(pool.name, ()))))

    for pool in pools:
        below = sum(map(reserved, children.get(pool.name, ())))
        if pool.reservation and below > pool.reservation:
            said = f"its children reserve {count(below, 'GPU')}, but its own reservation is {pool.reservation}"
            yield Contradiction(pool.name, f"pool {pool.name}: {said}")
        elif pool.limit is not None and below > pool.limit:
            said = f"its children reserve {count(below, 'GPU')}, but its limit is {pool.limit}"
            yield Contradiction(pool.name, f"pool {pool.name}: {said}")
    together = sum(map(reserved, children.get(None, ())))
    if together > total_gpus:
        yield Contradiction(
            None, f"the pools reserve {count(together, 'GPU')} together, but the inventory has {total_gpus}"
        )
