"""Checks of one host: Docker, folder, interface, HCAs, GPUs, names, and what the site's own program says."""

from __future__ import annotations

import ipaddress
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from gpurun.doctor.findings import Finding, Severity, one_line
from gpurun.facts import Gpu, GpuProcess, Hardware, HcaPort, Nic
from gpurun.inventory.folding import fold
from gpurun.inventory.model import Fabric, FabricKind, Host
from gpurun.launch.fabric import (
    LINK_LAYER,
    LOOPBACK,
    ROCE_V2,
    address_kind,
    candidates,
    choose_ports,
    distance,
    split_name,
)
from gpurun.moments import date_time
from gpurun.quantities import count, plural
from gpurun.remote.agent import Agent
from gpurun.state.filesystem import is_shared
from gpurun.state.hosts import Machine

GIB = 1 << 30
LITTLE_SPACE_BYTES = 5 * GIB
NO_SPACE_BYTES = 1 * GIB
"""A training image is 2 to 10 GiB; below 1 GiB not even a container's log fits for long."""

NO_FOLDER_BYTES = 64 << 20
NO_INODES = 256
"""A job's keys, scripts and pipes are a hundred small files; its outputs are more."""

RDMA_MEMLOCK_BYTES = 64 << 20


def check_host(host: Host, fabric: Fabric, found: Hardware) -> Iterator[Finding]:
    """Every check that needs only this host."""
    yield from _sections(host, found)
    yield from check_docker(host, found)
    yield from check_folder(host, found)
    yield from _interface(host, fabric, found)
    yield from _name(host, found)
    if fabric.kind is not FabricKind.TCP:
        yield from _hcas(host, fabric, found)
        yield from _gpudirect(host, found)
        yield from _memlock(host, found)
        yield from _qos(host, fabric, found)


def _sections(host: Host, found: Hardware) -> Iterator[Finding]:
    for section, problem in sorted(found.problems.items()):
        evidence = f"gpurun could not read {section}: {problem}"
        yield Finding(
            "probe",
            Severity.WARNING,
            (host.name,),
            evidence,
            "print all answers of the host: gpurun inventory probe {hosts} --json",
        )


def check_docker(host: Host, found: Hardware) -> Iterator[Finding]:
    """Check the host's container engine."""
    docker = found.docker
    if problem := docker.problem or found.problems.get("docker", ""):
        remedy = "sudo systemctl start docker"
        if "may not use" in problem:
            remedy = f"sudo usermod -aG docker {host.user or 'USER'}, then log in again"
        elif "Podman" in problem:
            remedy = f"remove podman-docker, or name Docker's socket: gpurun inventory set {host.name} docker_host=…"
        elif "does not answer" in problem or not docker.problem:
            remedy = "sudo systemctl restart docker; look for the cause: sudo journalctl -u docker -n 50"
        yield Finding("docker", Severity.ERROR, (host.name,), problem, remedy)
        return
    if docker.has_own_network:
        evidence = f"Docker at {docker.socket} has a network of its own, so other hosts cannot reach ranks on this host"
        remedy = "use the host's system-wide Docker; a job on this host alone can run without a change"
        yield Finding("docker-network", Severity.ERROR, (host.name,), evidence, remedy)
    if host.gpus and not docker.gpu_support:
        evidence = (
            "Docker cannot give GPUs to containers, because Docker has no NVIDIA runtime, CDI device or "
            "container toolkit"
        )
        remedy = (
            "install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure && sudo systemctl restart docker"
        )
        yield Finding("docker-gpu", Severity.ERROR, (host.name,), evidence, remedy)
    if docker.limits_memory is False:
        evidence = "Docker cannot limit the memory of containers, so one job can use all memory of the host"
        remedy = "boot the host with cgroup_enable=memory; rootless Docker needs cgroup v2 with the memory controller"
        yield Finding("memory-limit", Severity.WARNING, (host.name,), evidence, remedy)
    if docker.free_bytes is not None and docker.free_bytes < LITTLE_SPACE_BYTES:
        severity = Severity.ERROR if docker.free_bytes < NO_SPACE_BYTES else Severity.WARNING
        evidence = f"the disk of Docker's folder {docker.root} has only {docker.free_bytes / GIB:.1f} GiB free"
        yield Finding("docker-space", severity, (host.name,), evidence, "docker image prune --all, or add disk space")


def check_folder(host: Host, found: Hardware) -> Iterator[Finding]:
    """Check that jobs can keep their files on the host."""
    if found.folder_problem:
        yield Finding(
            "folder", Severity.ERROR, (host.name,), found.folder_problem, _remedy(host, found.folder_fault, found)
        )
    elif _is_below(found.folder_free_bytes, NO_FOLDER_BYTES) or _is_below(found.folder_free_inodes, NO_INODES):
        left = f"{(found.folder_free_bytes or 0) >> 20} MiB"
        if found.folder_free_inodes is not None:
            left += f" and {count(found.folder_free_inodes, 'inode')}"
        evidence = f"the disk of {found.folder} has only {left} free"
        yield Finding("folder", Severity.ERROR, (host.name,), evidence, _remedy(host, "full", found))
    if is_shared(found.folder_kind):
        evidence = (
            f"{found.folder} is on {found.folder_kind}, which other hosts may share; each host would remove "
            "files of the others"
        )
        remedy = (
            f"run `gpurun inventory set {host.name} folder=DIR`: DIR is a folder on a local disk that the user may "
            "write to"
        )
        yield Finding("shared-folder", Severity.ERROR, (host.name,), evidence, remedy)


_FOLDER_REMEDIES = {
    "denied": "sudo chown -R {user} {folder}, or give the host another folder: gpurun inventory set {host} folder=DIR",
    "full": "free disk space; check: df -h {folder}; df -i {folder}",
    "hangs": "check the disk or file server of the folder: sudo dmesg | tail; df {folder}",
    "read-only": "run: sudo dmesg | grep -iE 'error|remount'; repair the file system, then run: sudo mount -o "
    "remount,rw MOUNT",
}


def _remedy(host: Host, fault: str, found: Hardware) -> str:
    """Return what to do about a folder's fault. The folder is a host's text, and people paste remedies into shells."""
    template = _FOLDER_REMEDIES.get(fault, "look at the folder: ssh {host} ls -ld {folder}")
    return template.format(host=host.name, folder=shlex.quote(found.folder), user=host.user or "USER")


def _is_below(value: int | None, least: int) -> bool:
    return value is not None and value < least


def check_health(host: Host, said: str | None) -> Iterator[Finding]:
    """Check the answer of the site's own ``health`` program.

    Args:
        said: why it failed; None or "" = it passed, or there is none.
    """
    if said:
        remedy = f"repair the reported problem; run the health check again: ssh {host.name} {shlex.join(host.health)}"
        yield Finding("health", Severity.ERROR, (host.name,), said, remedy)


def _interface(host: Host, fabric: Fabric, found: Hardware) -> Iterator[Finding]:
    if "nics" in found.problems or fabric.interface == LOOPBACK:
        return
    nic = found.nic(fabric.interface)
    if nic is None:
        there = ", ".join(nic.name for nic in found.nics) or "none"
        evidence = f"the host has no interface {fabric.interface} (found: {there})"
        remedy = f"give the host another fabric, or correct the interface of fabric {fabric.name} in the inventory"
        yield Finding("interface", Severity.ERROR, (host.name,), evidence, remedy)
        return
    if nic.state not in ("UP", "UNKNOWN"):  # tunnels and some virtual interfaces have no carrier to report
        evidence = f"interface {nic.name} is {nic.state or 'in an unknown state'}"
        yield Finding(
            "interface",
            Severity.ERROR,
            (host.name,),
            evidence,
            f"check the cable, then: sudo ip link set {nic.name} up",
        )
    addresses = plain_addresses(nic)
    if not addresses:
        remedy = f"sudo ip address add ADDRESS/LENGTH dev {nic.name}"
        yield Finding("address", Severity.ERROR, (host.name,), f"interface {nic.name} has no address", remedy)
    elif host.fabric_address and host.fabric_address not in addresses:
        evidence = f"{nic.name} has {', '.join(addresses)}, but the inventory's fabric_address is {host.fabric_address}"
        remedy = f"set the address in the inventory: gpurun inventory set {host.name} fabric_address={addresses[0]}"
        yield Finding("address", Severity.ERROR, (host.name,), evidence, remedy)
    elif not host.fabric_address and all(":" in address for address in addresses):
        evidence = (
            f"{nic.name} has no IPv4 address, only {', '.join(addresses)}, and the inventory has no fabric_address"
        )
        remedy = f"set the address in the inventory: gpurun inventory set {host.name} fabric_address={addresses[0]}"
        yield Finding("ipv6-only", Severity.ERROR, (host.name,), evidence, remedy)


def plain_addresses(nic: Nic) -> tuple[str, ...]:
    """The interface's addresses without their prefix length, IPv4 first."""
    plain = [address.partition("/")[0] for address in nic.addresses]
    return tuple(sorted(plain, key=lambda address: ":" in address))


def _name(host: Host, found: Hardware) -> Iterator[Finding]:
    """Gloo and Open MPI look up their own host's name; a container shares the host's ``/etc/hosts``."""
    if not found.resolves_to:
        return
    own = {address for nic in found.nics for address in plain_addresses(nic)}
    loopback = [address for address in found.resolves_to if _is_loopback(address)]
    if len(loopback) == len(found.resolves_to):
        evidence = f"the host's own name resolves to {', '.join(loopback)}, which no other host can reach"
        remedy = "in /etc/hosts, give the host's name the host's address on the fabric"
        yield Finding("own-name", Severity.WARNING, (host.name,), evidence, remedy)
    elif own and not own & set(found.resolves_to):
        addresses = ", ".join(found.resolves_to)
        evidence = f"the host's own name {found.hostname} resolves to {addresses}, which the host does not have"
        yield Finding("own-name", Severity.WARNING, (host.name,), evidence, "correct /etc/hosts or DNS")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _hcas(host: Host, fabric: Fabric, found: Hardware) -> Iterator[Finding]:
    """Check the ports of the fabric. Jobs use those that work, so the others are an error only if none does.

    If the inventory names no HCAs, a port that jobs do not use is no problem while others work: it may be the second
    port of a card, or a NIC for storage. Of a device that it names without a port, one port that works is enough.
    """
    if "hcas" in found.problems:
        return
    used = {(port.device, port.port) for port in choose_ports(fabric, found) if port.probed is not None}
    wanted = [split_name(name) for name in fabric.hcas] or sorted(used) or [(hca.name, None) for hca in found.hcas]
    if not wanted:
        evidence, remedy = (
            "the host has no RDMA device",
            "load the driver (sudo modprobe mlx5_ib), or give the host a tcp fabric",
        )
        yield Finding("hca", Severity.ERROR, (host.name,), evidence, remedy)
    for device, number in wanted:
        own = {port for name, port in used if name == device}
        for finding in _hca(host, fabric, found, device, own or {number}):
            yield replace(finding, severity=Severity.WARNING) if used else finding
    if found.hcas and "rdma_cm" not in found.infiniband_nodes:
        evidence = "the host has no /dev/infiniband/rdma_cm"
        yield Finding("hca-node", Severity.WARNING, (host.name,), evidence, "sudo modprobe rdma_ucm")


def _hca(host: Host, fabric: Fabric, found: Hardware, device: str, numbers: Set[int | None]) -> Iterator[Finding]:
    """Check ports of a device; None stands for all of them."""
    hca = found.hca(device)
    ports = [port for port in hca.ports if not numbers.isdisjoint((None, port.number))] if hca else []
    if hca is None or not ports:
        named = device if None in numbers else f"{device} port {', '.join(map(str, numbers))}"
        there = ", ".join(hca.name for hca in found.hcas) or "none"
        evidence = f"the host has no RDMA device {named} (found: {there})"
        remedy = f"sudo modprobe mlx5_ib, or correct hcas of fabric {fabric.name} in the inventory"
        yield Finding("hca", Severity.ERROR, (host.name,), evidence, remedy)
        return
    for port in ports:
        yield from _port(host, fabric, device, port)
    if not hca.uverbs or hca.uverbs not in found.infiniband_nodes:
        evidence = f"{device} has no device node in /dev/infiniband"
        yield Finding("hca-node", Severity.ERROR, (host.name,), evidence, "sudo modprobe ib_uverbs")


def _port(host: Host, fabric: Fabric, device: str, port: HcaPort) -> Iterator[Finding]:
    name = f"{device} port {port.number}"
    if port.link_layer != LINK_LAYER[fabric.kind]:
        evidence = f"{name} is {port.link_layer or 'of unknown kind'}, but fabric {fabric.name} is {fabric.kind.value}"
        remedy = (
            f"correct kind or hcas of fabric {fabric.name}, or change the port: mlxconfig -d DEVICE set LINK_TYPE_P1=…"
        )
        yield Finding("hca-link-layer", Severity.ERROR, (host.name,), evidence, remedy)
        return
    if not port.active:
        physical = f", {port.physical_state}" if port.physical_state else ""
        remedy = "check the cable and the switch port"
        if port.state == "INIT" and port.link_layer == "InfiniBand":
            remedy = "the subnet manager does not answer: start opensm, or check the subnet manager of the switch"
        yield Finding("hca-port", Severity.ERROR, (host.name,), f"{name} is {port.state}{physical}", remedy)
        return
    if fabric.kind is FabricKind.ROCE:
        yield from _gids(host, fabric, name, port)


def _gids(host: Host, fabric: Fabric, name: str, port: HcaPort) -> Iterator[Finding]:
    usable = candidates(port.gids, fabric.interface)
    if not usable:
        evidence = f"{name} has no RoCE v2 GID"
        remedy = f"sudo ip address add ADDRESS/LENGTH dev {fabric.interface}; check the RoCE mode with: cma_roce_mode"
        yield Finding("roce-gid", Severity.ERROR, (host.name,), evidence, remedy)
        return
    if fabric.gid_index is not None:
        fixed = next((gid for gid in port.gids if gid.index == fabric.gid_index), None)
        if fixed is None or fixed.kind != ROCE_V2:
            there = "empty" if fixed is None else f"{fixed.kind} {fixed.address}"
            evidence = (
                f"{name}: GID index {fabric.gid_index} of the inventory is {there}, but index "
                f"{usable[0].index} is RoCE v2"
            )
            remedy = f"remove gid_index from fabric {fabric.name}; gpurun then finds the index of each host"
            yield Finding("roce-gid", Severity.ERROR, (host.name,), evidence, remedy)
            return
    if address_kind(usable[0].address) == "link-local":
        evidence = f"{name} has only link-local RoCE v2 GIDs, so the port cannot reach hosts behind a router"
        remedy = f"sudo ip address add ADDRESS/LENGTH dev {fabric.interface}"
        yield Finding("roce-gid", Severity.WARNING, (host.name,), evidence, remedy)


def _gpudirect(host: Host, found: Hardware) -> Iterator[Finding]:
    if found.gpus and not found.peermem and not found.dmabuf:
        evidence = "the host has no GPUDirect RDMA: nvidia_peermem is not loaded, and the driver does not offer DMA-BUF"
        yield Finding("gpudirect", Severity.WARNING, (host.name,), evidence, "sudo modprobe nvidia_peermem")


def _memlock(host: Host, found: Hardware) -> Iterator[Finding]:
    """RDMA pins memory, so the engine must be able to raise the limit of its containers above its own."""
    docker = found.docker
    if docker.can_grant(docker.memlock_bytes, RDMA_MEMLOCK_BYTES):
        return
    limit = f"{(docker.memlock_bytes or 0) >> 10} KiB"
    if found.limits.machine_may_raise is False:
        evidence = f"containers can lock only {limit} of memory, and nobody on this machine may raise the limit"
        yield Finding("memlock", Severity.NOTE, (host.name,), evidence)
        return
    evidence = f"Docker can give containers only {limit} of locked memory, which is too little for RDMA"
    remedy = (
        "set LimitMEMLOCK=infinity under [Service] with `systemctl edit docker`, and restart Docker. "
        "Rootless Docker cannot use RDMA"
    )
    yield Finding("memlock", Severity.ERROR, (host.name,), evidence, remedy)


def _qos(host: Host, fabric: Fabric, found: Hardware) -> Iterator[Finding]:
    nic = found.nic(fabric.interface)
    if nic is None or fabric.kind is not FabricKind.ROCE or fabric.traffic_class is None:
        return
    if nic.trust and nic.trust != "dscp":
        evidence = f"{nic.name} trusts {nic.trust}, but traffic class {fabric.traffic_class} marks packets by DSCP"
        yield Finding("roce-qos", Severity.WARNING, (host.name,), evidence, f"sudo mlnx_qos -i {nic.name} --trust dscp")
    if nic.pfc == ():
        evidence = f"{nic.name} has no priority with flow control, so RoCE loses packets under load"
        remedy = f"sudo mlnx_qos -i {nic.name} --pfc 0,0,0,1,0,0,0,0"
        yield Finding("roce-qos", Severity.WARNING, (host.name,), evidence, remedy)


# Check that hosts can resolve each other's names. Pure.


NEIGHBOURS = 31
"""Each host looks up this many others, those that follow it in the list."""

Lookups = Mapping[str, Mapping[str, Sequence[str] | None]]
"""Host → name → addresses; an empty list if the name does not resolve, None if there was no answer in time."""


def wanted(hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return host → the names that it should look up."""
    doubled = (*hosts, *hosts)
    reach = min(NEIGHBOURS, len(hosts) - 1)
    return {host: doubled[at + 1 : at + 1 + reach] for at, host in enumerate(hosts)}


def judge(lookups: Lookups, found: Mapping[str, Hardware], interface: str) -> Iterator[Finding]:
    """Report names that do not resolve, or resolve to an address that their host does not have.

    gpurun gives its containers every name of the gang (``--add-host``), so only programs that users start by hand have
    a problem. A name that resolves to another interface of the right host is common and no problem.
    """
    for host, names in lookups.items():
        unknown = [name for name, addresses in names.items() if addresses is not None and not addresses]
        if unknown:
            whom = fold(unknown) if len(unknown) < len(names) else "any other host's name"
            evidence = f"the host cannot resolve {whom}"
            remedy = "add the hosts of the fabric to /etc/hosts or DNS"
            yield Finding("names", Severity.WARNING, (host,), evidence, remedy)
        for name, addresses in names.items():
            if addresses and name in found:
                yield from _one(host, name, addresses, found[name], interface)


def _one(host: str, name: str, addresses: Sequence[str], target: Hardware, interface: str) -> Iterator[Finding]:
    own = {address for nic in target.nics for address in plain_addresses(nic)}
    if own and not own & set(addresses):
        evidence = f"the host resolves {name} to {', '.join(addresses)}, which {name} does not have"
        yield Finding("names", Severity.WARNING, (host,), evidence, "correct /etc/hosts or DNS")
        return
    nic = target.nic(interface)
    if nic and plain_addresses(nic) and not set(plain_addresses(nic)) & set(addresses):
        evidence = f"{name} resolves to {', '.join(addresses)}, which is not the address of {name} on {interface}"
        yield Finding("names", Severity.NOTE, (host,), evidence)


# Run the site's own programs on hosts: ``health`` here; the limit also holds for ``prolog`` and ``epilog``.


LIMIT_S = 60.0
LIMIT_VARIABLE = "GPURUN_HOOK_LIMIT_S"
"""Tests shorten the limit."""
ANSWER_S = 15.0
"""How long a host may take to start a program and to report its end, beyond the program's own time."""


def limit_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return for how many seconds a host lets a hook run before it ends the hook."""
    try:
        return max(0.1, min(LIMIT_S, float(environ.get(LIMIT_VARIABLE, LIMIT_S))))
    except ValueError:
        return LIMIT_S


def ask_health(agent: Agent, host: Host) -> str:
    """Let a host run the site's ``health`` program. Returns why it failed, "" if it passed or there is none.

    Raises:
        HostFailure: the host does not answer.
    """
    if not host.health:
        return ""
    limit = limit_s()
    reply = agent.call("hooks.health", timeout_s=limit + ANSWER_S, argv=list(host.health), limit_s=limit)
    return one_line(reply.value["said"])


# Checks of one host's GPUs. Pure.


MEMORY_TOLERANCE = 0.05
"""Drivers keep a part of the memory to themselves, more with ECC on; the data sheet's figure is never met exactly."""


def check_gpus(host: Host, found: Hardware) -> Iterator[Finding]:
    """Run all checks of GPUs; none for a host without GPUs in the inventory."""
    if not host.gpus:
        return
    if found.gpu_problem:
        yield Finding("gpu-driver", Severity.ERROR, (host.name,), found.gpu_problem, _driver_remedy(found.gpu_problem))
        return
    yield from _count(host, found)
    yield from _identity(host, found)
    for gpu in found.gpus:
        yield from _health(host, gpu)
    yield from strangers(host, found, frozenset(range(len(found.gpus))), Severity.WARNING)


def strangers(host: Host, found: Hardware, gpus: frozenset[int], severity: Severity) -> Iterator[Finding]:
    """Yield GPUs that are used by a process outside any gpurun job."""
    for gpu in found.gpus:
        foreign = foreign_on(gpu)
        if gpu.index in gpus and foreign:
            who = ", ".join(described(process) for process in foreign)
            kill = f"ssh {host.name} kill {' '.join(str(process.pid) for process in foreign)}"
            yield Finding(
                "gpu-stranger",
                severity,
                (host.name,),
                f"GPU {gpu.index} is used by {who}",
                f"ask the owner of the {plural(len(foreign), 'process', 'processes')}, or run: {kill}",
                {host.name: (gpu.index,)},
            )


def foreign_on(gpu: Gpu) -> list[GpuProcess]:
    """Return the processes on a GPU that no gpurun job started."""
    return [process for process in gpu.processes if not process.job]


def described(process: GpuProcess) -> str:
    """Describe a process for people. A host's text: neither printable nor short."""
    name = process.command.split(" ")[0].rsplit("/", 1)[-1] or "a process"
    owner = f" of {process.user}" if process.user else ""
    where = f", container {process.container}" if process.container else ""
    memory = f", {process.memory_mib} MiB" if process.memory_mib is not None else ""
    return f"{name}{owner} (pid {process.pid}{where}{memory})"


def _driver_remedy(problem: str) -> str:
    if problem.startswith("no NVIDIA driver"):
        return "install the NVIDIA driver, or load the driver with `sudo modprobe nvidia`; then check with nvidia-smi"
    if "hangs" in problem:
        return "look for Xid errors: sudo dmesg | grep -i nvrm; reset the GPU or reboot the host"
    if "mismatch" in problem:
        return "reboot the host, because the loaded kernel module is older than the upgraded driver"
    return "run nvidia-smi on the host"


def _count(host: Host, found: Hardware) -> Iterator[Finding]:
    count = len(found.gpus)
    if count != host.gpus:
        remedy = (
            "look for a GPU that fell off the bus: sudo dmesg | grep -i xid; reboot the host, or reseat the GPU"
            if count < host.gpus
            else f"correct the inventory: gpurun inventory set {{hosts}} gpus={count}"
        )
        evidence = f"{plural(count, '1 GPU answers', f'{count} GPUs answer')}, but the inventory says {host.gpus}"
        severity = Severity.ERROR if count < host.gpus else Severity.WARNING
        yield Finding("gpu-count", severity, (host.name,), evidence, remedy)


def _identity(host: Host, found: Hardware) -> Iterator[Finding]:
    generations = sorted({gpu.generation for gpu in found.gpus if gpu.generation})
    if generations and generations != [host.generation]:
        evidence = f"the GPUs are {' and '.join(generations)}, but the inventory says {host.generation}"
        remedy = "correct the inventory: gpurun inventory probe {hosts} --write"
        yield Finding("gpu-generation", Severity.ERROR, (host.name,), evidence, remedy)
    models = sorted({gpu.model for gpu in found.gpus if gpu.model})
    if host.gpu_model and models and models != [host.gpu_model]:
        evidence = f"the GPUs are {' and '.join(models)}, but the inventory says {host.gpu_model}"
        remedy = "correct the inventory: gpurun inventory probe {hosts} --write"
        yield Finding("gpu-model", Severity.WARNING, (host.name,), evidence, remedy)
    least = min((gpu.memory_mib for gpu in found.gpus if gpu.memory_mib), default=None)
    if host.gpu_memory_mib and least and abs(least - host.gpu_memory_mib) > host.gpu_memory_mib * MEMORY_TOLERANCE:
        evidence = f"the GPUs have {least} MiB of memory, but the inventory says {host.gpu_memory_mib} MiB"
        remedy = "correct the inventory: gpurun inventory probe {hosts} --write"
        yield Finding("gpu-memory", Severity.WARNING, (host.name,), evidence, remedy)


def _health(host: Host, gpu: Gpu) -> Iterator[Finding]:
    name, only = f"GPU {gpu.index}", {host.name: (gpu.index,)}

    def finding(check: str, severity: Severity, evidence: str, remedy: str) -> Finding:
        return Finding(check, severity, (host.name,), f"{name}: {evidence}", remedy, only)

    if gpu.problem:
        remedy = (
            f"sudo nvidia-smi --gpu-reset -i {gpu.index}, or else reboot the host; replace the GPU if the error returns"
        )
        yield finding("gpu-lost", Severity.ERROR, gpu.problem, remedy)
    if gpu.ecc_uncorrected:
        remedy = f"drain the host, then: sudo nvidia-smi --gpu-reset -i {gpu.index}"
        errors = f"the GPU reports {count(gpu.ecc_uncorrected, 'uncorrected memory error')} since the driver was loaded"
        yield finding("gpu-ecc", Severity.ERROR, errors, remedy)
    if gpu.remap_failed:
        evidence = "bad rows of the GPU's memory cannot be replaced, because no spare rows are left"
        yield finding("gpu-ecc", Severity.ERROR, evidence, "cordon the host, and replace the GPU")
    if gpu.retirement_pending:
        remedy = f"drain the host, then: sudo nvidia-smi --gpu-reset -i {gpu.index}"
        evidence = "the GPU has bad memory pages or rows, which only a GPU reset takes out of use"
        yield finding("gpu-ecc", Severity.WARNING, evidence, remedy)
    yield from _pcie(host, gpu)
    if gpu.throttle:
        remedy = "check fans, air flow and power supply"
        yield finding(
            "gpu-throttle", Severity.WARNING, f"the GPU's clocks are reduced: {', '.join(gpu.throttle)}", remedy
        )
    if gpu.nvlink_inactive:
        links = ", ".join(map(str, gpu.nvlink_inactive))
        remedy = f"check: nvidia-smi nvlink -s -i {gpu.index}; reseat the NVLink bridge, or reset the GPUs of the host"
        yield finding(
            "gpu-nvlink",
            Severity.WARNING,
            f"NVLink {links} {plural(len(gpu.nvlink_inactive), 'is', 'are')} inactive",
            remedy,
        )


NAMED_WITHIN_S = 30 * 86400.0


def check_named_slow(host: Host, known: Machine | None, now_s: float) -> Iterator[Finding]:
    """Report that jobs of this user have named a host slow in the last 30 days.

    Args:
        known: what the user knows of its machine.
        now_s: seconds since the epoch.
    """
    if known is not None and known.slow_times and now_s - known.slow_s <= NAMED_WITHIN_S:
        evidence = f"jobs named the host slow {count(known.slow_times, 'time')}, last on {date_time(known.slow_s)}"
        remedy = "cordon the host if other hosts run the same job faster, and repair what its job names"
        yield Finding("named-slow", Severity.NOTE, (host.name,), f"{evidence}: {one_line(known.slow_why)}", remedy)


def _pcie(host: Host, gpu: Gpu) -> Iterator[Finding]:
    """Check the link between GPU and host. The generation is only known while the GPU is busy."""
    for what, now, most in (
        ("{} of {} lanes", gpu.pcie_width, gpu.pcie_max_width),
        ("generation {} of {} under load", gpu.pcie_generation, gpu.pcie_max_generation),
    ):
        if now and most and 0 < now < most:
            yield Finding(
                "gpu-pcie", Severity.WARNING, (host.name,),
                f"GPU {gpu.index}: the PCIe link uses {what.format(now, most)}, so copies to and from the GPU are slow",
                f"check: nvidia-smi -q -i {gpu.index} -d PERFORMANCE; then reseat the GPU or its riser",
                {host.name: (gpu.index,)},
            )  # fmt: skip


# Compare a probe's result with the inventory. Pure.


SAME_NODE = 2
"""`distance` classes up to this one do not cross sockets."""


@dataclass(frozen=True)
class Difference:
    """A key of a host where the inventory and the machine disagree. `found` can be written into the inventory."""

    key: str
    stated: object
    found: object


@dataclass(frozen=True)
class ProbedHost(Hardware):
    """A host's hardware, compared with the inventory."""

    differences: tuple[Difference, ...] = ()


def differences(host: Host, fabric: Fabric, found: Hardware) -> Iterator[Difference]:
    """Yield every difference. Skips GPUs if they could not be read or one is lost."""
    for key, value in detected(fabric, found).items():
        stated = getattr(host, key)
        if value is not None and value != stated and not _close(key, stated, value):
            yield Difference(key, stated, value)


def detected(fabric: Fabric, found: Hardware) -> Mapping[str, object]:
    """Return key → value for the keys of a host that the probe knows; None = an inventory cannot express the value.

    Empty if the GPUs could not be read or one is lost.
    """
    if found.gpu_problem or not found.gpus or any(gpu.problem for gpu in found.gpus):
        return {}
    return {
        "gpus": len(found.gpus),
        "generation": _only({gpu.generation for gpu in found.gpus}),
        "gpu_model": _only({gpu.model for gpu in found.gpus}),
        "gpu_memory_mib": min((gpu.memory_mib for gpu in found.gpus if gpu.memory_mib), default=None),
        "nvlink": nvlink_groups(found.gpus) or None,
        "near_hca": _near_hca(fabric, found) or None,
    }


def _only(values: set[str]) -> str | None:
    """Return the one value that all GPUs share; else None, because the inventory cannot express several values."""
    return next(iter(values)) or None if len(values) == 1 else None


def _close(key: str, stated: object, found: object) -> bool:
    if key != "gpu_memory_mib" or not isinstance(stated, int) or not isinstance(found, int):
        return False
    return abs(found - stated) <= stated * MEMORY_TOLERANCE


def nvlink_groups(gpus: tuple[Gpu, ...]) -> tuple[tuple[int, ...], ...]:
    """Return groups of GPUs that NVLink connects, directly or through other GPUs. Single GPUs form no group."""
    group: dict[int, set[int]] = {gpu.index: {gpu.index} for gpu in gpus}
    for gpu in gpus:
        for peer in gpu.nvlink_peers:
            if peer in group and group[peer] is not group[gpu.index]:
                joined = group[peer] | group[gpu.index]
                group.update(dict.fromkeys(joined, joined))
    islands = {id(members): tuple(sorted(members)) for members in group.values() if len(members) > 1}
    return tuple(sorted(islands.values()))


def _near_hca(fabric: Fabric, found: Hardware) -> tuple[int, ...]:
    """Return GPUs that reach a HCA of the fabric without crossing sockets; empty if that is all or none of them."""
    wanted = {split_name(name)[0] for name in fabric.hcas}
    hcas = [hca for hca in found.hcas if hca.name in wanted]
    near = tuple(gpu.index for gpu in found.gpus if any(distance(gpu, hca)[0] <= SAME_NODE for hca in hcas))
    return near if len(near) < len(found.gpus) else ()
