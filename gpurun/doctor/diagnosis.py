"""Run every check on a survey and collect the findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.doctor import names, paths
from gpurun.doctor.findings import Finding, Severity, merged
from gpurun.doctor.gang_checks import check_gang, check_shared_folders
from gpurun.doctor.gpu_checks import check_gpus
from gpurun.doctor.host_checks import check_health, check_host
from gpurun.doctor.survey import Survey
from gpurun.errors import AuthenticationFailed, GpurunError, HostKeyMismatch, HostNotReady
from gpurun.inventory.model import Inventory


def diagnose(inventory: Inventory, survey: Survey) -> tuple[Finding, ...]:
    """Return all findings, the worst first. Equal findings of several hosts become one."""
    return merged(_all(inventory, survey))


def _all(inventory: Inventory, survey: Survey) -> Iterator[Finding]:
    for name, error in survey.failures.items():
        yield unreachable(name, error)
    for name, found in survey.hardware.items():
        host = inventory.by_name[name]
        yield from check_gpus(host, found)
        yield from check_host(host, inventory.fabric_of(host), found)
        yield from check_health(host, survey.health.get(name))
    yield from check_gang(inventory, survey.hardware)
    yield from check_shared_folders(survey.hardware, survey.signs)
    for fabric, attempts in survey.attempts.items():
        interface = inventory.fabrics[fabric].interface
        yield from paths.judge(attempts, interface, survey.addresses)
        lookups = {host: found for host, found in survey.lookups.items() if inventory.by_name[host].fabric == fabric}
        yield from names.judge(lookups, survey.hardware, interface)


def unreachable(host: str, error: GpurunError) -> Finding:
    """Return the finding for a host that gpurun could not probe."""
    remedy = error.hint or _REMEDIES.get(type(error)) or f"check power, network and sshd: ssh {host} true"
    check = "folder" if isinstance(error, HostNotReady) and error.kind == "folder" else "ssh"
    return Finding(check, Severity.ERROR, (host,), error.message, remedy)


_REMEDIES: dict[type[GpurunError], str] = {
    HostKeyMismatch: "compare the fingerprint with the key on the host's console, then: gpurun inventory trust HOST",
    AuthenticationFailed: "add your public key to the host's authorized_keys",
    HostNotReady: "install python3 (3.8 or newer) on the host, because gpurun needs Python there",
}
