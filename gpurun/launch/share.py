"""Decide what a job's container may use of its host: memory, ``/dev/shm`` and cores. Pure.

A container gets the share of its GPUs: one of eight GPUs, an eighth of the memory and of the cores. The memory is a
hard limit for as long as the container lives. ``/dev/shm`` counts into it. The cores are a weight always, and a limit
only while another job runs on the host (`gpurun.node.job.neighbours`), so that idle cores are used
(docs/decisions/0048-a-neighbour-is-not-killed.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gpurun.facts.hardware import DockerFacts, Hardware
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.spec import LEAST_MEMORY_MIB, Grant, JobSpec
from gpurun.node.gpu.claim_rules import CPUS_LABEL, EVENLY
from gpurun.quantities.counts import plural

LEAST_SYSTEM_MIB = 1024
SYSTEM_PERCENT = 5
"""What a host keeps for itself, if its inventory does not say: this part of its memory, and at least so much, but never
more than half."""
UNKNOWN_SHM_MIB = 1024
"""The size of ``/dev/shm`` if the memory of the host is not known."""
SERVER_GANGS = 8
"""Gangs share a host without GPUs, for their servers. Its memory is promised once if at most so many are there."""
WEIGHT_PER_GPU, MOST_WEIGHT = 1024, 262_144
"""Docker's default weight of a container is 1024, the kernel's largest is 262144 (cgroups(7), ``cpu.shares``)."""
KILLED_FIRST = 1000
"""``oom_score_adj`` of a container that may use more memory than its share: if the host has no memory left, the kernel
kills its processes before those of its neighbours."""


@dataclass(frozen=True)
class HostShare:
    """What a job's container may use of one host.

    Attributes:
        gpus: the job's GPUs there.
        of: all GPUs of the host, also those that its inventory leaves out; 0 = the host has none, and servers share it.
        memory_mib: the hard limit of its memory, `shm_mib` included; None = the memory of the host is not known, or its
            engine cannot limit it.
        shm_mib: the size of ``/dev/shm``. A tmpfs uses only what is written to it.
        cpus: its cores while another job runs there; None = a weight only.
        weight: the weight of its processes when cores are scarce (``--cpu-shares``).
        is_over: the recipe asks for more memory than the share.
        is_even: `cpus` are all cores, and the jobs that run there divide them evenly.
    """

    gpus: int
    of: int
    memory_mib: int | None
    shm_mib: int
    cpus: float | None
    weight: int
    is_over: bool = False
    is_even: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the limits as flags of ``docker run``. Swap adds nothing to the memory."""
        found = ["--cpu-shares", str(self.weight), "--shm-size", f"{self.shm_mib}m"]
        if self.memory_mib is not None:
            found += ["--memory", f"{self.memory_mib}m", "--memory-swap", f"{self.memory_mib}m"]
        if self.is_over:
            found += ["--oom-score-adj", str(KILLED_FIRST)]
        if self.cpus is not None:
            found += ["--label", f"{CPUS_LABEL}={self.cpus:.2f}{EVENLY if self.is_even else ''}"]
        return tuple(found)

    @property
    def words(self) -> str:
        """Return the limits for people."""
        is_all = self.gpus >= self.of
        part = "all" if is_all else f"{self.gpus}/{self.of} of the"
        memory = f"{part} memory" if self.memory_mib is None else f"{size(self.memory_mib)} of memory"
        shm = "half of it" if self.memory_mib is None else f"up to {size(self.shm_mib)} of it"
        cores = f"{part} cores" if self.cpus is None else f"{self.cpus:g} {plural(self.cpus, 'core')}"
        if is_all and not self.is_even:
            return f"{memory} ({shm} in /dev/shm), {cores}"
        evenly = ", divided evenly" if self.is_even else ""
        return f"{memory} ({shm} in /dev/shm), {cores}{evenly} while other jobs run on the host"


def share_of(host: Host, gpus: int, spec: JobSpec, docker: DockerFacts | None, found_gpus: int = 0) -> HostShare:
    """Return the share of a container.

    Args:
        gpus: the job's GPUs on the host.
        found_gpus: how many a probe found there. Another inventory may give those to others that this one leaves out.
        spec: `memory_mib`, `cpus` and `shm_size_mib` take the place of the share. No container gets more than the host
            gives to all containers.
        docker: what the host's engine says of itself; None = not known.
    """
    has_memory = docker is not None and docker.memory_bytes is not None and docker.limits_memory is not False
    usable_mib = _usable_mib(host, docker.memory_bytes >> 20) if has_memory and docker and docker.memory_bytes else None
    of = max(host.gpus, found_gpus) if host.gpus and gpus else 0  # servers have no GPUs
    part = 1.0 if gpus >= of else gpus / of
    fair_mib = (
        None if usable_mib is None else max(LEAST_MEMORY_MIB, int(usable_mib * (part if of else 1 / SERVER_GANGS)))
    )
    memory_mib = fair_mib if spec.memory_mib is None else min(spec.memory_mib, usable_mib or spec.memory_mib)
    shm_mib = spec.shm_size_mib or (UNKNOWN_SHM_MIB if memory_mib is None else max(1, memory_mib // 2))
    return HostShare(
        gpus, of, memory_mib, shm_mib if memory_mib is None else min(shm_mib, memory_mib),
        _cpus(of, part, spec.cpus, None if docker is None else docker.cores),
        weight=min(MOST_WEIGHT, WEIGHT_PER_GPU * max(1, gpus)),
        is_over=memory_mib is not None and fair_mib is not None and memory_mib > fair_mib,
        is_even=not of and spec.cpus is None and docker is not None and docker.cores is not None,
    )  # fmt: skip


def shares(
    spec: JobSpec,
    grants: Sequence[Grant],
    inventory: Inventory,
    hardware: Mapping[str, Hardware] = MappingProxyType({}),
    known: Mapping[str, DockerFacts] = MappingProxyType({}),
) -> dict[str, HostShare]:
    """Return host → share for all hosts of a gang.

    Args:
        hardware: each host's probe.
        known: what is known of the engines of other hosts.
    """
    return {
        grant.host: share_of(
            inventory.by_name[grant.host], len(grant.gpus), spec,
            hardware[grant.host].docker if grant.host in hardware else known.get(grant.host),
            len(hardware[grant.host].gpus) if grant.host in hardware else 0,
        )
        for grant in grants
    }  # fmt: skip


def threads(share: HostShare, ranks: int, cores: int | None) -> int | None:
    """Return how many threads of its own a library may start in each rank (``OMP_NUM_THREADS``).

    OpenMP, MKL and OpenBLAS start a thread for each core of the host, in each rank. With several ranks on a host, that
    is many times too many, also while no other job runs there. torchrun sets 1 for this reason
    (`torch.distributed.run.config_from_args`).

    Args:
        ranks: the job's ranks on the host.
        cores: all cores of the host; None = not known.

    Returns:
        The rank's part of the share, at least 1; None if the rank has the whole host, or if its cores are not known.
    """
    if cores is None or not ranks or (share.cpus is None and not share.of):
        return None
    mine = cores * share.gpus / share.of if share.cpus is None else share.cpus
    each = max(1, int(min(mine, cores) / ranks))
    return each if each < cores else None


def size(mib: int) -> str:
    """Return a size for people and recipes: ``46.2GiB``, ``512MiB``."""
    return f"{mib / 1024:.3g}GiB" if mib >= 1024 else f"{mib}MiB"


def _usable_mib(host: Host, memory_mib: int) -> int:
    """Return the memory of a host for all containers together."""
    system_mib = host.system_memory_mib
    if system_mib is None:
        system_mib = min(max(LEAST_SYSTEM_MIB, memory_mib * SYSTEM_PERCENT // 100), memory_mib // 2)
    return max(LEAST_MEMORY_MIB, memory_mib - system_mib)


def _cpus(of: int, part: float, asked: float | None, cores: int | None) -> float | None:
    """Return the cores while another job runs there; all, to divide evenly, if the host has no GPUs.

    Where there are fewer cores than GPUs, only weights divide them: a limit below one core would slow a job down more
    than it protects another.
    """
    if asked is not None:
        return asked if cores is None else min(asked, float(cores))
    if cores is not None and not of:
        return float(cores)
    if cores is None or part == 1.0 or cores < of:
        return None
    return round(cores * part, 2)


def alike(given: Mapping[str, HostShare]) -> dict[str, list[str]]:
    """Return each different share, for people, with its hosts."""
    hosts: dict[str, list[str]] = {}
    for host, share in given.items():
        hosts.setdefault(share.words, []).append(host)
    return hosts
