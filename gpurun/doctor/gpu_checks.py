"""Checks of one host's GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.doctor.findings import Finding, Severity
from gpurun.facts.hardware import Gpu, GpuProcess, Hardware
from gpurun.inventory.model import Host
from gpurun.quantities.counts import count, plural

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
    if gpu.retirement_pending:
        remedy = f"drain the host, then: sudo nvidia-smi --gpu-reset -i {gpu.index}"
        yield finding(
            "gpu-ecc", Severity.WARNING, "the GPU has bad memory pages, which only a GPU reset takes out of use", remedy
        )
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
